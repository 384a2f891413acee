"""Peak rates of GPUs: a shipped table, or given by the user."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from autocastfx.dtypes import LOW_DTYPES, dtype_name
from autocastfx.errors import GpuError
from autocastfx.policy.yaml_tree import Tree, nearest, parse_file

__all__ = ["Gpu", "find_gpu", "gpus"]

_RATES = ("tensor_tflops", "float32_tflops", "bandwidth_gb_s")


@dataclass(frozen=True)
class Gpu:
    """Peak rates of a GPU.

    Attributes:
        name: its name in reports.
        tensor_tflops: peak of its tensor cores on 16-bit inputs, without sparsity, in 10^12 operations per second.
        float32_tflops: peak in float32, in 10^12 operations per second.
        bandwidth_gb_s: memory bandwidth in 10^9 bytes per second.
        dtypes: the 16-bit dtypes that its tensor cores take.
        source: the source of the numbers.

    Raises:
        GpuError: a rate is not a finite number above 0.
    """

    name: str
    tensor_tflops: float
    float32_tflops: float
    bandwidth_gb_s: float
    dtypes: tuple[str, ...] = tuple(map(dtype_name, LOW_DTYPES))
    source: str = "as given"

    def __post_init__(self) -> None:
        for rate in _RATES:
            given = getattr(self, rate)
            if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 < given < math.inf:
                raise GpuError(f"{rate} of the GPU {self.name!r} is a finite number above 0, not {given!r}.")

    def peak(self, *, tensor_cores: bool) -> float:
        """Return operations per second, in tensor cores or in float32."""
        return 1e12 * (self.tensor_tflops if tensor_cores else self.float32_tflops)

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""
        return 1e9 * self.bandwidth_gb_s

    def balance(self, *, tensor_cores: bool) -> float:
        """Return the operations per byte above which computing takes longer than moving the bytes."""
        return self.peak(tensor_cores=tensor_cores) / self.bandwidth


@lru_cache(maxsize=1)
def gpus() -> tuple[Gpu, ...]:
    """Read the GPUs of the shipped table.

    Raises:
        OpListError: the file is damaged.
    """
    tree = parse_file(Path(__file__).parent / "gpus.yaml", shown="autocastfx/report/lint/gpus.yaml")
    return tuple(_gpu(name.text, entry) for name, entry in tree.items())


def _gpu(name: str, entry: Tree) -> Gpu:
    entry.check_keys((*_RATES, "dtypes", "source"), what="number of a GPU")
    tensor, float32, bandwidth = (entry.child(rate).as_number() for rate in _RATES)
    dtypes = tuple(dtype.text for dtype in entry.child("dtypes").as_strings())
    return Gpu(name, tensor, float32, bandwidth, dtypes, entry.child("source").text)


def find_gpu(name: str) -> Gpu:
    """Find a GPU of the table by name, ignoring case, spaces and hyphens: ``"rtx4090"`` is ``"RTX 4090"``.

    Raises:
        GpuError: no GPU has this name; the message suggests the nearest.
    """
    known = {_plain(gpu.name): gpu for gpu in gpus()}
    if _plain(name) not in known:
        names = [gpu.name for gpu in known.values()]
        hint = nearest(name.upper(), names)
        raise GpuError(
            f"no GPU is known as {name!r}{hint}. Known: {', '.join(names)}; for another give its rates, "
            "autocastfx.Gpu(name, tensor_tflops, float32_tflops, bandwidth_gb_s)."
        )
    return known[_plain(name)]


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name.lower())
