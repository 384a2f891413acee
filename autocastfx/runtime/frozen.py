"""One graph of a converted model as a plain GraphModule, which is static: for exporters, traces and files."""

from __future__ import annotations

import ast
import inspect
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MethodDescriptorType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autocastfx.capture.call import CallSignature, CallStructure, sized
from autocastfx.capture.shape_guard import ShapeGuard
from autocastfx.errors import UnsupportedError, VariantError
from autocastfx.graph.node import attribute, value
from autocastfx.runtime.around import refuse_scripting, without_trace
from autocastfx.runtime.operators.float8 import quantize
from autocastfx.runtime.quick_graph import call_quick
from autocastfx.runtime.saved import keep_chosen, planned_form
from autocastfx.runtime.working_copies import ATTRIBUTE, quantized_copy, working_copy

if TYPE_CHECKING:
    from autocastfx.capture.captured import Captured
    from autocastfx.runtime.captures import CapturedGraph
    from autocastfx.runtime.variant import Variant

CALL = "autocastfx_call"  # the module that checks calls, and holds the constants of the graph
_OUTPUT = "autocastfx_output"  # the module that makes the output
_STARRED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_DEFAULTS = (type(None), bool, int, float, str)


def member_name(target: str) -> str:
    """Return the name in the module of the check of what a graph reads from outside of the model."""
    return re.sub(r"\W", "_", target)


class FrozenCall(nn.Module):
    """Refuses calls that a graph was not captured for, and holds its constants.

    It is called first, with the arguments in the order of the parameters, and returns the tensors among them.
    """

    _is_impure = True  # torch.fx keeps the call though nothing may read its result
    __prepare_scriptable__ = refuse_scripting

    def __init__(
        self,
        model: str,
        signature: CallSignature,
        structure: CallStructure,
        guard: ShapeGuard,
        devices: Sequence[torch.device | None],
        training: bool | None,
    ) -> None:
        super().__init__()
        self.model, self.signature, self.structure, self.guard = model, signature, structure, guard
        self.again = _AGAIN
        self.mode = training
        self.training = cast("bool", training)
        kinds = {device.type for device in devices if device is not None}
        self.kinds = tuple(kind for kind in kinds if torch.amp.is_autocast_available(kind))
        parameters = self.signature.parameters
        self.names = tuple(p.name for p in parameters)
        self.is_flat = all(child.is_leaf() for child in structure.spec.children())
        given = dict(zip(structure.spec.context, structure.leaves, strict=True)) if self.is_flat else {}
        self.is_flat &= all(leaf[0] == "tensor" for leaf in given.values())
        self.places = tuple(i for i, p in enumerate(parameters) if p.name in given)
        rest = [(i, p) for i, p in enumerate(parameters) if p.name not in given]
        self.rest = tuple((i, p.default) for i, p in rest if p.kind not in _STARRED)
        self.starred = tuple(i for i, p in rest if p.kind in _STARRED)
        tensors = [leaf for leaf in structure.leaves if leaf[0] == "tensor"]
        self.kept = tuple((*leaf[1:3], device) for leaf, device in zip(tensors, devices, strict=True))

    def forward(self, *values: Any) -> tuple[torch.Tensor, ...]:
        """Return the tensors of a call.

        Raises:
            VariantError: the graph was captured for another structure, mode, dtype, device or size.
            UnsupportedError: a region of torch.autocast is open, which would cast once more.
        """
        if cast("Any", torch._C)._get_tracing_state() is None:
            return self._checked(values)
        with without_trace():
            return self._checked(values)

    def _checked(self, values: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        if self.training is not self.mode:
            raise VariantError(
                f"the frozen {self.model} was captured in {_MODES[self.mode]} mode, and cannot be switched: freeze the "
                "converted model in the other mode."
            )
        for kind in self.kinds:
            if torch.is_autocast_enabled(kind):
                raise UnsupportedError(
                    f"the frozen {self.model} is called under torch.autocast, which would cast again: call it outside."
                )
        is_flat = self.is_flat and not any(values[i] for i in self.starred)
        if is_flat and all(values[i] is default for i, default in self.rest):
            tensors: Sequence[Any] = [values[i] for i in self.places]
        else:
            tensors = self._bound(values)
        for tensor, (dtype, ndim, device) in zip(tensors, self.kept, strict=True):
            fits = isinstance(tensor, torch.Tensor) and tensor.dtype == dtype and tensor.ndim == ndim
            if not fits or (device is not None and tensor.device != device):
                if any(isinstance(one, fx.Proxy) for one in tensors):
                    return tuple(tensors)  # of a trace by torch.fx, which knows nothing of them
                self._refuse(tensors)
        sizes = [tensor.shape for tensor in tensors]
        if not self.guard.holds(sizes):
            broken = self.guard.broken(sizes, self.structure.tensor_names())
            raise VariantError(f"the frozen {self.model} does not fit these sizes: {broken}. {self.again}")
        return tuple(tensors)

    def _bound(self, values: Sequence[Any]) -> Sequence[torch.Tensor]:
        arguments = dict(zip(self.names, values, strict=True))
        given = {p.name: p for p in self.signature.parameters}
        kept = {name: one for name, one in arguments.items() if given[name].kind not in _STARRED or one}
        call = self.signature.describe(*self.signature.split(kept))
        if call.structure != self.structure:
            raise VariantError(
                f"the frozen {self.model} takes the call ({self.structure}), not ({call.structure}). {self.again}"
            )
        return call.tensors

    def _refuse(self, tensors: Sequence[Any]) -> None:
        told = [
            f"{name} is {f'{sized(one)} on {one.device}' if isinstance(one, torch.Tensor) else type(one).__name__}"
            for name, one in zip(self.structure.tensor_names(), tensors, strict=True)
        ]
        places = ", ".join(sorted({str(device) for *_, device in self.kept if device is not None}))
        raise VariantError(
            f"the frozen {self.model} takes the call ({self.structure}) on {places}: {', '.join(told)}. {self.again}"
        )


_AGAIN = "Freeze the converted model again, with such inputs, or call the converted model."
_MODES: Mapping[bool | None, str] = {True: "train", False: "eval", None: "a mixed"}


@dataclass(frozen=True)
class TableReads:
    """Lets code read parameters and buffers in its modules' tables, in a tenth of the time that ``nn.Module`` takes.

    Where one is in no table, all are read as attributes: a parametrization may compute them. So are they in a trace by
    torch.fx, which learns of reads there.

    Attributes:
        tables: by the names of nodes.
    """

    tables: Mapping[str, str]

    def __call__(self, body: list[str]) -> list[str]:
        """Return the lines of a function."""
        by_table, as_attributes, others = list[str](), list[str](), list[str]()
        known: dict[str, str] = {}
        for line in "".join(body).splitlines(keepends=True):
            read = _READ.fullmatch(line)
            if read is None or read["name"] not in self.tables:
                others.append(line)
            else:
                table = self.tables[read["name"]]
                of = _local(ast.parse(f"{read['module']}.{table}", mode="eval").body, known, by_table)
                by_table.append(f'    {read["name"]} = {of}["{read["member"]}"]\n')
                as_attributes.append(f"    {line}")
        if not by_table:
            return body
        return ["try:\n", _UNLESS_TRACED, *by_table, "except (AttributeError, KeyError):\n", *as_attributes, *others]


def _local(path: ast.expr, known: dict[str, str], lines: list[str]) -> str:
    """Return the name of a local variable for a module or a table: each is looked up once, and not for each tensor."""
    match path:
        case ast.Attribute(value=inner, attr=name):
            code = f"{_local(inner, known, lines)}.{name}"
        case ast.Call(args=[inner, ast.Constant(value=name)]):
            code = f'getattr({_local(inner, known, lines)}, "{name}")'
        case _:
            return "self"
    if code not in known:
        known[code] = f"_at_{len(known)}_"  # no node's name ends so
        lines.append(f"    {known[code]} = {code}\n")
    return known[code]


_UNLESS_TRACED = "    if torch.fx._symbolic_trace.is_fx_symbolic_tracing(): raise KeyError\n"
_READ = re.compile(r"(?P<name>\w+) = (?P<module>(?:self|getattr\().*)\.(?P<member>\w+)\n")


class FrozenOutput(nn.Module):
    """Makes the model's output, of a class of its own, from its leaves."""

    def __init__(self, spec: pytree.TreeSpec) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, *leaves: Any) -> Any:
        """Return the output."""
        return pytree.tree_unflatten(list(leaves), self.spec)


def freeze(
    model: nn.Module, root: nn.Module, signature: CallSignature, graph: CapturedGraph, variant: Variant
) -> fx.GraphModule:
    """Return a variant as a GraphModule that shares the parameters and buffers of ``model``.

    Args:
        model: the model.
        root: by whose paths the graph reads them: the model, or what holds it.
        signature: of the model's calls.
        graph: what was captured.
        variant: what it was converted to. Its output is known from a call.

    Raises:
        UnsupportedError: the graph takes numbers that forward reads from elsewhere, or returns what no graph holds.
    """
    captured, name = graph.captured, type(model).__name__
    tensors = captured.structure.tensor_names()
    inputs = captured.graph.find_nodes(op="placeholder")
    others = [str(node.target) for node in inputs[len(tensors) :]]
    others += [str(node.target) for node in captured.graph.find_nodes(op="get_attr") if any(map(_is_read, node.users))]
    if others:
        raise UnsupportedError(
            f"forward of {name} reads {', '.join(others)}, which changes from call to call, and a frozen graph would "
            "keep it as it is: make it an argument, or a buffer."
        )
    own = _holders(model, {})
    devices = [getattr(value(node), "device", None) for node in inputs]  # None: nothing reads it
    modes = set(variant.modes)
    call = FrozenCall(
        name, signature, captured.structure, variant.guard, devices, modes.pop() if len(modes) == 1 else None
    )
    own.add_module(CALL, call)
    frozen = _graph_of(own, model, root, graph, variant)
    made = fx.GraphModule(own, frozen, class_name=f"Frozen{name}")
    for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
        made.__dict__[table] = own.__dict__[table]
    made.training = model.training
    type(made).__call__ = nn.Module.__call__  # torch.fx's own, in two more calls, prints a line beside an error
    for module in made.modules():  # Python finds in it what nn.Module looks up slowly; they are the same modules
        module.__dict__.update({key: one for key, one in module._modules.items() if one is not None})
    return made


def _holders(module: nn.Module, known: dict[nn.Module, nn.Module]) -> nn.Module:
    """Return plain modules that hold what ``module`` and those in it hold."""
    if module not in known:
        own = known[module] = nn.Module()
        own.training = module.training
        own._parameters = dict(module._parameters)
        own._buffers = dict(module._buffers)
        own._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
        for name, one in module._modules.items():
            own._modules[name] = None if one is None else _holders(one, known)
    return known[module]


def _graph_of(own: nn.Module, model: nn.Module, root: nn.Module, graph: CapturedGraph, variant: Variant) -> fx.Graph:
    """Return the variant's graph, with a check of the call before it and the model's output behind it."""
    call = cast("Any", own)._modules[CALL]
    members = (*model.named_buffers(remove_duplicate=False), *model.named_parameters(remove_duplicate=False))
    paths = {id(tensor): path for path, tensor in members}
    # the check of the call gives the tensors that the graph's inputs stand for
    source = variant.graph if not variant.plan.saved else keep_chosen(variant.graph, variant.plan.saved, planned_form)
    frozen = fx.Graph()
    inputs = [str(node.target) for node in graph.captured.graph.find_nodes(op="placeholder")]
    tensors = _check_of(frozen, call, len(inputs))
    leaves = dict(zip(inputs, tensors, strict=True))
    made: dict[fx.Node, Any] = {}
    outputs: list[Any] = []

    def held(target: str) -> str:
        """Return the path in the frozen module of what the graph reads at ``target``."""
        if target.startswith(f"{variant.prefix}."):
            tensor = attribute(variant, target.removeprefix(f"{variant.prefix}."))
        else:
            tensor = _find(root, target, graph.read({}))
        if id(tensor) in paths:
            return paths[id(tensor)]
        name = member_name(target)
        if isinstance(tensor, torch.Tensor):
            call.register_buffer(name, tensor, persistent=False)
        else:
            setattr(call, name, tensor)
        return f"{CALL}.{name}"

    # the graph, with copies that a view keeps made anew in each call
    for node in source.nodes:
        if node.op == "placeholder":
            made[node] = leaves[str(node.target)]
        elif node.op == "get_attr":
            made[node] = None if node.target == ATTRIBUTE else frozen.get_attr(held(str(node.target)))
        elif node.op == "output":
            outputs = [made[one] if isinstance(one, fx.Node) else one for one in node.args[0]]
        elif node.target is working_copy:
            _, master, dtype = node.args
            made[node] = frozen.call_function(torch.ops.aten.to.dtype, (made[master], dtype))
        elif node.target is quantized_copy:
            made[node] = frozen.call_function(quantize, tuple(made.get(one, one) for one in node.args[2:]))
        else:
            made[node] = frozen.node_copy(node, made.__getitem__)
    # its outputs as the model nests them, by quick calls
    _return(frozen, own, variant, outputs, tensors, paths)
    call_quick(frozen, torchs_alone=True)
    for node in frozen.nodes:
        if isinstance(node.target, MethodDescriptorType):  # of which a file has the name alone
            node.op, node.target = "call_method", node.target.__name__
    # members are read from their tables, without torch's look-up by name
    tables: dict[str, str] = {}
    for node in frozen.find_nodes(op="get_attr"):
        path, _, member = str(node.target).rpartition(".")
        module = own.get_submodule(path)
        for table in ("_parameters", "_buffers"):
            if member in getattr(module, table):
                tables[node.name] = table
    frozen.on_generate_code(lambda _: TableReads(tables))
    return frozen


def _check_of(frozen: fx.Graph, call: FrozenCall, count: int) -> list[fx.Node]:
    """Let the graph take the arguments of the model's forward and check them; return the tensors among them."""
    arguments: list[fx.Node] = []
    parameters = call.signature.parameters
    for i, p in enumerate(parameters):
        rest = [one for one in parameters[i:] if one.kind not in _STARRED]
        has_default = all(isinstance(one.default, _DEFAULTS) for one in rest)
        stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        default = (p.default,) if has_default and not stars else ()
        arguments.append(frozen.create_node("placeholder", f"{stars}{p.name}", default, name=p.name))
    checked = frozen.call_module(CALL, tuple(arguments))
    if call.is_flat:
        return [arguments[i] for i in call.places]
    return [frozen.call_function(operator.getitem, (checked, i)) for i in range(count)]


def _return(
    frozen: fx.Graph,
    own: nn.Module,
    variant: Variant,
    outputs: Sequence[Any],
    tensors: Sequence[fx.Node],
    paths: Mapping[int, str],
) -> None:
    """Let the graph return the model's output."""
    results, leaves = variant.results, list[Any]()
    captured = cast("Captured", variant.captured).graph
    made = (value(node) for node in captured.find_nodes(op="placeholder"))
    varies = any(isinstance(n, torch.SymInt) for one in made if isinstance(one, torch.Tensor) for n in one.shape)
    for kind, where in results.places:
        if kind == "value" and isinstance(where, torch.Tensor):
            if id(where) not in paths:
                raise UnsupportedError(
                    "the model returns a tensor that is no result of a graph, which cannot be frozen."
                )
            leaves.append(frozen.get_attr(paths[id(where)]))
        elif kind == "value":
            if not isinstance(where, _DEFAULTS):
                told = f"the model returns a {type(where).__name__}, which cannot be frozen: return tensors."
                raise UnsupportedError(told)
            if type(where) in (int, float) and varies:
                raise UnsupportedError(
                    f"the model returns the number {where}, which may depend on sizes, and this graph is for several "
                    "sizes: return a tensor, or freeze a copy of the converted model that was called with these alone."
                )
            leaves.append(where)
        else:
            leaves.append({"output": outputs, "tensor": tensors}[kind][where])
    spec = cast("pytree.TreeSpec", results.spec)
    if _is_plain(spec):
        frozen.output(pytree.tree_unflatten(leaves, spec))
    else:
        cast("Any", own)._modules[_OUTPUT] = FrozenOutput(spec)
        frozen.output(frozen.call_module(_OUTPUT, tuple(leaves)))


def _is_read(node: fx.Node) -> bool:
    """True for a node that reads a number out of a tensor, as which Dynamo passes numbers that change."""
    return node.target is torch.ops.aten.item.default


def _find(root: nn.Module, target: str, held: Mapping[str, torch.Tensor]) -> Any:
    """Return what the model holds at a path; else the tensor from outside of it of that name."""
    try:
        return attribute(root, target)
    except AttributeError:
        return held[target]


def _is_plain(spec: pytree.TreeSpec) -> bool:
    return spec.is_leaf() or (spec.type in (tuple, list, dict) and all(map(_is_plain, spec.children())))
