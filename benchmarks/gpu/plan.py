"""The stages of both calls, in the order of their value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from benchmarks.gpu.stage import Rounds, Stage

FLOAT32, AUTOCAST, HALF = "float32", "torch.autocast", "pure half"
CAST, CACHED, KERNEL, FASTEST = "cast, fold=exact", "cached, fold=exact", "cast, fold=kernel", "cached, fold=kernel"
RECOMPUTE, FUSED = "cast, fold=exact, saved=recompute", "cached, fold=kernel, fuse=inductor"
TF32, O2, LIGER, EAGER = "TF32", "Apex O2-like", "Liger, torch.autocast", "torch.autocast, eager"
BASIC = (AUTOCAST, CAST, FASTEST, HALF)
TIMED = (AUTOCAST, CAST, FASTEST, FUSED, HALF)
RIVALS = (AUTOCAST, O2, TF32, FLOAT32)
# Each model with the limit of its steps in both dtypes, in seconds: all are reached though each takes that long.
STEPS = {
    **{"BERT-large b32 s512, padded": 45, "GPT-2 medium b8 s1024, fused GELU": 45, "ViT-L b64": 45},
    **{"Llama 1.1B b2 s2048": 60, "T5-base b16 s512, padded": 50, "ResNet-50 b256": 45},
    **{"GPT-2 medium b8 s1024": 45, "BERT-large b32 s512": 45},
}
ALIGNED = ("GPT-2 medium b8 s1024, fused GELU, vocabulary 50304", "BERT-large b32 s512, vocabulary 30528")
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
TINY, FEW = ("ResNet tiny", "BERT tiny"), Rounds(2, 3, 0.2, 1, 2)
# What decides the figures of a stage's module: by default, all that runs in a step.
_RUN = tuple(f"autocastfx/{name}" for name in ("capture", "graph", "passes", "plan", "policy", "runtime", "training"))
STEP_OF_A_MODEL = (
    *(*_RUN, "op_lists", "benchmarks/training.py", "benchmarks/models/families.py", "benchmarks/models/gpu.py"),
    *(f"benchmarks/gpu/{name}.py" for name in ("measure", "sides")),
)
DECIDED_BY: Mapping[str, Sequence[str]] = {
    "environment": (),
    "suite": ("autocastfx", "op_lists", "tests"),
    "facts": ("autocastfx/runtime/operators", "op_lists/kernel_facts.yaml", "benchmarks/kernel_facts.py"),
    "optimizer": ("autocastfx/training", "benchmarks/gpu/measure.py"),
    "kernels": ("autocastfx/runtime/operators", "autocastfx/runtime/kernels", "benchmarks/gpu/measure.py"),
    "vocabulary": ("autocastfx/runtime/operators", "autocastfx/runtime/kernels", "benchmarks/vocabulary.py"),
    "float8_products": ("autocastfx/runtime/operators", "autocastfx/runtime/kernels", "benchmarks/gpu/measure.py"),
}
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

    def stage(self, name: str, function: str, *, cuda: bool = False, needs: str = "", **fields: Any) -> Stage:
        """Return a stage; it is skipped where it needs CUDA, or a package that is not there."""
        skip = "needs CUDA" if cuda and self.device != "cuda" else ""
        if needs and find_spec(needs) is None:
            skip = f"needs the package {needs}"
        decided_by = DECIDED_BY.get(function.partition(":")[0], STEP_OF_A_MODEL)
        return Stage(name, f"benchmarks.gpu.stages.{function}", skip=skip, decided_by=decided_by, **fields)

    def steps(self, model: str, seconds: float, kind: str = "eager", **fields: Any) -> Stage:
        """Return the timing of a model's steps, which measures for a third of the seconds and then profiles."""
        more = fields.pop("options", {})
        dtypes = len(more.get("dtypes", ("float16", "bfloat16")))
        rounds = FEW if self.is_tiny else Rounds(5, seconds=seconds / dtypes / 3, queued=3)
        options = {"model": model, "sides": TIMED, "kind": kind, "rounds": rounds, **more}
        return self.stage(
            f"{kind} step, {model}", "steps:steps", options=options, prepares=True, seconds=seconds, **fields
        )

    def compiled(self, model: str, seconds: float) -> Stage:
        """Return the timing of a model's compiled steps, whose process compiles early."""
        options = {"sides": (AUTOCAST, CAST, FUSED, EAGER), "dtypes": ("float16",)}
        return self.steps(model, seconds, "compiled", options=options, early=True)


def _first(scale: _Scale) -> Iterator[Stage]:
    yield scale.stage("smoke", "smoke:smoke", seconds=60, fallback=WITHOUT_CUDNN)
    for model, seconds in STEPS.items() if not scale.is_tiny else ():
        yield scale.steps(model, seconds)
    if scale.is_tiny:  # compiling takes long, and is done for the smallest
        for model, sides in (("MLP tiny", TIMED), *((model, BASIC) for model in TINY)):
            yield scale.steps(model, 60, options={"sides": sides})
    sides = (FLOAT32, AUTOCAST, CAST, CACHED, KERNEL, FASTEST, *(() if scale.is_tiny else (FUSED,)))
    for model in scale.models(PARITY):
        options = {"model": model, "sides": sides}
        yield scale.stage(f"parity, {model}", "parity:parity", options=options, prepares=True, alone=False, seconds=100)
    together: dict[str, Any] = {"cuda": True, "alone": False, "seconds": 100}
    waiting = {"models": scale.models(WITHOUT_WAITING), "sides": BASIC}
    for name, function in (("waiting for the device", "synchronising"), ("CUDA graph beside eager", "graphed")):
        yield scale.stage(name, f"without_waiting:{function}", options=waiting, prepares=True, **together)
    yield scale.stage("tests, first", "suite:suite", options={"paths": TESTS}, **together)
    yield scale.stage("ceilings", "environment:ceilings", options=scale.sized({}, size=64, repeats=2), seconds=20)
    for model in ALIGNED if not scale.is_tiny else ():
        yield scale.steps(model, 30, options={"dtypes": ("float16",)})
    for model in scale.models(("BERT-large b32 s512", "Llama 1.1B b2 s2048")):
        options = {"model": model, "dtype": "float16", "sides": BASIC}
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
        yield scale.steps(model, 15, "graph", cuda=True, options={"dtypes": ("float16",), "sides": BASIC})


def _second(scale: _Scale) -> Iterator[Stage]:
    # While the compiled models compile, early.
    options = {"paths": ("tests",), "without": TESTS}
    yield scale.stage("tests, others", "suite:suite", cuda=True, options=options, alone=False, seconds=100)
    options = scale.sized({}, rows=64, samples=1)
    yield scale.stage("kernel facts", "facts:facts", options=options, alone=False, seconds=100)
    rivals = {"dtypes": ("float16",), "sides": RIVALS, "rounds": FEW if scale.is_tiny else Rounds(3, 5, 5, queued=2)}
    for model in scale.models([*STEPS]):
        yield scale.steps(model, 40, "rival", options=rivals)
    for model in ("MLP tiny",) if scale.is_tiny else ("BERT-base b32 s512", "GPT-2 b8 s1024", "ResNet-50 b256"):
        yield scale.compiled(model, 150)
    model = "Llama tiny" if scale.is_tiny else "Llama 1.1B b2 s2048"
    yield scale.steps(model, 40, "Liger", needs="liger_kernel", options={"sides": (AUTOCAST, LIGER, FUSED)})
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
