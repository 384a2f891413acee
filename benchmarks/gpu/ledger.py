"""Count what the kernels of a training step move and compute, on abstract tensors, and what that takes on a card.

    python -m benchmarks.gpu.ledger [--models "BERT-large b32 s512;ViT-L b64"] [--sides "torch.autocast;pure half"]
                                    [--kinds] [--measured]

Nothing is computed: tensors are on the meta device, and decisions are those for a CUDA device in float16. Each operator
below autograd is a kernel of one kind, which reads its inputs and writes its results once. It takes the longer of two
times: that of its bytes, and that of its floating-point operations, at the kind's rates on an H200 (``RATES``, measured
rows of benchmarks/results/gpu divided by these bytes), and no less than a launch. What the host does is left out, so
this is kernel time. The optimizer's bytes are counted for each parameter in steps of a small model.

Where CUDA runs one kernel and the meta device several, the ledger has the one: fused attention, which refuses a mask
whose last stride is not 1, the operators of this package that compute in Triton there, and regions that Inductor
compiles, of which it takes two: forward reads the inputs and writes the results, and backward reads the inputs again.

``--kinds`` prints each kind, ``--measured`` compares with the kernel time of stored rows.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import autocastfx
from autocastfx.runtime.operators.tf32 import SWITCH
from autocastfx.runtime.operators.wide_linear import ROWS_OF_STAGE
from autocastfx.runtime.regions import Region
from autocastfx.training import copying_step
from benchmarks.command import Command
from benchmarks.memory import cuda_dropout, make_fake
from benchmarks.models.families import FullModel
from benchmarks.models.gpu import MODELS
from benchmarks.step_counts import allocates
from benchmarks.training import AUTOCAST, DEFAULT, FASTEST, HALF, Setting, training

EIGHT = (
    "BERT-large b32 s512, padded",
    "BERT-large b32 s512",
    "GPT-2 medium b8 s1024",
    "GPT-2 medium b8 s1024, fused GELU",
    "Llama 1.1B b2 s2048",
    "ResNet-50 b256",
    "ViT-L b64",
    "T5-base b16 s512, padded",
)
FUSED = "cached, kernel, inductor"
# By side: the arguments of convert; None is the model in 16 bits.
SIDES: dict[str, dict[str, str] | None] = {
    AUTOCAST: {"op_list": "torch_autocast_cuda"},
    DEFAULT: {"fold": "exact"},
    FASTEST: {"weights": "cached", "fold": "kernel"},
    FUSED: {"weights": "cached", "fold": "kernel", "fuse": "inductor"},
    HALF: None,
}
ROWS = Path(__file__).resolve().parents[1] / "results" / "gpu" / "rows.jsonl"
_LAUNCH = 1.7e-6  # seconds: the least that a kernel takes


@dataclass(frozen=True)
class Rate:
    """What a kind of kernel reaches: bytes and floating-point operations a second."""

    bytes: float
    flops: float = math.inf


_TB, _TF = 1e12, 1e12
RATES: Mapping[str, Rate] = {
    "product": Rate(4.0 * _TB, 680 * _TF),
    "product, sizes of 2": Rate(4.0 * _TB, 253 * _TF),
    "product, odd sizes": Rate(4.0 * _TB, 127 * _TF),
    "product, float32": Rate(4.0 * _TB, 45 * _TF),
    "product, TF32": Rate(4.0 * _TB, 380 * _TF),
    "convolution": Rate(2.6 * _TB, 500 * _TF),
    "convolution, float32": Rate(2.6 * _TB, 45 * _TF),
    "attention": Rate(3.0 * _TB, 230 * _TF),
    "norm": Rate(1.6 * _TB),
    "norm, backward": Rate(1.1 * _TB),
    "batch norm": Rate(2.3 * _TB),
    "sum": Rate(1.4 * _TB),
    "sum, first stage": Rate(2.0 * _TB),  # not measured: kernels of two stages are told to take 40 % less or so
    "loss": Rate(2.6 * _TB),
    "lookup": Rate(1.5 * _TB),
    "copy": Rate(2.6 * _TB),
    "cast": Rate(3.0 * _TB),
    "elementwise": Rate(3.3 * _TB),
    "optimizer": Rate(3.5 * _TB),
}


@dataclass
class Kernels:
    """Kernels of one kind: their number, bytes, floating-point operations, and seconds."""

    count: int = 0
    bytes: float = 0.0
    flops: float = 0.0
    seconds: float = 0.0


@dataclass
class Ledger:
    """The kernels of a training step by kind, and the number of parameters."""

    parameters: int = 0
    kernels: dict[str, Kernels] = field(default_factory=lambda: defaultdict(Kernels))

    def add(self, kind: str, moved: float, flops: float = 0.0) -> None:
        """Add a kernel."""
        rate, entry = RATES[kind], self.kernels[kind]
        entry.count += 1
        entry.bytes += moved
        entry.flops += flops
        entry.seconds += max(moved / rate.bytes, flops / rate.flops, _LAUNCH)

    def milliseconds(self) -> float:
        """All kernels, one after the other."""
        return 1e3 * sum(entry.seconds for entry in self.kernels.values())

    def floor(self) -> float:
        """Milliseconds of products, convolutions and attention in 16 bits at the best rate, and of the optimizer."""
        heavy = [entry for kind, entry in self.kernels.items() if kind.startswith(("product", "conv", "attention"))]
        best = sum(max(e.flops / RATES["product"].flops, e.bytes / RATES["product"].bytes) for e in heavy)
        return 1e3 * (best + self.kernels["optimizer"].seconds)


# ---- what runs ------------------------------------------------------------------------------------------------------

_PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1}  # by the place of the left factor
_LOSSES = ("_log_softmax", "_softmax", "_safe_softmax", "nll_loss", "logsumexp")
_LOOKUPS = ("embedding", "index", "gather", "scatter", "_unsafe_index")
_COPIES = ("_to_copy", "copy_", "clone", "cat", "fill_", "zero_", "constant_pad_nd", "slice_backward", "repeat")


def _bytes(tensor: Tensor) -> int:
    """Bytes of the elements that are there: a dimension that is expanded has one."""
    sizes = (1 if stride == 0 else int(size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return math.prod(sizes) * tensor.element_size()


def _tensors(*given: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]


class Reader(TorchDispatchMode):
    """Adds each operator that is called below autograd to a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger, self.is_quiet = ledger, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not (self.is_quiet or func.is_view or allocates(func)):
            inputs, outputs = _tensors(args, kwargs), _tensors(result)
            if outputs and not str(func).startswith(("aten.detach", "aten.lift", "aten.alias", "aten._reshape_alias")):
                self._add(func._schema.name.partition("::")[2], args, inputs, outputs)
        return result

    def _add(self, name: str, args: Sequence[Any], inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        moved = sum(map(_bytes, (*inputs, *outputs)))
        is_wide = any(tensor.dtype == torch.float32 for tensor in inputs)
        if name in _PRODUCTS:
            left, right = args[_PRODUCTS[name]], args[_PRODUCTS[name] + 1]
            flops = 2.0 * math.prod(left.shape) * right.shape[-1]
            self.ledger.add(product_kind(left, right), moved, flops)
        elif "convolution" in name:
            *_, x, weight = args[:3] if "backward" in name else (None, *args[:2])
            made = args[0] if "backward" in name else outputs[0]
            flops = 2.0 * math.prod(made.shape) * math.prod(weight.shape[1:])
            each = [*args[-1]][:2] if "backward" in name else [True]
            kind = "convolution, float32" if is_wide else "convolution"
            for _ in filter(None, each):
                self.ledger.add(kind, sum(map(_bytes, (x, weight, made))), flops)
        elif "layer_norm" in name or "rms_norm" in name:
            self.ledger.add("norm, backward" if "backward" in name else "norm", moved)
        elif "batch_norm" in name:
            self.ledger.add("batch norm", _bytes(outputs[0]) * (5 if "backward" in name else 3))
        elif name.startswith(_LOSSES):
            self.ledger.add("loss", moved)
        elif name in ("sum", "mean", "amax", "amin", "var_mean", "linalg_vector_norm"):
            is_staged = name == "sum" and inputs[0].shape[1:2] == (ROWS_OF_STAGE,) and args[1:2] == ([1],)
            self.ledger.add("sum, first stage" if is_staged else "sum", moved)
        elif name.startswith(_LOOKUPS):
            kept = [tensor for tensor in inputs if tensor.dtype in (torch.int64, torch.int32)]
            written = sum(map(_bytes, outputs))
            self.ledger.add("lookup", 2 * written + sum(map(_bytes, kept)))
        elif name in _COPIES:
            dtypes = {tensor.dtype for tensor in (*inputs[-1:], *outputs)}
            is_cast = len(dtypes) > 1 and all(dtype.is_floating_point for dtype in dtypes)
            self.ledger.add("cast" if is_cast else "copy", moved)
        else:
            self.ledger.add("elementwise", moved)


def product_kind(left: Tensor, right: Tensor) -> str:
    """Name the kind of a matrix product: by dtype, and by what divides the sizes that lie in memory one by one."""
    if left.dtype == torch.float32:
        return "product, TF32" if SWITCH.is_on else "product, float32"
    rows = {int(t.shape[-1] if t.stride(-1) == 1 else t.shape[-2]) for t in (left, right)} | {int(right.shape[-1])}
    if all(size % 8 == 0 for size in rows):
        return "product"
    return "product, sizes of 2" if all(size % 2 == 0 for size in rows) else "product, odd sizes"


# ---- one kernel on CUDA, several on the meta device ------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    """Fused attention: one kernel, and in backward another one."""

    @staticmethod
    def forward(
        ctx: Any, reader: Reader, query: Tensor, key: Tensor, values: Tensor, mask: Tensor | None, causal: bool
    ) -> Tensor:
        ctx.save_for_backward(query, key, values, mask)
        ctx.reader, ctx.causal = reader, causal
        with _quiet(reader):
            made = query.new_empty((*query.shape[:-1], values.shape[-1]))
        moved = sum(map(_bytes, (*_tensors(query, key, values, mask), made)))
        reader.ledger.add("attention", moved, _attention_flops(query, key, causal, 4))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        query, key, values, mask = ctx.saved_tensors
        with _quiet(ctx.reader):
            made = [torch.empty_like(tensor) for tensor in (query, key, values)]
            of_mask = torch.empty_like(mask) if mask is not None and ctx.needs_input_grad[4] else None
        given = _tensors(query, key, values, mask, gradients[0], made, of_mask)
        ctx.reader.ledger.add("attention", sum(map(_bytes, given)), _attention_flops(query, key, ctx.causal, 10))
        return (None, *made, of_mask, None)


def _attention_flops(query: Tensor, key: Tensor, causal: bool, times: int) -> float:
    return times * math.prod(query.shape) * key.shape[-2] * (0.5 if causal else 1.0)


class _Kernel(torch.autograd.Function):
    """An operator that reads some tensors and writes one; backward reads them again, and writes their gradients."""

    @staticmethod
    def forward(ctx: Any, reader: Reader, kind: str, shape: Sequence[int], x: Tensor, *others: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, *others)
        ctx.reader, ctx.kind = reader, kind
        with _quiet(reader):
            made = x.new_empty(shape, dtype=x.dtype if shape else torch.float32)
        reader.ledger.add(kind, sum(map(_bytes, _tensors(x, others, made))))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        with _quiet(ctx.reader):
            made = [torch.empty_like(t) if t is not None and t.is_floating_point() else None for t in saved]
        kind = "norm, backward" if ctx.kind == "norm" else ctx.kind
        ctx.reader.ledger.add(kind, sum(map(_bytes, _tensors(saved, gradients, made))))
        return (None, None, None, *made)


class _Fused(torch.autograd.Function):
    """A region that Inductor compiles: one kernel, and in backward another one, which reads the inputs again."""

    @staticmethod
    def forward(ctx: Any, reader: Reader, region: Region, *given: Tensor) -> tuple[Tensor, ...]:
        with _quiet(reader):
            made = [torch.empty_like(tensor) for tensor in _tensors(region.module(*given))]
        ctx.save_for_backward(*given)
        ctx.reader = reader
        ctx.mark_non_differentiable(*(tensor for tensor in made if not tensor.is_floating_point()))
        reader.ledger.add("elementwise", sum(map(_bytes, (*given, *made))))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        wanted, given = ctx.needs_input_grad[2:], ctx.saved_tensors
        with _quiet(ctx.reader):
            made = [torch.empty_like(t) if asked else None for t, asked in zip(given, wanted, strict=True)]
        ctx.reader.ledger.add("elementwise", sum(map(_bytes, _tensors(given, gradients, made))))
        return (None, None, *made)


@contextlib.contextmanager
def _quiet(reader: Reader) -> Iterator[None]:
    before, reader.is_quiet = reader.is_quiet, True
    try:
        yield
    finally:
        reader.is_quiet = before


@contextlib.contextmanager
def _kernels_of_cuda(reader: Reader) -> Iterator[None]:
    """Let operators run as the kernels that a CUDA device has for them."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if enable_gqa and key.shape[1] != query.shape[1]:
            count = query.shape[1] // key.shape[1]
            key, value = (tensor.repeat_interleave(count, 1) for tensor in (key, value))
        is_added = attn_mask is not None and attn_mask.dtype != torch.bool
        if is_added and attn_mask.stride(-1) != 1:  # no fused kernel takes it: computed in float32, product by product
            wide = [tensor.float() for tensor in (query, key, value, attn_mask)]
            scores = torch.softmax((wide[0] * 0.5) @ (wide[1] * 0.5).mT + wide[3], -1)
            scores = torch.native_dropout(scores, dropout_p, True)[0] if dropout_p else scores
            return (scores @ wide[2]).to(query.dtype)
        return _Attention.apply(reader, query, key, value, attn_mask, is_causal)

    def cross_entropy(scores: Tensor, target: Tensor, *rest: Any, **options: Any) -> Tensor:
        return _Kernel.apply(reader, "loss", (), scores, target)

    def region(self: Region, *given: Tensor) -> Any:
        made = _Fused.apply(reader, self, *given)
        return made if len(made) > 1 else made[0]

    def rms_norm(x: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        return _Kernel.apply(reader, "norm", x.shape, x, weight)

    with (
        cuda_dropout(),
        mock.patch.object(Region, "__call__", region),
        torch.library._scoped_library("aten", "IMPL") as of_torch,
        torch.library._scoped_library("autocastfx", "IMPL") as ours,
    ):
        of_torch.impl("scaled_dot_product_attention", attention, "AutogradMeta")
        ours.impl("scaled_dot_product_attention", attention, "AutogradMeta")
        ours.impl("cross_entropy_loss", cross_entropy, "AutogradMeta")
        ours.impl("rms_norm", rms_norm, "AutogradMeta")
        yield


# ---- a step ---------------------------------------------------------------------------------------------------------


def count(model: str, side: str, *, dtype: torch.dtype = torch.float16, **options: Any) -> Ledger:
    """Count the kernels of a training step.

    Args:
        model: a key of ``MODELS``.
        side: a key of ``SIDES``.
        dtype: the 16-bit dtype.
        options: further arguments of ``convert``.
    """
    full: FullModel = MODELS[model]
    with torch.device("meta"):
        module: Any = full.build().train()
    inputs = {name: tensor.to("meta", memory_format=torch.preserve_format) for name, tensor in full.inputs().items()}
    ledger = Ledger(sum(p.numel() for p in module.parameters()))
    reader, mode = Reader(ledger), contextlib.nullcontext()
    chosen = SIDES[side]
    if chosen is None:
        module.to(dtype)
        inputs = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}
        mode = make_fake(module, inputs)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fixed = {"dtype": dtype, "device": "cuda", "keep_output_dtype": False, "check": False}
            with mock.patch("autocastfx.options.check_compiler"):  # nothing is compiled
                module = autocastfx.convert(module, (), inputs, **{**fixed, **chosen, **options})
    with _kernels_of_cuda(reader), mode, torch.device("meta"):
        if "cached" in side:
            module(**inputs)  # makes the copies, which the optimizer's part renews from then on
            ledger.kernels.clear()
        with reader:
            result = module(**inputs)
            loss = result[0] if isinstance(result, (tuple, list)) else result["loss"]
            loss.backward()
    ledger.add("optimizer", ledger.parameters * optimizer_bytes(side, dtype))
    return ledger


@cache
def optimizer_bytes(side: str, dtype: torch.dtype) -> float:
    """Bytes that the optimizer's part moves for each parameter, copies for the next step included; counted on a CPU."""
    width = 64

    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(width, width, bias=False)

        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (self.layer(x).float().square().mean(),)

    full = FullModel(Square, lambda: {"x": torch.ones(4, width)})
    masters = "float32" if side == HALF else ""
    made = training(FASTEST if side == FUSED else side, full, Setting("cpu", dtype), masters=masters)
    made.forward_and_backward()
    made.step()
    made.prepare()
    made.forward_and_backward()
    moved = _Moved()
    with moved, mock.patch.object(copying_step, "kernel_of", lambda kind, *_: partial(_copying_step, moved, kind)):
        made.step()
        made.prepare()
    return moved.total / width**2


def _copying_step(moved: _Moved, kind: str, lists: Any, numbers: Mapping[str, Any], copies: Sequence[Tensor]) -> None:
    """Stand in for the kernel on CUDA, which moves what torch's does, and the copies that it writes."""
    getattr(torch, f"_fused_{kind}_")(*lists, **numbers)
    moved.total += sum(map(_bytes, copies))


class _Moved(TorchDispatchMode):
    """Adds up the bytes that operators read and write, of tensors with more than one element."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not (func.is_view or allocates(func)):
            given = zip(args, func._schema.arguments, strict=False)
            is_read = (kwargs or {}).get("grad_scale") is None  # a fused optimizer writes gradients that it unscales
            written = [a for a, s in given if s.is_write and not (is_read and s.name == "grads")]
            read = args[1:] if "copy_" in str(func) else args  # what is copied into is not read
            large = [t for t in (*_tensors(read, kwargs), *_tensors(written), *_tensors(result)) if t.numel() > 1]
            seen = [t for t in _tensors(result) if any(t is given for given in _tensors(args))]
            self.total += sum(map(_bytes, large)) - sum(_bytes(t) for t in seen if t.numel() > 1)
        return result


# ---- the command ----------------------------------------------------------------------------------------------------


def measured() -> dict[tuple[str, str], float]:
    """Milliseconds of kernels in stored rows in float16, by model and side."""
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    return {
        (row["model"].removesuffix(", kernels"), row["side"]): row["kernels_ms"]
        for row in rows
        if str(row.get("stage")).startswith("eager step") and "kernels_ms" in row and row["dtype"] == "float16"
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Count, and print a table."""
    command = Command("gpu.ledger", __doc__, stores=False)
    command.names("--models", MODELS, chosen=EIGHT, separator=";")
    command.names("--sides", SIDES, separator=";")
    command.add_argument("--kinds", action="store_true", help="print each kind of kernel")
    command.add_argument("--measured", action="store_true", help="compare with stored rows")
    options = command.begin(arguments)
    stored = measured() if options.measured else {}
    print(f"{'model':<36}{'side':<24}{'kernels':>8}{'GB':>8}{'TFLOP':>8}{'ms':>8}{'floor':>8}   of the others")
    for model in options.models:
        ledgers: dict[str, Ledger] = {}
        for side in options.sides:
            ledger = ledgers[side] = count(model, side)
            ms = ledger.milliseconds()
            told = [
                f"{ms / other.milliseconds():.3f} of {name}" for name, other in ledgers.items() if other is not ledger
            ]
            if (model, side) in stored:
                told.append(f"{ms / stored[model, side]:.2f} of the {stored[model, side]:.1f} ms measured")
            print(
                f"{model:<36}{side:<24}{_columns([*ledger.kernels.values()])}{ledger.floor():>8.1f}   {', '.join(told)}"
            )
            for kind, entry in sorted(ledger.kernels.items(), key=lambda pair: -pair[1].seconds):
                if options.kinds:
                    print(f"{'':<38}{kind:<22}{_columns([entry])}")
            sys.stdout.flush()
    return 0


def _columns(entries: Sequence[Kernels]) -> str:
    moved, flops, seconds = (sum(getattr(entry, key) for entry in entries) for key in ("bytes", "flops", "seconds"))
    number = sum(entry.count for entry in entries)
    return f"{number:>8}{moved / 1e9:>8.1f}{flops / 1e12:>8.2f}{1e3 * seconds:>8.1f}"


if __name__ == "__main__":
    sys.exit(main())
