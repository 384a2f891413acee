"""Collect calls of the listed operators with valid arguments, from torch's own test samples.

The samples (``op_db``; needs the package expecttest) are run and recorded before autograd decomposes composite
operators, as capture records a model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._dispatch.python import enable_pre_dispatch, enable_python_dispatcher
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo import core
from torch.utils import _pytree as pytree

from autocastfx.graph.names import base_name, of_function

aten = torch.ops.aten


@dataclass(frozen=True)
class KernelCall:
    """A call of an ATen overload, with float32 tensors (a few are complex, float64 or 16-bit)."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def is_random(self) -> bool:
        """True if it draws random numbers: on a GPU a kernel of another dtype draws others from the same seed."""
        return torch.Tag.nondeterministic_seeded in self.function.tags

    def named(self) -> dict[str, Any]:
        """Return the arguments by name."""
        names = [argument.name for argument in self.function._schema.arguments]
        return {**dict(zip(names, self.args, strict=False)), **self.kwargs}

    def with_arguments(self, change: Callable[[str, Any], Any]) -> KernelCall:
        """Return the call with each argument replaced by ``change(name, argument)``."""
        changed = {name: change(name, argument) for name, argument in self.named().items()}
        args = tuple(islice(changed.values(), len(self.args)))
        return KernelCall(self.function, args, {name: changed[name] for name in self.kwargs})

    def __call__(self) -> Any:
        return self.function(*self.args, **self.kwargs)


def kernel_calls(ops: Collection[str], device: str, samples: int) -> dict[str, list[KernelCall]]:
    """Collect calls of each op of ``ops``, by base name; ops that no sample calls are left out.

    Args:
        ops: base names of ATen operators.
        device: the tensors' device.
        samples: the most samples of each of torch's test operators, and the most calls of an overload.
    """
    recorder = _Recorder(ops, samples)
    with warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore")
        for module in (common_utils, core):
            stack.enter_context(mock.patch.object(module, "extract_test_fn", _no_test))
        for function, (args, kwargs) in _samples(ops, device, samples):
            with enable_python_dispatcher(), enable_pre_dispatch(), recorder, suppress(Exception):
                function(*args, **kwargs)  # what cannot run says nothing
    return recorder.found


def _no_test() -> None:
    """Stop op_db from searching the stack for a running test at each sample, which takes many milliseconds."""


class _Recorder(SchemaCheckMode):
    """Records calls of the operators asked for, before autograd decomposes them.

    Before autograd torch allows only its own modes; this one's base class does the least.
    """

    def __init__(self, ops: Collection[str], samples: int) -> None:
        super().__init__()
        self._dispatch_key = torch._C.DispatchKey.PreDispatch
        self.ops, self.samples = ops, samples
        self.found: dict[str, list[KernelCall]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = base_name(of_function(func))
        if name in self.ops:
            calls = self.found.setdefault(name, [])
            if sum(call.function is func for call in calls) < self.samples:
                calls.append(KernelCall(func, *pytree.tree_map(_copied, (tuple(args), dict(kwargs)))))
        return func(*args, **kwargs)


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _samples(ops: Collection[str], device: str, samples: int) -> Iterator[tuple[Callable[..., Any], Any]]:
    """Yield callables with (args, kwargs); those that op_db lacks come first."""
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(device)

    layers = (nn.LSTM(8, 16, 2, bidirectional=True), nn.GRU(8, 16), nn.RNN(8, 16), nn.RNN(8, 16, nonlinearity="relu"))
    cells = (nn.LSTMCell(8, 16), nn.GRUCell(8, 16), nn.RNNCell(8, 16), nn.RNNCell(8, 16, nonlinearity="relu"))
    yield from ((layer.to(device), ((random(5, 3, 8),), {})) for layer in layers)
    yield from ((cell.to(device), ((random(3, 8),), {})) for cell in cells)
    x, image, volume = random(3, 4, 8), random(1, 2, 6, 6), random(1, 2, 4, 4, 4)
    square, classes = x[0, :, :4] @ x[0, :, :4].mT + torch.eye(4, device=device), torch.tensor([1, 0, 3], device=device)
    yield from ((nn.functional.interpolate, ((image, (3, 3)), {"mode": m, "antialias": True})) for m in _ANTIALIASED)
    scores = random(5, 2, 6).log_softmax(-1)
    targets, lengths = torch.ones(2, 3, dtype=torch.long, device=device), ([5, 5], [3, 3])
    direct: tuple[tuple[Any, tuple[Any, ...]], ...] = (
        (aten.native_dropout, (image, 0.5, True)),
        (aten.col2im, (random(1, 8, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1])),
        (aten._softmax, (x, -1, False)),
        (aten._log_softmax, (x, -1, False)),
        (aten._adaptive_avg_pool2d, (image, [2, 2])),
        (aten.convolution, (image, random(3, 2, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)),
        (aten._weight_norm, (random(4, 8), random(4, 1), 0)),
        (aten._addmm_activation, (random(4), random(3, 8), random(8, 4))),
        (aten._ctc_loss, (scores, targets, *lengths)),
        (aten.nll_loss, (random(3, 5), classes)),
        (aten.nll_loss_forward, (random(3, 5), classes, None, 1, -100)),
        (aten.nll_loss2d, (random(3, 5, 1, 1), classes[:, None, None])),
        (aten.conv_tbc, (random(5, 2, 8), random(3, 8, 4), random(4))),
        (aten.chain_matmul, ([square, square, square],)),
        (aten.frobenius_norm, (x, [-1])),
        (aten.nuclear_norm, (square,)),
        (aten.linalg_matrix_exp, (square,)),
        (aten.linalg_matrix_power, (square, -1)),
        (aten.slogdet, (square,)),
        (aten.svd, (square,)),
        (aten.matrix_exp, (square,)),
        (aten.norm.Scalar, (x, 2)),
        (aten.norm.ScalarOpt_dim, (x, 3, [-1])),
        (aten.reflection_pad1d, (x, [1, 1])),
        (aten.reflection_pad2d, (image, [1, 1, 1, 1])),
        (aten.reflection_pad3d, (volume, [1] * 6)),
        (aten.replication_pad1d, (x, [1, 1])),
        (aten.replication_pad2d, (image, [1, 1, 1, 1])),
        (aten.replication_pad3d, (volume, [1] * 6)),
        (aten.upsample_nearest2d, (image, [3, 3])),
        (aten.upsample_nearest3d, (volume, [6, 6, 6])),
        (aten._upsample_nearest_exact2d, (image, [3, 3])),
        (aten._upsample_nearest_exact3d, (volume, [6, 6, 6])),
        (aten._unsafe_view, (x, [12, 8])),
        (aten._convolution.deprecated, _convolution(image, random(3, 2, 3, 3))),
    )
    yield from ((function, (args, {})) for function, args in direct)
    for op in op_db:
        aliases = (alias for alias in op.aliases if alias.name.replace(".", "_") in ops)
        if torch.float32 in op.supported_dtypes(device):
            given = list(islice(op.sample_inputs(device, torch.float32), samples))
            for function in (op, *aliases):
                yield from ((function, ((sample.input, *sample.args), sample.kwargs)) for sample in given)


_ANTIALIASED = ("bilinear", "bicubic")


def _convolution(image: torch.Tensor, weight: torch.Tensor) -> tuple[Any, ...]:
    return (image, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, False, False, False)
