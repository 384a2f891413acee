"""``fuse="inductor"``: compile the regions of a graph that are bound by memory, each kind of region once.

Between products a model adds, drops out, normalizes: each op reads and writes all of a value, though it hardly
computes. TorchInductor makes few kernels of such a region. Regions of equal ops, sizes and strides, as equal layers
have, share what is compiled, so compiling takes as long for 48 layers as for 4. A region's inputs and results have the
dtypes that are planned; what lies between them is not rounded to 16 bits where the eager ops round it. Inductor chooses
what a region keeps for backward, and on a GPU its dropout draws other numbers than torch's.

Nothing of Dynamo runs: AOTAutograd and Inductor compile a region for the tensors of its first call. Under transforms of
torch.func, while tracing, and inside torch.compile, a region runs op by op.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._ops import OpOverload
from torch.autograd.graph import get_gradient_edge
from torch.fx.node import map_arg
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase
from torch.fx.passes.utils.fuser_utils import fuse_by_partitions

from autocastfx.capture.leave_intact import own_thread_state
from autocastfx.errors import MissingExtraError
from autocastfx.graph import alias
from autocastfx.graph.names import base_name, op_name
from autocastfx.graph.node import argument, tensors
from autocastfx.runtime.operators.casts import is_concrete
from autocastfx.runtime.working_copies import quantized_copy, working_copy

# Ops that torch's own kernels compute best, those that Inductor would only call, and average pools, whose gradients the
# Inductor of torch 2.13 divides by the whole window where ``ceil_mode`` lets one reach beyond the edge.
_APART = frozenset(
    (
        *("linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "einsum", "scaled_dot_product_attention"),
        *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution"),
        *("embedding", "cross_entropy_loss", "nll_loss_nd", "_unsafe_index", "index", "item", "sort"),
        *("tf32_product", "wide_linear", "float8_linear", "quantize", "topk", "cumsum", "arange", "gather"),
        *("max_pool2d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "lstm", "gru"),
    )
)
# On a CPU compiled dropout takes longer than torch's own, which also draws the numbers that it always draws.
_DROPOUT = frozenset(("dropout", "native_dropout"))
_APART_ON = {"cpu": _DROPOUT}
_LEAST = 2  # ops that compute: a region of fewer saves nothing


class Region:
    """A kind of region, compiled anew for each combination of sizes, strides, dtypes and gradients that it meets."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.__name__ = f"region_of_{sum(node.op == 'call_function' for node in module.graph.nodes)}_ops"
        self._reaches = _reaches(module.graph)
        self._reach_all = len({*self._reaches}) <= 1
        self._lock = threading.Lock()
        self._compiled: dict[object, Callable[..., Any]] = {}

    def __call__(self, *given: torch.Tensor) -> Any:
        """Compute the region."""
        if torch._C._are_functorch_transforms_active() or not all(map(is_concrete, given)):
            return self.module(*given)
        records = torch.is_grad_enabled()
        key = (records, *((t.dtype, t.shape, t.stride(), t.device, records and t.requires_grad) for t in given))
        run = self._compiled.get(key)
        if run is None:
            with self._lock:
                run = self._compiled.get(key) or self._compile(given)
                self._compiled[key] = run
        made = run(*given)
        if records and not self._reach_all:
            _give_no_zeros(made, given, self._reaches)
        return made[0] if isinstance(made, (list, tuple)) and len(made) == 1 else made

    def _compile(self, given: tuple[torch.Tensor, ...]) -> Callable[..., Any]:
        from torch._functorch._aot_autograd import graph_compile
        from torch._inductor.compile_fx import compile_fx

        examples = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in given]
        records = torch.is_grad_enabled()
        # What backward saves is not given away, for it may run twice. (Where torch's switch for that is off, such a
        # backward still raises.)
        kept = mock.patch.object(graph_compile, "collect_bw_donated_buffer_idxs", return_value=[])
        plain: Any = torch._C._DisableAutocast()
        with own_thread_state(), warnings.catch_warnings(), kept, plain, torch.set_grad_enabled(records):
            warnings.simplefilter("ignore")  # of a compiler, about the machine
            compiled: Any = compile_fx(fx.GraphModule(self.module, _in_a_tuple(self.module.graph)), examples)
            return compiled


def fuse_regions(graph: fx.Graph, device: str) -> fx.Graph:
    """Return ``graph``, which takes parameters as inputs, with a call of a :class:`Region` for each region.

    ``device`` is the type of the device that it will run on.

    No region reaches across an op that writes, switches gradients, or calls what is not known: the order of these and
    of all around them stays.
    """
    read = {str(node.target): torch.nn.Module() for node in graph.find_nodes(op="get_attr")}  # graphs of loops and such
    module = fx.GraphModule(read, graph)
    partitions: list[dict[fx.Node, int | None]] = []
    for stretch in _stretches(graph):
        fusible = _Fusible(stretch, _APART | _APART_ON.get(device, frozenset()))
        partitioner = CapabilityBasedPartitioner(module, fusible, allows_single_node_partition=False)
        found = (one.nodes for one in partitioner.propose_partitions())
        partitions += [dict.fromkeys(nodes) for nodes in found if sum(map(_computes, nodes)) >= _LEAST]
    fused = fuse_by_partitions(module, partitions, prefix="region_")
    kinds: dict[object, Region] = {}
    for node in list(fused.graph.find_nodes(op="call_module")):
        part = fused.get_submodule(str(node.target))
        if isinstance(part, fx.GraphModule):
            node.op, node.target = "call_function", kinds.setdefault(_kind(part.graph), Region(part))
    fused.graph.lint()
    return fused.graph


def _stretches(graph: fx.Graph) -> list[frozenset[fx.Node]]:
    """Return the nodes between those whose place in the graph matters, without values that are written into."""
    shared, stretches = alias.alias_sets(graph), [list[fx.Node]()]
    for node in graph.nodes:
        if _has_a_place(node, shared):
            stretches.append([])
        elif node not in shared:
            stretches[-1].append(node)
    return [frozenset(stretch) for stretch in stretches if len(stretch) >= _LEAST]


def _has_a_place(node: fx.Node, shared: Mapping[fx.Node, alias.AliasSet]) -> bool:
    """True for what others must come before or after though nothing that they read says so."""
    if node.op != "call_function":
        return False
    if isinstance(node.target, OpOverload):
        written = (one for target in alias.mutated_inputs(node) for one in shared[target].members)
        is_seen = any(reader is not node for one in written for reader in one.users)
        return is_seen or alias.is_opaque(node) or not _keeps_statistics_alone(node)
    return op_name(node) != "getitem" and node.target not in (working_copy, quantized_copy)


def _keeps_statistics_alone(node: fx.Node) -> bool:
    """False for a norm into whose running statistics it writes, as no schema says, where another op reads them."""
    given = (argument(node, name) for name in ("running_mean", "running_var"))
    return all(one is None or len(one.users) == 1 for one in given)


@dataclass(frozen=True)
class _Fusible(OperatorSupportBase):
    """Says which of some nodes may be in a region: those of one result that write nothing and that memory bounds."""

    nodes: frozenset[fx.Node]
    apart: frozenset[str]

    def is_node_supported(self, submodules: Mapping[str, torch.nn.Module], node: fx.Node) -> bool:
        """True for such a node."""
        target = node.target
        if node not in self.nodes or not isinstance(target, OpOverload) or target._schema.is_mutable:
            return False
        is_known = target.namespace in ("aten", "prims", "autocastfx") and _word(node) not in self.apart
        draws = torch.Tag.nondeterministic_seeded in target.tags and _word(node) not in _DROPOUT
        values = tensors(node)
        return is_known and not draws and len(values) == 1 and values[0].layout is torch.strided and _is_sized(node)


def _word(node: fx.Node) -> str:
    """The op's name without its namespace: operators of this package are called as torch's."""
    return base_name(op_name(node)).rpartition("::")[2]


def _is_sized(node: fx.Node) -> bool:
    """False for a node that gives or reads a size that is no number: a region is of tensors alone."""
    return all(len(tensors(read)) == 1 for read in node.all_input_nodes)


def _computes(node: fx.Node) -> bool:
    return not alias.is_view(node)


def regions_in(graph: fx.Graph) -> tuple[int, int]:
    """Return how many regions a graph has, and of how many kinds."""
    calls = [node.target for node in graph.nodes if isinstance(node.target, Region)]
    return len(calls), len(set(calls))


def _kind(graph: fx.Graph) -> tuple[object, ...]:
    """Return what two regions that compute the same have in common."""
    numbers = {node: number for number, node in enumerate(graph.nodes)}
    return tuple(
        (
            node.op,
            node.target if node.op == "call_function" else "",
            str(map_arg((node.args, node.kwargs), _numbered(numbers))),
        )
        for node in graph.nodes
    )


def _numbered(numbers: Mapping[fx.Node, int]) -> Callable[[fx.Node], Any]:
    return lambda node: f"%{numbers[node]}"


# A compiled region gives each input a gradient, zeros where only results depend on it that get none. torch gives None
# there, and the two differ for an optimizer: one with weight decay steps in a parameter whose gradient is zero.


def _reaches(graph: fx.Graph) -> tuple[frozenset[int], ...]:
    """Return, for each input of a region, the numbers of the results that depend on it."""
    result = graph.output_node().args[0]
    results = result if isinstance(result, (list, tuple)) else (result,)
    reached: dict[fx.Node, frozenset[int]] = {}
    for node in reversed(graph.nodes):
        own = frozenset(number for number, one in enumerate(results) if one is node)
        reached[node] = own.union(*(reached[reader] for reader in node.users if reader.op != "output"))
    return tuple(reached[node] for node in graph.find_nodes(op="placeholder"))


def _give_no_zeros(made: Sequence[Any], given: Sequence[torch.Tensor], reaches: Sequence[frozenset[int]]) -> None:
    """Let inputs get no gradient that come to no result with one."""
    inputs = [
        (get_gradient_edge(one), reached) for one, reached in zip(given, reaches, strict=True) if one.requires_grad
    ]
    before = {edge.node for edge, _ in inputs}
    places = {number: place for number, one in enumerate(made) if (place := _place(one, before)) is not None}
    node = next((node for node, _ in places.values()), None)
    if node is None:  # no result has a gradient
        return
    reached_by = [
        frozenset(
            places[number][1]
            for edge, reached in inputs
            if (edge.node, edge.output_nr) == (reader, place)
            for number in reached & places.keys()
        )
        for reader, place in node.next_functions
    ]

    def drop(gradients: Sequence[Any], of_results: Sequence[Any]) -> tuple[Any, ...] | None:
        missing = {place for place, gradient in enumerate(of_results) if gradient is None}
        if not missing:
            return None
        each = zip(gradients, reached_by, strict=True)
        return tuple(None if reached and reached <= missing else gradient for gradient, reached in each)

    node.register_hook(drop)


def _place(result: Any, before: Set[Any]) -> tuple[Any, int] | None:
    """Return the compiled function's node, and the place of a result in it, or of what it is a view of."""
    node, place = (result.grad_fn, result.output_nr) if isinstance(result, torch.Tensor) else (None, 0)
    while node is not None and node not in before:
        if type(node).__name__ == "CompiledFunctionBackward":
            return node, place
        node, place = next(iter(node.next_functions), (None, 0))
    return None


def _in_a_tuple(graph: fx.Graph) -> fx.Graph:
    """Return a copy of ``graph`` that returns a tuple, as compilers want it."""
    copied = fx.Graph()
    result = copied.graph_copy(graph, {})
    copied.output(tuple(result) if isinstance(result, (list, tuple)) else (result,))
    return copied


@functools.cache
def check_compiler(device: str) -> None:
    """Raise an error where Inductor cannot compile for this type of device.

    Raises:
        MissingExtraError: no compiler is there.
    """
    if device == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except (InvalidCxxCompiler, RuntimeError) as error:
            raise MissingExtraError(
                f'fuse="inductor" compiles for a CPU with a C++ compiler, and none works: {error}. Install one (g++ or '
                "clang++), name it in the environment variable CXX, or leave fuse out."
            ) from None
    elif next(_missing_triton(), None) is not None:
        raise MissingExtraError(
            f'fuse="inductor" compiles for {device} with the package triton, which is not installed: install it, or '
            "leave fuse out."
        )


def _missing_triton() -> Iterator[str]:
    from importlib.util import find_spec

    if find_spec("triton") is None:
        yield "triton"
