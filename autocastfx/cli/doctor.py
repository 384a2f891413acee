"""The command ``autocastfx doctor``: what this machine has for mixed precision, and how fast 16 bits are on it."""

from __future__ import annotations

import platform
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
from torch.utils.benchmark import Timer

from autocastfx.cli.commands import give
from autocastfx.dtypes import LOW_DTYPES, dtype_name
from autocastfx.errors import MissingExtraError
from autocastfx.policy.kernel_facts import KernelFacts, load_kernel_facts
from autocastfx.policy.op_list import load_op_list
from autocastfx.runtime.regions import check_compiler


def doctor(options: Namespace) -> int:
    """Run ``doctor``."""
    diagnosis = examine()
    give(options, diagnosis, str(diagnosis))
    return 0


_PACKAGES = ("autocastfx", "networkx", "pyyaml")


@dataclass(frozen=True)
class Diagnosis:
    """The findings about this machine. ``str`` gives them as text.

    Attributes:
        versions: versions of Python and packages, by name.
        devices: type and name of each device that torch can use.
        no_kernel: per device type and 16-bit dtype, the ops that the default list allows in 16 bits but, by the kernel
            facts, the device cannot run so. Conversions keep them in float32.
        unmeasured: device types of this machine that the kernel facts do not cover.
        speeds: per device type and 16-bit dtype, the time of a matrix product and of a convolution, to float32's; None
            for what the device does not run.
        compilers: what ``fuse="inductor"`` and this package's Triton kernels need: what is there, or what to do.
    """

    versions: Mapping[str, str]
    devices: tuple[tuple[str, str], ...]
    no_kernel: Mapping[str, Mapping[str, tuple[str, ...]]]
    unmeasured: tuple[str, ...]
    speeds: Mapping[str, Mapping[str, Mapping[str, float | None]]]
    compilers: Mapping[str, str]

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield from (f"{name}: {number}" for name, number in self.versions.items())
        yield from (f"device {kind}: {name}" for kind, name in self.devices)
        for kind, by_dtype in self.no_kernel.items():
            for dtype, ops in by_dtype.items():
                yield f"on {kind} these run in float32, for want of a {dtype} kernel: {', '.join(ops) or 'none known'}"
        for kind in self.unmeasured:
            yield f"on {kind} no missing kernels are known"
        for kind, by_dtype in self.speeds.items():
            for dtype, ratios in by_dtype.items():
                yield f"on {kind} {dtype} takes {_in_words(ratios)} of float32's time: {_meaning(ratios)}"
        yield from (f"{name}: {found}" for name, found in self.compilers.items())


def examine() -> Diagnosis:
    """Examine this machine; on each type of device a small product and a small convolution run in each dtype.

    Raises:
        OpListError: a shipped file is damaged.
    """
    low = [dtype_name(dtype) for dtype in LOW_DTYPES]
    facts, devices = load_kernel_facts(), tuple(_devices())
    kinds = tuple(dict.fromkeys(kind for kind, _ in devices))
    known = tuple(kind for kind in kinds if any(device == kind for device, _ in facts.no_kernel))
    return Diagnosis(
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            **{name: _version(name) for name in _PACKAGES},
        },
        devices=devices,
        no_kernel={kind: {dtype: _missing(facts, kind, dtype) for dtype in low} for kind in known},
        unmeasured=tuple(kind for kind in kinds if kind not in known),
        speeds={kind: _speeds(kind) for kind in kinds},
        compilers=dict(_compilers()),
    )


def _missing(facts: KernelFacts, kind: str, dtype: str) -> tuple[str, ...]:
    op_list = load_op_list("default", default=dtype)
    rules = {op: op_list.rule(op, kind) for op in facts.no_kernel.get((kind, dtype), frozenset[str]())}
    return tuple(sorted(op for op, rule in rules.items() if rule is not None and rule.category.may_be_low))


def _devices() -> Iterator[tuple[str, str]]:
    yield "cpu", f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        yield "cuda", f"{torch.cuda.get_device_name(index)}, compute capability {major}.{minor}"
    for index in range(torch.xpu.device_count()):
        yield "xpu", torch.xpu.get_device_name(index)
    if torch.backends.mps.is_available():
        yield "mps", platform.machine()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed as a package"


# How fast 16 bits are, and what that means.

_SIZES = {"cpu": (256, 16)}  # of a product and a convolution: as on a GPU they would take a CPU seconds
_RUNS = 5


def _speeds(kind: str) -> dict[str, dict[str, float | None]]:
    size, channels = _SIZES.get(kind, (4096, 128))
    a, image = torch.randn(size, size, device=kind), torch.randn(8, channels, 32, 32, device=kind)
    weight = torch.randn(channels, channels, 3, 3, device=kind)
    calls: Mapping[str, Callable[[torch.dtype], float | None]] = {
        "a product": lambda dtype: _seconds(torch.mm, a.to(dtype), a.to(dtype)),
        "a convolution": lambda dtype: _seconds(torch.conv2d, image.to(dtype), weight.to(dtype)),
    }
    full = {name: call(torch.float32) for name, call in calls.items()}
    speeds: dict[str, dict[str, float | None]] = {}
    for low in LOW_DTYPES:
        taken = {name: (call(low), full[name]) for name, call in calls.items()}
        speeds[dtype_name(low)] = {name: None if not (a and b) else round(a / b, 2) for name, (a, b) in taken.items()}
    return speeds


def _seconds(call: Callable[..., torch.Tensor], *operands: torch.Tensor) -> float | None:
    try:
        timer = Timer(
            "call(*operands)", globals={"call": call, "operands": operands}, num_threads=torch.get_num_threads()
        )
        timer.timeit(1)
        return min(timer.timeit(1).median for _ in range(_RUNS))
    except RuntimeError:  # the device has no such kernel
        return None


def _in_words(ratios: Mapping[str, float | None]) -> str:
    return " and ".join(
        f"{'no part' if r is None else f'{r:.0f}' if r >= 10 else f'{r:.2g}'} in {name}" for name, r in ratios.items()
    )


def _meaning(ratios: Mapping[str, float | None]) -> str:
    slow = [name for name, ratio in ratios.items() if ratio is None or ratio > 1]
    if not slow:
        return "a conversion can make models faster"
    if len(slow) == len(ratios):
        return "use the other 16-bit dtype, or leave models in float32: here this one saves memory alone"
    return f"models that are mostly {slow[0].removeprefix('a ')}s become slower"


def _compilers() -> Iterator[tuple[str, str]]:
    try:
        check_compiler("cpu")
        yield "C++ compiler", 'works: fuse="inductor" and torch.compile can compile for the CPU'
    except MissingExtraError as error:
        yield "C++ compiler", str(error)
    if find_spec("triton") is not None:
        yield "Triton", 'is there: on a GPU fuse="inductor", torch.compile and this package\'s kernels can use it'
    else:
        yield "Triton", 'is not installed: only a GPU needs it, for fuse="inductor", torch.compile and faster kernels'
