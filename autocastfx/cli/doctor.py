"""Examine this machine for mixed precision: versions, devices, and ops without a 16-bit kernel."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from autocastfx.dtypes import LOW_DTYPES, dtype_name
from autocastfx.policy.kernel_facts import KernelFacts, load_kernel_facts
from autocastfx.policy.op_list import load_op_list
from autocastfx.policy.rule import Category

__all__ = ["Diagnosis", "examine"]

_PACKAGES = ("autocastfx", "networkx", "pyyaml")
_MAY_BE_LOW = (Category.ALLOW, Category.INFER, Category.CLEAR, Category.PROMOTE)


@dataclass(frozen=True)
class Diagnosis:
    """The findings about this machine. ``str`` gives them as text.

    Attributes:
        versions: versions of Python and packages, by name.
        devices: type and name of each device that torch can use.
        no_kernel: per device type and 16-bit dtype, the ops that the default list allows in 16 bits but, by the kernel
            facts, the device cannot run so. Conversions keep them in float32.
        unmeasured: device types of this machine that the kernel facts do not cover.
    """

    versions: Mapping[str, str]
    devices: tuple[tuple[str, str], ...]
    no_kernel: Mapping[str, Mapping[str, tuple[str, ...]]]
    unmeasured: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield from (f"{name}: {found}" for name, found in self.versions.items())
        yield from (f"device {kind}: {name}" for kind, name in self.devices)
        for kind, by_dtype in self.no_kernel.items():
            for dtype, ops in by_dtype.items():
                yield f"on {kind} these run in float32, for want of a {dtype} kernel: {', '.join(ops) or 'none known'}"
        for kind in self.unmeasured:
            yield f"on {kind} no missing kernels are known"


def examine() -> Diagnosis:
    """Examine this machine, without running anything on its devices.

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
    )


def _missing(facts: KernelFacts, kind: str, dtype: str) -> tuple[str, ...]:
    op_list = load_op_list("default", default=dtype)
    rules = {op: op_list.rule(op, kind) for op in facts.no_kernel.get((kind, dtype), frozenset[str]())}
    return tuple(sorted(op for op, rule in rules.items() if rule is not None and rule.category in _MAY_BE_LOW))


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
