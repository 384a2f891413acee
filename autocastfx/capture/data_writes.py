"""The operators ``autocastfx::data`` and ``autocastfx::set_data``: ``x.data`` and ``x.data = new`` as nodes.

``data`` returns a tensor's values with their own version counter, so that autograd does not see writes into them.
``set_data`` gives a tensor the storage of another; views of the old storage, and values saved for backward, keep it.
Both use PyTorch's own attribute, so that a graph does what the model does.
:mod:`autocastfx.runtime.operators.norms` says how these operators are made.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch._subclasses.functional_tensor import FunctionalTensor

from autocastfx.errors import UnsupportedError

_LIBRARY = torch.library.Library("autocastfx", "FRAGMENT")
_LIBRARY.define("data(Tensor(a) self) -> Tensor(a)")
_LIBRARY.define("set_data(Tensor(a!) self, Tensor(a) new_data) -> Tensor(a!)")


def _data(x: Tensor) -> Tensor:
    return x.data


def _set_data(x: Tensor, new_data: Tensor) -> Tensor:
    if TracingContext.try_get() is None:  # is_compiling() is false in kernels that torch 2.11 traces
        x.data = new_data
    elif torch.compiler.is_exporting() or not isinstance(x, FunctionalTensor):  # on abstract tensors
        x.data.copy_(new_data.data)
    else:
        raise UnsupportedError(
            "the model assigns to the .data of a tensor, which torch.compile cannot reproduce exactly. Run the "
            'converted model without torch.compile (enable: inner="eager"), or write into the tensor: '
            "p.data.copy_(new)."
        )
    return x


_LIBRARY.impl("data", _data, "CompositeImplicitAutograd")
_LIBRARY.impl("set_data", _set_data, "CompositeImplicitAutograd")

data = torch.ops.autocastfx.data.default
set_data = torch.ops.autocastfx.set_data.default
READS = (cast("Any", torch.Tensor.data).__get__, cast("Any", torch._C)._autograd._get_data_attr)  # the latter Dynamo's


def keeps_form(old: Any, new: Any) -> bool:
    """True if a graph can hold ``old.data = new``: dtype, device and size stay."""
    return (old.dtype, old.device, old.shape) == (new.dtype, new.device, new.shape)
