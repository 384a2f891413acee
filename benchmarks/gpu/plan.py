"""The stages of both calls, in the order of their value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.stage import Rounds, Stage

FLOAT32, AUTOCAST, HALF = "float32", "torch.autocast", "pure half"
CAST, CACHED, KERNEL, FASTEST = "cast, fold=exact", "cached, fold=exact", "cast, fold=kernel", "cached, fold=kernel"
RECOMPUTE = "cast, fold=exact, saved=recompute"
TIMED = (AUTOCAST, CAST, FASTEST, HALF)
# Each model with the seconds of its steps in both dtypes.
STEPS = {
    **{"BERT-large b32 s512, padded": 30, "BERT-large b32 s512": 25},
    **{"GPT-2 medium b8 s1024": 25, "GPT-2 medium b8 s1024, fused GELU": 25},
    **{"Llama 1.1B b2 s2048": 60, "ResNet-50 b256": 45, "ViT-L b64": 35},
}
PARITY = ("GPT-2 b4 s1024", "BERT-base b8 s512", "Llama 4x2048", "ResNet-50 b32")
WITHOUT_WAITING = ("BERT 4x256", "ResNet-18 112")
# Of the first call, the kernels' last, which need much memory; the second one runs the others.
TESTS = ("tests/training", "tests/runtime/operators", "tests/runtime")
# M, K and N of linear layers, with many tokens and with fewer.
FLOAT8 = tuple(
    (m, k, n)
    for m in (16_384, 4096)
    for k, n in (
        *((2048, 2048), (2048, 5632), (5632, 2048), (4096, 4096), (4096, 14_336), (14_336, 4096)),
        *((768, 768), (768, 3072), (1024, 4096), (2048, 32_000)),
    )
)
QUANTISED = ((4096, 4096), (8192, 4096), (16_384, 14_336))
TINY, FEW = ("ResNet tiny", "BERT tiny"), Rounds(2, 3, 1, 1)
# How to go on if cuDNN's attention fails, which torch prefers on these cards.
WITHOUT_CUDNN = {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}


@dataclass(frozen=True)
class _Scale:
    """The device and the size that a plan is made for."""

    device: str
    is_tiny: bool

    def models(self, full: Sequence[str], tiny: int = 1) -> Sequence[str]:
        """Return these models, or the first tiny ones."""
        return TINY[:tiny] if self.is_tiny else full

    def sized(self, full: Mapping[str, Any], **tiny: Any) -> Mapping[str, Any]:
        """Return the options of full size or, for tiny models, these."""
        return {**full, **tiny} if self.is_tiny else full

    def stage(self, name: str, function: str, *, cuda: bool = False, **fields: Any) -> Stage:
        """Return a stage; it is skipped where it needs CUDA."""
        skip = "needs CUDA" if cuda and self.device != "cuda" else ""
        return Stage(name, f"benchmarks.gpu.stages.{function}", skip=skip, **fields)

    def steps(self, model: str, seconds: float, kind: str = "eager", **fields: Any) -> Stage:
        """Return the timing of a model's steps, which measures for half of the seconds and then profiles."""
        more = fields.pop("options", {})
        dtypes = len(more.get("dtypes", ("float16", "bfloat16")))
        rounds = FEW if self.is_tiny else Rounds(seconds=seconds / dtypes / 2)
        options = {"model": model, "sides": TIMED, "kind": kind, "rounds": rounds, **more}
        return self.stage(
            f"{kind} step, {model}", "steps:steps", options=options, prepares=True, seconds=seconds, **fields
        )

    def compiled(self, model: str, seconds: float) -> Stage:
        """Return the timing of a model's compiled steps, whose process compiles early."""
        options = {"sides": (AUTOCAST, CAST), "dtypes": ("float16",)}
        return self.steps(model, seconds, "compiled", options=options, early=True)


def _first(scale: _Scale) -> Iterator[Stage]:
    sides = (FLOAT32, AUTOCAST, CAST, CACHED, KERNEL, FASTEST)
    yield scale.stage("smoke", "smoke:smoke", seconds=60, fallback=WITHOUT_CUDNN)
    for model in scale.models(PARITY):
        options = {"model": model, "sides": sides}
        yield scale.stage(f"parity, {model}", "parity:parity", options=options, prepares=True, alone=False, seconds=100)
    together: dict[str, Any] = {"cuda": True, "alone": False, "seconds": 100}
    waiting = {"models": scale.models(WITHOUT_WAITING), "sides": TIMED}
    for name, function in (("waiting for the device", "synchronising"), ("CUDA graph beside eager", "graphed")):
        yield scale.stage(name, f"without_waiting:{function}", options=waiting, prepares=True, **together)
    yield scale.stage("tests, first", "suite:suite", options={"paths": TESTS}, **together)
    yield scale.stage("ceilings", "environment:ceilings", options=scale.sized({}, size=64, repeats=2), seconds=20)
    for model, seconds in dict.fromkeys(TINY, 30).items() if scale.is_tiny else STEPS.items():
        yield scale.steps(model, seconds)
    for model in scale.models(("BERT-large b32 s512", "Llama 1.1B b2 s2048")):
        options = {"model": model, "dtype": "float16", "sides": TIMED}
        yield scale.stage(f"memory, {model}", "steps:memory", cuda=True, options=options, prepares=True, seconds=25)
    sizes = {"sizes": ((400, 65_536), (400, 800_000), (4000, 1024))}
    options = scale.sized(sizes, sizes=((4, 16),), rounds=FEW)
    yield scale.stage("optimizer", "optimizer:optimizer", options=options, seconds=25)
    shapes = {
        "vocabularies": ((8192, 32_000), (8192, 50_257), (4096, 128_256)),
        "norms": ((65_536, 768), (16_384, 4096)),  # more than a cache holds
        "rounds": Rounds(seconds=1),
    }
    few = {"vocabularies": ((16, 1024),), "norms": ((16, 64),), "sides": ("parts", "torch"), "rounds": FEW}
    yield scale.stage("Triton kernels", "kernels:kernels", options=scale.sized(shapes, **few), seconds=30)
    classes = {"classes": (32_000, 50_257, 128_256), "positions": 8192, "rounds": 6}
    options = scale.sized(classes, classes=(64,), positions=16, rounds=2)
    yield scale.stage("loss over a vocabulary", "vocabulary:vocabulary", options=options, seconds=25)
    for model in scale.models(("BERT 4x256", "BERT-base b8 s512")):
        yield scale.steps(model, 15, "graph", cuda=True, options={"dtypes": ("float16",)})
    if not scale.is_tiny:  # the second call compiles a tiny one
        yield scale.compiled("BERT-base b32 s512", 110)


def _second(scale: _Scale) -> Iterator[Stage]:
    # While the compiled models compile, early.
    options = {"paths": ("tests",), "without": TESTS}
    yield scale.stage("tests, others", "suite:suite", cuda=True, options=options, alone=False, seconds=100)
    options = scale.sized({}, rows=64, samples=1)
    yield scale.stage("kernel facts", "facts:facts", options=options, alone=False, seconds=100)
    shapes = {"shapes": FLOAT8, "quantised": QUANTISED, "compiling": 40}
    shapes["rounds"] = Rounds(most=20, seconds=0.6, warm_up=2)
    options = scale.sized(shapes, shapes=((64, 64, 32),), quantised=((64, 32),), rounds=FEW)
    fields: dict[str, Any] = {"cuda": True, "prepares": True, "seconds": 70}
    yield scale.stage("float8 products", "float8_products:products", options=options, **fields)
    blocks: dict[str, Any] = {"options": {"shapes": ("Llama-1B blocks", "Llama-8B blocks")}, "seconds": 120}
    yield scale.stage("float8 blocks", "float8_blocks:blocks", **{**fields, **blocks}, early=True)
    for model in scale.models(
        ("BERT-large b32 s512", "Llama 1.1B b2 s2048")
    ):  # "recompute" is a side that call 1 lacks
        kept = {"model": model, "dtype": "bfloat16", "sides": (AUTOCAST, CAST, RECOMPUTE)}
        name = f"kept for backward, {model}"
        yield scale.stage(name, "steps:memory", cuda=True, options=kept, prepares=True, seconds=25)
    yield scale.steps("T5 tiny" if scale.is_tiny else "T5-base b16 s512, padded", 30)
    for model in ("MLP tiny",) if scale.is_tiny else ("GPT-2 b8 s1024", "ResNet-50 b256"):
        yield scale.compiled(model, 150)


CALLS: dict[int, Callable[[_Scale], Iterator[Stage]]] = {1: _first, 2: _second}


def plan(calls: Sequence[int], device: str, *, is_tiny: bool) -> list[Stage]:
    """Return the stages of calls, most valuable first.

    Args:
        calls: keys of ``CALLS``.
        device: "cuda" or "cpu".
        is_tiny: True for small models and few rounds.
    """
    scale = _Scale(device, is_tiny)
    environment = scale.stage("environment", "environment:environment", alone=False, always=True)
    return [environment, *(stage for number in calls for stage in CALLS[number](scale))]
