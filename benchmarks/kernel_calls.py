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


def deep_calls(device: str) -> list[KernelCall]:
    """Calls in which hundreds of numbers are added up into one, forwards or backwards, of the ops that may do so."""

    def ones(*size: int) -> torch.Tensor:
        return torch.ones(size, device=device)

    def spike(*size: int) -> torch.Tensor:
        """An input that is largest in its middle, so that all windows around it choose it."""
        x = torch.zeros(1, 1, *size, device=device)
        x[(..., *(n // 2 for n in size))] = 1
        return x

    same, rows = torch.zeros(400, dtype=torch.long, device=device), ones(3, 5, 7)
    line, image, volume = ones(1, 1, 800), ones(1, 1, 40, 40), ones(1, 1, 16, 16, 16)
    peaks = spike(800), spike(40, 40), spike(16, 16, 16)
    places = [torch.zeros(1, *[n] * d, d, device=device) for n, d in ((20, 2), (8, 3))]
    bags = torch.arange(400, device=device)
    given: list[tuple[Any, tuple[Any, ...]]] = [
        *((aten.index_select.default, (rows, dim, same)) for dim in range(3)),
        *((aten.gather.default, (ones(5, 7), dim, same.view(shape).expand(*size))) for dim, shape, size in _GATHERED),
        (aten.gather.default, (rows, 1, same.view(1, -1, 1).expand(3, 400, 7))),
        *((aten.index.Tensor, (rows, [*[None] * dim, same])) for dim in range(3)),
        (aten.take.default, (rows, same)),
        (aten.take_along_dim.default, (rows, same.view(1, -1, 1), 1)),
        *((aten.repeat_interleave.self_Tensor, (rows, same[:n] + 400, d)) for d, n in enumerate((3, 5, 7))),
        (aten.repeat_interleave.self_int, (rows, 400, 1)),
        (aten.embedding_bag.default, (ones(5, 7), same, bags)),
        (aten.embedding_bag.default, (ones(400, 7), bags, bags[:1])),
        (aten.expand.default, (rows, [400, 3, 5, 7])),
        (aten.repeat.default, (rows, [20, 20, 20])),
        (aten.as_strided.default, (line, [400, 400], [1, 1])),
        (aten.cat.default, ([rows] * 3,)),
        (aten.unfold.default, (line, 2, 400, 1)),
        (aten.im2col.default, (image, [19, 19], [1, 1], [0, 0], [1, 1])),
        (aten.col2im.default, (ones(1, 361, 25), [23, 23], [19, 19], [1, 1], [0, 0], [1, 1])),
        (aten.pad.default, (image, [0, 20, 0, 20], "replicate")),
        (aten.add.Tensor, (ones(400, 7), ones(7))),
        (aten.mul.Tensor, (ones(400, 7), ones(7))),
        (aten.prelu.default, (-ones(400, 7), ones(7))),
        (aten.linear.default, (ones(400, 300), ones(7, 300), ones(7))),
        (aten.matmul.default, (ones(400, 300), ones(300, 400))),
        (aten.addbmm.default, (ones(3, 3), ones(400, 3, 1), ones(400, 1, 3))),
        (aten.conv2d.default, (ones(2, 3, 20, 20), ones(7, 3, 12, 12), ones(7))),
        (aten.mean.dim, (image, [2, 3])),
        (aten.grid_sampler_2d.default, (image, places[0], 0, 0, False)),
        (aten.grid_sampler.default, (image, places[0], 0, 0, False)),
        (aten.grid_sampler_3d.default, (volume, places[1], 0, 0, False)),
        *((getattr(aten, op).input, _steps(ones, gates)) for op, gates in _RECURRENT.items()),
        (aten._adaptive_avg_pool2d.default, (image, [800, 800])),
        (aten._adaptive_avg_pool2d.default, (image, [1, 1])),
    ]
    for d, x, peak, window, far in zip(
        (1, 2, 3), (line, image, volume), peaks, (400, 19, 8), (400, 20, 8), strict=True
    ):
        given += [
            *((getattr(aten, f"max_pool{d}d{form}").default, (peak, [window] * d, [1] * d)) for form in _POOLED),
            (getattr(aten, f"avg_pool{d}d").default, (x, [window] * d, [1] * d)),
            (getattr(aten, f"replication_pad{d}d").default, (x, [0, far] * d)),
            (getattr(aten, f"reflection_pad{d}d").default, (x, [far - 1] * 2 * d)),
            (getattr(aten, f"adaptive_avg_pool{d}d").default, (x, [n * far for n in x.shape[2:]])),
            (getattr(aten, f"adaptive_avg_pool{d}d").default, (x, [2] * d)),
            (getattr(aten, f"adaptive_max_pool{d}d").default, (x, [n * far for n in x.shape[2:]])),
            (getattr(aten, f"upsample_nearest{d}d").default, (x, [n * far for n in x.shape[2:]])),
            (getattr(aten, _LINEAR[d]).default, (x, [n * far for n in x.shape[2:]], False)),
        ]
    return [KernelCall(function, args, {}) for function, args in given]


def _steps(ones: Callable[..., torch.Tensor], gates: tuple[float, ...]) -> tuple[Any, ...]:
    """400 steps of a recurrent layer whose gates are given by its bias, so that each adds a little to the state."""
    state, weight = 0 * ones(1, 1, 4), 0 * ones(4 * len(gates), 4)
    bias = torch.tensor(gates).repeat_interleave(4).to(state.device)
    weights = weight, torch.eye(4, device=state.device) if len(gates) == 1 else weight
    states = [state, state] if len(gates) == 4 else state
    return ones(400, 1, 4), states, [*weights, bias, 0 * bias], True, 1, 0.0, False, False, False


_RECURRENT = {"lstm": (4.6, 4.6, 5.0, 5.0), "gru": (0.0, 4.6, 5.0), "rnn_tanh": (0.003,), "rnn_relu": (0.003,)}
_GATHERED = ((0, (-1, 1), (400, 7)), (1, (1, -1), (5, 400)))
_POOLED = ("", "_with_indices")
_LINEAR = {1: "upsample_linear1d", 2: "upsample_bilinear2d", 3: "upsample_trilinear3d"}


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
