"""The operators ``autocastfx::data`` and ``autocastfx::set_data``: ``x.data`` and ``x.data = new`` as nodes of a graph.

``data`` returns a tensor's values with their own version counter, so that autograd does not see writes into them.
``set_data`` gives a tensor the storage of another; views of the old storage, and values saved for backward, keep it.
Both use PyTorch's own attribute, so that a graph does what the model does.
:mod:`autocastfx.runtime.operators.rms_norm` says how these operators are made.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._guards import TracingContext

from autocastfx.errors import UnsupportedError

__all__ = ["data", "set_data"]

_LIBRARY = torch.library.Library("autocastfx", "FRAGMENT")
_LIBRARY.define("data(Tensor(a) self) -> Tensor(a)")
_LIBRARY.define("set_data(Tensor(a!) self, Tensor(a) new_data) -> Tensor(a!)")


def _data(x: Tensor) -> Tensor:
    return x.data


def _set_data(x: Tensor, new_data: Tensor) -> Tensor:
    if TracingContext.try_get() is None:  # is_compiling() is false in kernels that torch 2.11 traces
        x.data = new_data
    elif torch.compiler.is_exporting():  # on abstract tensors
        x.data.copy_(new_data.data)
    else:
        raise UnsupportedError(
            "the model assigns to the .data of a tensor, which torch.compile cannot reproduce exactly. Run the "
            "converted model without torch.compile, or write into the tensor: p.data.copy_(new)."
        )
    return x


_LIBRARY.impl("data", _data, "CompositeImplicitAutograd")
_LIBRARY.impl("set_data", _set_data, "CompositeImplicitAutograd")

data = torch.ops.autocastfx.data.default
set_data = torch.ops.autocastfx.set_data.default
