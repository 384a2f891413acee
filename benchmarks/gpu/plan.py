"""The stages of each call, in the order of their value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.stage import Rounds, Stage

__all__ = ["CALLS", "plan"]

FLOAT32, AUTOCAST, HALF = "float32", "torch.autocast", "pure half"
CAST, CACHED, KERNEL, FASTEST = "cast, fold=exact", "cached, fold=exact", "cast, fold=kernel", "cached, fold=kernel"
TIMED = (AUTOCAST, CAST, CACHED, FASTEST, HALF)
SMALL = (
    *("BERT 4x256", "GPT-2 4x256", "ResNet-18 112", "ViT 4x192"),
    *("Llama 4x256", "T5 2+2x256", "U-Net 64", "BERT eager"),
)
FULL = (
    *("BERT-large b32 s512", "GPT-2 medium b8 s1024", "ResNet-50 b256", "ViT-L b64", "Llama 1.1B b4 s2048"),
    *("GPT-2 medium b8 s1024, no dropout", "T5-base b16 s512", "ConvNeXt-B b128", "U-Net 256 b16", "BERT 4x256"),
)
BASE = ("BERT-base b32 s512", "GPT-2 b8 s1024", "ViT-B b64")
TELLING = ("BERT-large b32 s512", "GPT-2 medium b8 s1024", "ResNet-50 b256", "Llama 1.1B b4 s2048")
TINY, FEW = ("ResNet tiny", "BERT tiny"), Rounds(2, 2, 1, 1)


@dataclass(frozen=True)
class _Scale:
    """The device and the size that a plan is made for."""

    device: str
    is_tiny: bool

    def models(self, full: Sequence[str], tiny: int = 1) -> Sequence[str]:
        """Return these models, or the first tiny ones."""
        return TINY[:tiny] if self.is_tiny else full

    def only(self, **tiny: Any) -> dict[str, Any]:
        """Return options for tiny models alone."""
        return tiny if self.is_tiny else {}

    def stage(self, name: str, function: str, *, cuda: bool = False, **fields: Any) -> Stage:
        """Return a stage; it is skipped where it needs CUDA."""
        skip = "needs CUDA" if cuda and self.device != "cuda" else ""
        return Stage(name, f"benchmarks.gpu.stages.{function}", skip=skip, **fields)

    def steps(self, models: Sequence[str], dtype: str, sides: Sequence[str], **more: Any) -> Iterator[Stage]:
        """Yield the timing of each model's steps."""
        kind = more.pop("kind", "eager")
        for model in models:
            options = {"model": model, "dtype": dtype, "sides": sides, "kind": kind, **self.only(rounds=FEW)}
            name = f"{kind} step, {model}, {dtype}"
            yield self.stage(name, "steps:steps", options=options, prepares=True, **more)


def _first(scale: _Scale) -> Iterator[Stage]:
    yield scale.stage("environment", "environment:environment", always=True)
    yield scale.stage("ceilings", "environment:ceilings", options=scale.only(size=64, repeats=2))


def _a(scale: _Scale) -> Iterator[Stage]:
    sides = (FLOAT32, AUTOCAST, CAST, CACHED, KERNEL, FASTEST)
    small = [
        scale.stage(f"parity, {model}", "parity:parity", options={"model": model, "sides": sides}, prepares=True)
        for model in scale.models(SMALL)
    ]
    yield from small[:4]
    yield scale.stage("kernel facts", "facts:facts", options=scale.only(rows=64, samples=1))
    two = {"models": scale.models(("BERT 4x256", "ResNet-18 112"))}
    waiting = {**two, "sides": (AUTOCAST, CAST, FASTEST, HALF)}
    yield scale.stage(
        "waiting for the device", "without_waiting:synchronising", cuda=True, options=waiting, prepares=True
    )
    yield scale.stage("steps in a CUDA graph", "without_waiting:graphed", cuda=True, options=waiting, prepares=True)
    yield from scale.steps(scale.models(BASE), "float16", (AUTOCAST, CAST, FASTEST, HALF))
    yield scale.stage("tests that need a GPU", "suite:suite", cuda=True, seconds=150)
    yield from small[4:]


def _b(scale: _Scale) -> Iterator[Stage]:
    yield from scale.steps(scale.models(FULL, 2), "float16", TIMED, seconds=120)


def _c(scale: _Scale) -> Iterator[Stage]:
    telling = scale.models(TELLING)
    yield from scale.steps(telling, "bfloat16", TIMED, seconds=120)
    for model in telling:
        options = {"model": model, "dtype": "float16", "sides": (AUTOCAST, *TIMED[1:])}
        yield scale.stage(f"memory, {model}", "steps:memory", cuda=True, options=options, prepares=True)
    sizes = ((4, 16),) if scale.is_tiny else ((400, 65_536), (400, 800_000), (4000, 1024))
    for tensors, elements in sizes:
        options = {"tensors": tensors, "elements": elements, **scale.only(rounds=FEW)}
        yield scale.stage(f"optimizer, {tensors} x {elements}", "optimizer:optimizer", options=options)
    classes = {"classes": (4096, 32_000, 50_257, 128_256), "positions": 8192, "rounds": 12}
    options = scale.only(classes=(64,), positions=16, rounds=2) or classes
    yield scale.stage("loss over a vocabulary", "vocabulary:vocabulary", options=options)
    shapes = {"vocabularies": ((8192, 32_000), (8192, 50_257), (4096, 128_256)), "norms": ((8192, 768), (8192, 4096))}
    few = {"vocabularies": ((16, 1024),), "norms": ((16, 64),), "sides": ("parts", "torch"), "rounds": FEW}
    yield scale.stage("Triton kernels", "kernels:kernels", options=few if scale.is_tiny else shapes, seconds=120)
    options = scale.only(ops=("layer_norm", "softmax", "cholesky"), samples=1, processes=1)
    yield scale.stage("kernel facts, isolated", "isolated:isolated", options=options, seconds=240)


def _d(scale: _Scale) -> Iterator[Stage]:
    sides = (AUTOCAST, CAST, FASTEST, HALF)
    graphed = scale.models(("BERT 4x256", "BERT-base b32 s512", "GPT-2 b8 s1024"))
    yield from scale.steps(graphed, "float16", sides, kind="graph", cuda=True)
    sides = (AUTOCAST, CAST, KERNEL, HALF)
    compiled = scale.models(("BERT-base b32 s512", "GPT-2 b8 s1024", "ResNet-50 b256", "ViT-B b64"))
    yield from scale.steps(compiled, "float16", sides, kind="compiled", cuda=True, seconds=240)


CALLS: dict[str, Callable[[_Scale], Iterator[Stage]]] = {"A": _a, "B": _b, "C": _c, "D": _d}


def plan(call: str, device: str, *, is_tiny: bool) -> list[Stage]:
    """Return the stages of a call, most valuable first.

    Args:
        call: a key of ``CALLS``.
        device: "cuda" or "cpu".
        is_tiny: True for small models and few rounds.
    """
    scale = _Scale(device, is_tiny)
    first = list(_first(scale))
    return [*(first if call == "A" else first[:1]), *CALLS[call](scale)]
