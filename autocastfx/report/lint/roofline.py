"""Roofline model: an op takes at least the time of its FLOP at peak rate, and of its bytes at full bandwidth."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from autocastfx.dtypes import LOW_DTYPES, dtype_name
from autocastfx.errors import GpuError
from autocastfx.graph.alias import aliased, moves
from autocastfx.graph.names import op_name
from autocastfx.graph.node import argument, dtypes, example_size, is_member, tensors, uses, value
from autocastfx.policy.float8 import RECIPES, Product
from autocastfx.policy.yaml_tree import Tree, nearest, parse_file
from autocastfx.runtime.operators.float8 import float8_linear

# Peak rates of GPUs: a shipped table, or given by the user.

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
        float8_tflops: peak of its tensor cores on float8 inputs, likewise; 0 where it has none, or none is known.

    Raises:
        GpuError: a rate is not a finite number above 0.
    """

    name: str
    tensor_tflops: float
    float32_tflops: float
    bandwidth_gb_s: float
    dtypes: tuple[str, ...] = tuple(map(dtype_name, LOW_DTYPES))
    source: str = "as given"
    float8_tflops: float = 0.0

    def __post_init__(self) -> None:
        for rate in (*_RATES, "float8_tflops"):
            given = getattr(self, rate)
            known = isinstance(given, (int, float)) and not isinstance(given, bool) and 0 <= given < math.inf
            if not known or (not given and rate in _RATES):
                least = "above 0" if rate in _RATES else "from 0 on"
                raise GpuError(f"{rate} of the GPU {self.name!r} is a finite number {least}, not {given!r}.")

    def peak(self, *, tensor_cores: bool, in_float8: bool = False) -> float:
        """Return operations per second, in tensor cores or in float32.

        Raises:
            GpuError: ``in_float8`` asks for the rate on float8 inputs, and none is known.
        """
        if in_float8 and not self.float8_tflops:
            known = ", ".join(gpu.name for gpu in gpus() if gpu.float8_tflops)
            raise GpuError(
                f"no float8 rate is known of {self.name}, and products run in float8: choose one of {known}, or give "
                "the rate, autocastfx.Gpu(..., float8_tflops=...)."
            )
        in_cores = self.float8_tflops if in_float8 else self.tensor_tflops
        return 1e12 * (in_cores if tensor_cores else self.float32_tflops)

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""
        return 1e9 * self.bandwidth_gb_s

    def balance(self, *, tensor_cores: bool, in_float8: bool = False) -> float:
        """Return the operations per byte above which computing takes longer than moving the bytes."""
        return self.peak(tensor_cores=tensor_cores, in_float8=in_float8) / self.bandwidth


@lru_cache(maxsize=1)
def gpus() -> tuple[Gpu, ...]:
    """Read the GPUs of the shipped table.

    Raises:
        OpListError: the file is damaged.
    """
    tree = parse_file(Path(__file__).parent / "gpus.yaml", shown="autocastfx/report/lint/gpus.yaml")
    return tuple(_gpu(name.text, entry) for name, entry in tree.items())


def _gpu(name: str, entry: Tree) -> Gpu:
    entry.check_keys((*_RATES, "float8_tflops", "dtypes", "source"), what="number of a GPU")
    tensor, float32, bandwidth = (entry.child(rate).as_number() for rate in _RATES)
    float8 = entry.child("float8_tflops")
    dtypes = tuple(dtype.text for dtype in entry.child("dtypes").as_strings())
    in_float8 = 0.0 if float8.is_missing else float8.as_number()
    return Gpu(name, tensor, float32, bandwidth, dtypes, entry.child("source").text, in_float8)


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


# Count an op's operations, by torch's formulas, and its bytes, by sizes and dtypes.

_LOW = {dtype_name(dtype) for dtype in LOW_DTYPES}
_GATHERS = ("embedding", "gather", "index", "index_select", "take", "take_along_dim")  # reads only elements returned


@dataclass(frozen=True)
class Work:
    """The operations and bytes of an op.

    Attributes:
        flops: multiplications and additions of matrix products and convolutions; 0 for other ops, which bytes bound.
            None if the op is not ATen's, so that torch has no formula, or cannot run on abstract values.
        bytes: its inputs read once and its outputs written; 0 for a view, and for an op without tensor outputs.
        reads: names of the dtypes that it reads, each once; of its outputs if it reads no tensor.
        in_float8: it is a product that tensor cores compute of float8 inputs.
    """

    flops: int | None
    bytes: int
    reads: tuple[str, ...]
    in_float8: bool = False

    @property
    def low(self) -> bool:
        """True if the op reads 16-bit or float8 values, which tensor cores take."""
        return self.in_float8 or not _LOW.isdisjoint(self.reads)


def work_of(node: fx.Node) -> Work:
    """Count the work of ``node`` for the sizes of the example inputs. A size that depends on data counts as 1."""
    read = [t for source in _read(node) for t in tensors(source)]
    names = tuple(dict.fromkeys(dtype_name(t.dtype) for t in read or tensors(node)))
    if not _moves(node):
        return Work(0, 0, names)
    is_fast = _is_in_float8(node) and RECIPES[argument(node, "recipe")].capability is not None
    in_float8 = is_fast and not argument(node, "emulate")
    return Work(_flops(node), _bytes(node, read), names, in_float8)


def _is_in_float8(node: fx.Node) -> bool:
    return node.target is float8_linear and Product.OUTPUT.value in argument(node, "products").split()


def _read(node: fx.Node) -> list[fx.Node]:
    """The nodes that ``node`` reads in forward: of a value and its float8 version the one that is multiplied."""
    if node.target is not float8_linear:
        return node.all_input_nodes
    # The bias, which is small, does not say at what rate float8 values are multiplied.
    operands = ("input_forward", "weight_forward") if _is_in_float8(node) else ("input", "weight", "bias")
    return [one for one in (argument(node, name) for name in operands) if isinstance(one, fx.Node)]


def _moves(node: fx.Node) -> bool:
    """True if the node reads and writes elements; false for sizes, and for possible views that change no dtype."""
    if is_member(node) or not tensors(node):
        return False
    return moves(node) or any(set(dtypes(node)) != set(dtypes(read)) for read in aliased(node))


def _bytes(node: fx.Node, read: list[torch.Tensor]) -> int:
    written = bytes_of(tensors(node))
    if op_name(node) in _GATHERS:
        read = [t for t in read if not t.is_floating_point()]
        return 2 * written + bytes_of(read)
    return bytes_of(read) + written


def bytes_of(values: Iterable[torch.Tensor]) -> int:
    """Count the bytes of all elements, for the sizes of the example inputs. A size that depends on data counts as 1."""
    return sum(math.prod(map(example_size, value.shape)) * value.itemsize for value in values)


def _flops(node: fx.Node) -> int | None:
    if node.target is float8_linear:
        return 2 * math.prod(map(example_size, (*tensors(node)[0].shape, value(argument(node, "weight")).shape[1])))
    matrices = [t for use in uses(node) for t in tensors(use.node) if t.is_floating_point() and t.dim() >= 2]
    if len(matrices) < 2 and isinstance(node.target, OpOverload):
        return 0
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return None
    args, kwargs = map_aggregate((node.args, node.kwargs), _meta)
    try:
        with torch.no_grad(), torch._C._DisableAutocast(), FlopCounterMode(display=False) as counter:
            node.target(*args, **kwargs)
    except Exception:  # the op's sizes depend on data, or it has no abstract kernel
        return None
    return counter.get_total_flops()


class ProductFlops:
    """Counts operations of matrix products and convolutions; of the same op on the same sizes once."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, str], int] = {}

    def of(self, node: fx.Node) -> int:
        """Return the operations of a node, for the sizes of the example inputs; 0 if they are not known."""
        if node.op != "call_function" or not _moves(node):
            return 0
        key = (node.target, repr(map_aggregate((node.args, node.kwargs), _sizes)))
        if key not in self._known:
            self._known[key] = _flops(node) or 0
        return self._known[key]


def _sizes(leaf: Any) -> Any:
    """Return what an argument's operations depend on: the sizes of tensors; other arguments as they are."""
    if not isinstance(leaf, fx.Node):
        return leaf
    found = tensors(leaf)
    return [[example_size(n) for n in t.shape] for t in found] if found else str(value(leaf))


def _meta(leaf: Any) -> Any:
    """Return an argument as a meta tensor with the sizes of the example inputs; other arguments as numbers."""
    return pytree.tree_map(_without_storage, value(leaf)) if isinstance(leaf, fx.Node) else example_size(leaf)


def _without_storage(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return torch.empty([example_size(n) for n in leaf.shape], dtype=leaf.dtype, device="meta")
    return example_size(leaf)


@dataclass(frozen=True)
class Bound:
    """The least time of an op on a GPU.

    Attributes:
        seconds: max(FLOP / peak, bytes / bandwidth).
        intensity: the op's FLOP per byte; 0 for an op that moves nothing.
        balance: the GPU's FLOP per byte, at the peak rate for the op's dtype.
    """

    seconds: float
    intensity: float
    balance: float

    @property
    def by(self) -> str:
        """The bound of the time: ``"memory"`` or ``"compute"``."""
        return "compute" if self.intensity > self.balance else "memory"


@dataclass(frozen=True)
class Total:
    """The least time, in seconds, of all ops of a graph, and of its matrix products and convolutions."""

    seconds: float
    in_products: float

    @property
    def share(self) -> float:
        """The products' share of the time; 0 if there is no time."""
        return self.in_products / self.seconds if self.seconds else 0.0


def bound(work: Work, gpu: Gpu) -> Bound:
    """Compute the least time of ``work``. Operations that were not counted are taken as 0.

    Raises:
        GpuError: it runs in float8, and no such rate of the GPU is known.
    """
    flops, cores = work.flops or 0, {"tensor_cores": work.low, "in_float8": work.in_float8}
    seconds = max(flops / gpu.peak(**cores), work.bytes / gpu.bandwidth)
    return Bound(seconds, flops / work.bytes if work.bytes else 0.0, gpu.balance(**cores))


def total(works: Iterable[Work], gpu: Gpu) -> Total:
    """Add up the least times of all ``works``."""
    times = [(bound(work, gpu).seconds, bool(work.flops)) for work in works]
    return Total(sum(seconds for seconds, _ in times), sum(seconds for seconds, product in times if product))


def limit(share: float, speedup: float) -> float:
    """Return the speed-up of the whole, by Amdahl's law, if ``share`` of its time becomes ``speedup`` times as fast.

    ``speedup`` may be infinite; if ``share`` is then 1, the result is infinite.
    """
    left = 1 - share + share / speedup
    return 1 / left if left else float("inf")
