"""The converted model as a view of the model: the model's own state, called through what Dynamo captures of it."""

from __future__ import annotations

import copy
import inspect
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import fx, nn
from torch._C._dynamo.eval_frame import set_eval_frame
from torch.jit._trace import TracerWarning
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.utils import parametrize

from autocastfx.capture.call import Call, CallSignature
from autocastfx.capture.dynamo import garbage_left
from autocastfx.capture.kept_whole import functions_at
from autocastfx.capture.leave_intact import capturing, isolated, own_thread_state
from autocastfx.capture.progress import stage
from autocastfx.dtypes import dtype_name
from autocastfx.errors import NotCapturedError, UnsupportedError, VariantError
from autocastfx.graph.node import NodeRun, Observer, attribute
from autocastfx.plan.plan import Plan, Precision
from autocastfx.runtime.around import (
    Around,
    is_inside,
    keywords_of_export,
    outside_of_modes,
    refuse_inlining,
    refuse_scripting,
    skip_frames,
)
from autocastfx.runtime.captures import NOW, CapturedGraph, Captures, Runs
from autocastfx.runtime.frozen import freeze
from autocastfx.runtime.methods import Method, members_for
from autocastfx.runtime.variant import Variant, converted_variant, decided_plan
from autocastfx.runtime.working_copies import ATTRIBUTE, WorkingCopies

_C: Any = torch._C
_TABLE = "_variants"


@dataclass(frozen=True)
class Origin:
    """What tools ask of the model that a converted model was made from."""

    converter: Any
    model: nn.Module
    signature: CallSignature
    leaves: tuple[str, ...]
    device: torch.device | None
    class_name: str


class _Probed(BaseException):
    """Ends a call when the graph is known that it would run."""


_KINDS: WeakKeyDictionary[type[nn.Module], type[AmpModule]] = WeakKeyDictionary()  # by the class of the model


class AmpModule(fx.GraphModule):
    """A converted model, which is a view of the model: all state is the model's own."""

    def __new__(
        cls, captures: Captures, converter: Any, device: torch.device | None, leaves: tuple[str, ...]
    ) -> AmpModule:
        """Make no class for each instance, as GraphModule does: models of one class can stack then."""
        return object.__new__(cls)

    def __init__(
        self, captures: Captures, converter: Any, device: torch.device | None, leaves: tuple[str, ...]
    ) -> None:
        model = captures.model
        origin = Origin(converter, model, captures.signature, leaves, device, type(model).__name__)
        self._set_up(model, origin, nn.ModuleList())
        self.__dict__["_captures"] = captures
        self.__dict__["_autocastfx_copies"] = WorkingCopies(self)
        forward = signed_forward(captures.signature)
        skip_frames(forward)
        self.__dict__["forward"] = MethodType(forward, self)

    def _set_up(self, model: nn.Module, origin: Origin, variants: nn.ModuleList) -> None:
        self.__dict__.update(
            _model=model,
            _original=origin,
            _signature=origin.signature,
            _observers=(),
            _made={},
            _variants=variants,
            _parts={},
            _lineno_map={},
        )

    @property
    def _converter(self) -> Any:
        return self._original.converter

    __prepare_scriptable__ = refuse_scripting

    # ---- calls -------------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, by the converted graph that fits, between the hooks of the model itself."""
        own = self._model.__dict__
        has_hooks = own["_forward_hooks"] or own["_forward_pre_hooks"]
        if has_hooks or own["_backward_hooks"] or own["_backward_pre_hooks"] or _has_any_global_hook():
            return nn.Module._call_impl(self, *args, **kwargs)
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; each object has one of its own, with the signature of the model's."""
        return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if torch.compiler.is_dynamo_compiling():
            refuse_inlining()
        return self._call_as(self, args, kwargs, set_eval_frame(None))

    def _call_as(self, runs: Runs, args: Sequence[Any], kwargs: Mapping[str, Any], compiler: Any = None) -> Any:
        """Call the model, where ``runs`` runs the graph that fits; ``compiler`` is the callback of Dynamo around it."""
        if compiler is None and not is_inside():
            return self._called(runs, args, kwargs)
        around = Around(self._model, compiler)
        return around.call(partial(self._called, runs, around=around), cast("Any", args), kwargs)

    def _called(
        self, runs: Runs, args: Sequence[Any], kwargs: Mapping[str, Any], *, around: Around | None = None
    ) -> Any:
        call = self._captures.call_as_model if runs is self else self._captures.call
        result = call(runs, args, kwargs, around=around)
        if NOW.last is not None:
            self._note_results(result, args, kwargs)
        return result

    def _note_results(self, result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Learn where the model's output is among those of the graph that has just run for the first time."""
        last, NOW.last = NOW.last, None
        if last is not None:
            graph, _, outputs = last
            graph.results.note(result, outputs, self._signature.describe(args, kwargs).tensors)

    def _run_graph(self, graph: CapturedGraph, inputs: Sequence[Any]) -> Any:
        """Run a captured graph as this model converts it."""
        around = NOW.around
        if around is not None:
            graph.varying.update(around.places_stood_in(graph.places, inputs))
            inputs = around.given(inputs)
        variant = self._made.get(graph) or self._convert(graph)
        variant.refuse_other_sizes(inputs)
        if variant.has_changed(inputs):
            variant = self._look_again(graph, variant, inputs)
        if around is None:
            outputs = outside_of_modes(self._computed, variant, inputs)
        else:
            if around.is_traced and variant.guard.conditions:
                told = f"the trace runs the graph for sizes where {variant.guard}, and does not check that."
                warnings.warn(told, TracerWarning, stacklevel=2)
            with around.entered():
                outputs = (
                    around.run(variant.traced(self), *inputs) if around.compiler else self._computed(variant, inputs)
                )
        if graph.results.spec is None:
            NOW.last = graph, inputs, outputs
        return outputs

    def _prepare(self, graph: CapturedGraph) -> None:
        """Convert a graph, if it is not yet."""
        if graph not in self._made:
            self._convert(graph)

    def _computed(self, variant: Variant, inputs: Sequence[Any]) -> Any:
        if self._observers:
            return self._run_observed(variant, inputs)
        copies = self._autocastfx_copies.fresh() if variant.has_copies else None
        if variant.autocast is not None and torch.is_autocast_enabled(variant.autocast):
            with torch.autocast(variant.autocast, enabled=False):
                return variant.function(self, copies, *inputs)
        return variant.function(self, copies, *inputs)

    def _run_observed(self, variant: Variant, inputs: Sequence[Any]) -> Any:
        values = dict(zip(variant.places, inputs, strict=True))
        copies = self._autocastfx_copies.fresh() if variant.has_copies else None

        def given(node: fx.Node) -> Any:
            name = str(node.target)
            if name == ATTRIBUTE:
                return copies
            return values[name] if name in values else attribute(self, name)

        run = NodeRun(variant.keeping, given, self._shown_to_observers(variant))
        tensors = [values.get(str(node.target)) for node in variant.keeping.find_nodes(op="placeholder")]
        return run.run(*tensors, enable_io_processing=False)

    def _shown_to_observers(self, variant: Variant) -> Observer:
        nodes = {node.name: node for node in variant.graph.nodes if node.op == "call_function"}

        def show(node: fx.Node, value: Any, read: Sequence[Any]) -> None:
            if node.name in nodes:
                result = value[0] if f"{node.name}_result" in map(str, node.users) else value
                for observe in self._observers:
                    observe(nodes[node.name], result, read)

        return show

    def _look_again(self, graph: CapturedGraph, variant: Variant, inputs: Sequence[Any]) -> Variant:
        return variant if variant.still_holds(graph, self._converter, inputs) else self._convert(graph)

    def _convert(self, graph: CapturedGraph) -> Variant:
        before = self._made.get(graph)
        number = len(self._variants) if before is None else list(self._variants).index(before)
        device = self._original.device or graph.captured.device
        working = stage(f"converting {len(graph.captured.graph.nodes)} nodes for {device.type}", "passes")
        with capturing(), own_thread_state(), garbage_left(), working:  # torch traces in one thread at a time
            variant = converted_variant(self._converter, graph, graph.read(self._held()), device)
            variant.mount(f"{_TABLE}.{number}")
        self._variants.add_module(str(number), variant)
        self._made[graph] = variant
        if (tell := self.__dict__.pop("_tell", None)) is not None:
            tell(self)
        return variant

    def _probe(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, converts: bool = True
    ) -> tuple[CapturedGraph, Sequence[Any]]:
        """Return the graph that such a call runs, captured now if need be, with its inputs; it does nothing else."""
        probe = _Probe(self._prepare if converts else lambda _: None)
        with suppress(_Probed):
            self._call_as(probe, args, kwargs)
        if (graph := probe.graph) is None:
            raise VariantError("the call runs no graph: its results do not depend on tensors")
        graph.note(probe.inputs)
        return graph, probe.inputs

    def _variant_for(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Variant:
        return self._given_to(args, kwargs)[0]

    def _given_to(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Variant, Call, dict[str, Any]]:
        call = self._signature.bind(args, kwargs)
        graph, inputs = self._probe(tuple(args), kwargs)
        given = graph.given(call, inputs, self._held())
        variant = self._made.get(graph) or self._convert(graph)
        if graph.results.spec is None:
            with_gradients = torch.is_grad_enabled()
            with isolated(self._model), torch.set_grad_enabled(with_gradients):
                self._call_as(_AsCaptured(), args, kwargs)
        return variant, *given

    def _capture_first(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Capture and convert the graph of a call, which does nothing else."""
        with suppress(VariantError):  # a call that computes nothing runs no graph
            self._prepare(self._probe(args, kwargs)[0])

    def _converted_by(self, converter: Any, graphs: Sequence[CapturedGraph], device: torch.device | None) -> AmpModule:
        """Return what converts otherwise what is captured for this model, ``graphs`` at once."""
        again = view(self._captures, converter, device, self._original.leaves)
        for graph in graphs:
            again._convert(graph)
        return again

    def _variant_by(self, converter: Any, variant: Variant) -> Variant:
        """Convert what ``variant`` was made from by another converter, beside this model."""
        return converted_variant(converter, *self._source_of(variant))

    def _plan_by(self, converter: Any, variant: Variant) -> Plan:
        """Return the plan of such a conversion, apart from casts and copies."""
        return decided_plan(converter, *self._source_of(variant))

    def _source_of(self, variant: Variant) -> tuple[CapturedGraph, Mapping[str, torch.Tensor], torch.device | None]:
        graph = next(graph for graph, made in self._made.items() if made is variant)
        return graph, graph.read(self._held()), self._original.device

    def _others(self) -> tuple[Variant, ...]:
        """Convert the graphs that a check has captured besides, for a look at them."""
        made = (
            converted_variant(self._converter, g, g.read(self._held()), self._original.device) for g in self._unused()
        )
        return tuple(made)

    def _unused(self) -> list[CapturedGraph]:
        return [graph for graph in self._captures.graphs if graph not in self._made]

    def _with_own_captures(self, *, any_size: bool = False) -> AmpModule:
        """Return what converts the model in the same way, in graphs of its own."""
        return self._like(Captures(self._model, self._signature, self._captures._whole, any_size=any_size))

    # ---- what tools look at ------------------------------------------------------------------------------------------

    @contextmanager
    def _observed_by(self, observer: Observer) -> Generator[None]:
        """While open, calls run node by node and show their values to ``observer``; not those in compiled code."""
        self._observers = (*self._observers, observer)
        try:
            yield
        finally:
            self._observers = tuple(one for one in self._observers if one is not observer)

    @property
    def _working_copies(self) -> Any:
        """The 16-bit copies that graphs read by this name, once in each call."""
        copies = self.__dict__.get("_autocastfx_copies")
        return None if copies is None else copies.fresh()

    @property
    def _is_low(self) -> bool:
        return False

    @property
    def plan(self) -> Plan:
        """Every decision of the variant that ``graph`` shows, with its reason."""
        return self._active.plan

    @property
    def _code(self) -> str:
        return self._active.code

    @property
    def variants(self) -> tuple[Variant, ...]:
        """All captured variants, in the order of capture."""
        return tuple(cast("list[Variant]", self._variants))

    @property
    def _shown(self) -> tuple[Variant, ...]:
        return self.variants

    @property
    def _active(self) -> Variant:
        modes = self._modes()
        shown = self.variants
        active = next((v for v in shown if v.modes == modes), next(iter(shown), None))
        if active is None:
            raise NotCapturedError(
                "there is no graph to show before the first call: call the model once, or give convert example inputs. "
                "A call that computes nothing has none."
            )
        return active

    def _modes(self) -> tuple[bool, ...]:
        return tuple(module.training for module in self._model.modules())

    @property
    def _own_modules(self) -> tuple[nn.Module, ...]:
        return tuple(self._model.modules())

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Generator[tuple[str, nn.Module]]:
        """Yield the model's own modules, but itself for the model."""
        for name, module in self._model.named_modules(memo, prefix, remove_duplicate):
            yield name, self if module is self._model else module

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        """Yield the model's own modules, but itself for the model."""
        return (module for _, module in self.named_modules(remove_duplicate=remove_duplicate))

    def _held(self) -> dict[str, torch.Tensor]:
        model = self._model
        named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        return dict(named)

    @property
    def _graph(self) -> fx.Graph:
        return self._call_graph() if torch.compiler.is_exporting() else self._active.graph

    @_graph.setter
    def _graph(self, graph: fx.Graph) -> None:
        self._active.graph = graph

    def _call_graph(self) -> fx.Graph:
        """Return a graph of one call of this model: torch.export runs graphs node by node, and checks nothing."""

        def call(given: Sequence[Any]) -> Any:
            names = keywords_of_export()
            count = len(given) - len(names)
            return self(*given[:count], **dict(zip(names, given[count:], strict=True)))

        graph = fx.Graph()
        graph.output(graph.call_function(call, (graph.placeholder("*given"),)))
        return graph

    def recompile(self) -> Any:
        """Make the shown variant run its graph as it now is."""
        if self._variants:
            self._active.compile_graph()

    def __repr__(self) -> str:
        """Describe the conversion in two lines."""
        if not self._variants:
            return f"AmpModule of {self._original.class_name}, captured at its first call"
        variant = self._active
        plan, runs = variant.plan, Counter(node.placement.run for node in variant.plan.nodes)
        counts = ", ".join(f"{runs[p]} {p}" for p in Precision if runs[p])
        return (
            f"AmpModule of {self._original.class_name}: {plan.low} on {plan.device}, op list {plan.op_list}\n"
            f"  {variant.mode} mode, 1 of {len(self._shown)} variants: {counts}; {len(plan.casts)} casts"
        )

    def __str__(self) -> str:
        """Show the code, if there is any."""
        return super().__str__() if self._variants else repr(self)

    # ---- the model's own state and methods ---------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        model = self.__dict__["_model"]
        value = getattr(model, name)
        if isinstance(value, nn.Module):
            return self._view_of(value)
        if isinstance(value, MethodType) and value.__self__ is model and not name.startswith("__"):
            return Method(self, value)
        return value

    def _view_of(self, part: nn.Module) -> Any:
        """Return a view of a module in the model; the same one each time."""
        if part is self._model:
            return self
        if isinstance(part, AmpModule):
            return part
        parts = self._parts
        if part not in parts:
            parts[part] = self._like(Captures(part, CallSignature.of(part.forward), self._captures._whole, self._model))
        return parts[part]

    def _like(self, captures: Captures) -> AmpModule:
        origin = self._original
        return view(captures, origin.converter, origin.device, origin.leaves)

    def __setattr__(self, name: str, value: Any) -> None:
        is_own = name in _OWN or name in self.__dict__ or isinstance(getattr(AmpModule, name, None), property)
        if is_own and not self._is_forward_of_part(name):
            object.__setattr__(self, name, value)
        else:
            setattr(self._model, name, self._bare(value))

    def __delattr__(self, name: str) -> None:
        if sys._getframe(1).f_globals.get("__name__") == parametrize.__name__:  # before it has changed anything
            raise UnsupportedError(
                f"a parametrization of {name!r} is registered at a view of a {type(self._model).__name__}: register it "
                "at the model's own module, which amp_model.get_submodule(path) returns."
            )
        if name in self.__dict__ and not self._is_forward_of_part(name):
            object.__delattr__(self, name)
        else:
            delattr(self._model, name)

    def _is_forward_of_part(self, name: str) -> bool:
        """True for the forward of a part, which a call of the whole runs too; the whole's may be a wrapper of ours."""
        return name == "forward" and self._captures.is_of_part

    def __dir__(self) -> list[str]:
        shown = set(object.__dir__(self)) - (set() if self._variants else _OF_A_GRAPH)  # tools read all that is there
        return sorted({*shown, *dir(self._model)})

    def _bare(self, value: Any) -> Any:
        """Return the model's own module for a view of it, also inside of a module, which the model may then hold."""
        if isinstance(value, AmpModule):
            return value._model if value._converter is self._converter else value
        if isinstance(value, MethodType) and isinstance(value.__self__, AmpModule):
            return MethodType(value.__func__, self._bare(value.__self__))
        if isinstance(value, nn.Module):
            for module in value.modules():
                for name, view in [(n, one) for n, one in module._modules.items() if isinstance(one, AmpModule)]:
                    module._modules[name] = self._bare(view)
        return value

    def _wrapped(self, value: Any) -> Any:
        return self._view_of(value) if isinstance(value, nn.Module) else value

    def get_submodule(self, target: str) -> nn.Module:
        """Return the model's module at a path; or a graph, which nodes read their constants from."""
        if not target:
            return self
        if target == _TABLE or target.startswith(f"{_TABLE}."):
            return self._variants.get_submodule(target.removeprefix(_TABLE).removeprefix("."))
        return self._model.get_submodule(target)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> AmpModule:
        for parameter in self._model.parameters():
            self._refuse_dtype(fn(torch.empty(0, dtype=parameter.dtype, device=parameter.device)).dtype, parameter)
            break
        self._model._apply(fn, recurse)
        return self

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Move the model to a device.

        Raises:
            UnsupportedError: another dtype is asked for.
        """
        dtype: torch.dtype | None = cast("Any", torch._C)._nn._parse_to(*args, **kwargs)[1]
        if dtype is not None:
            for parameter in self._model.parameters():
                self._refuse_dtype(dtype, parameter)
        self._model.to(*args, **kwargs)
        return self

    def half(self) -> Any:
        """Refuse: parameters keep their dtype."""
        return self.to(torch.float16)

    def bfloat16(self) -> Any:
        """Refuse: parameters keep their dtype."""
        return self.to(torch.bfloat16)

    def double(self) -> Any:
        """Refuse: parameters keep their dtype."""
        return self.to(torch.float64)

    def type(self, dst_type: Any) -> Any:
        """Refuse another dtype: parameters keep theirs."""
        return self.to(torch.empty(0, device="cpu").type(dst_type).dtype)

    def _refuse_dtype(self, dtype: torch.dtype, parameter: torch.Tensor) -> None:
        if parameter.is_floating_point() and parameter.dtype != dtype:
            raise UnsupportedError(
                f"an AmpModule's parameters stay {dtype_name(parameter.dtype)}, so it cannot become {dtype}: its graph "
                "holds the casts. Move it with .to(device) alone, or convert again with another dtype."
            )

    def train(self, mode: bool = True) -> AmpModule:
        """Switch to training or evaluation, as the model's own ``train`` or ``eval`` does."""
        self._model.train(mode)
        self._autocastfx_copies.expire()  # weights are exchanged between training and evaluation, not always visibly
        return self

    def eval(self) -> AmpModule:
        """Switch to evaluation, as the model's own ``eval`` does."""
        self._model.eval()
        self._autocastfx_copies.expire()
        return self

    def freeze(self, *args: Any, **kwargs: Any) -> fx.GraphModule:
        """Return the graph of such a call as a plain ``torch.fx.GraphModule``, which is static.

        It shares the model's parameters and buffers, under the model's names. It is for ``torch.export``, ONNX,
        ``torch.jit.trace``, files without the model's class, CUDA graphs, and calls that take the host least time. A
        call of another structure, dtype, device or mode is an error, and so are other sizes, but for those that the
        graph was captured for. Whatever else forward reads in Python stays as it is now. 16-bit copies of weights are
        made in each call, and what float16 clips is not counted.

        Without arguments it is the one graph that there is for the present mode.

        Raises:
            VariantError: there are several graphs, or it has not been called yet.
            NotCapturedError: there is none.
            UnsupportedError: the graph takes numbers that change from call to call, or returns what no graph holds.
        """
        variant = self._variant_for(args, kwargs) if args or kwargs else self._only_variant()
        graph, *_ = self._source_of(variant)
        return freeze(self._model, self._captures._root, self._signature, graph, variant)

    def _only_variant(self) -> Variant:
        modes = self._modes()
        fitting = [one for one in self.variants if one.modes == modes]
        if len(fitting) > 1 or (fitting and fitting[0].results.spec is None):
            why = f"{len(fitting)} graphs fit the present mode" if len(fitting) > 1 else "the graph has not run yet"
            raise VariantError(f"{why}: give freeze the inputs of a call.")
        if not fitting:
            raise NotCapturedError("there is no graph of the present mode: give freeze the inputs of a call.")
        return fitting[0]

    def refresh_weights(self) -> None:
        """Make the 16-bit working copies anew."""
        self._autocastfx_copies.expire()
        self._autocastfx_copies.fresh()

    def __deepcopy__(self, memo: dict[int, Any]) -> AmpModule:
        model = copy.deepcopy(self._model, memo)
        made = self._like(Captures(model, self._signature, self._captures._whole))
        made.__dict__.update({key: one for key, one in self.__dict__.items() if key == "_tell"})
        memo[id(self)] = made
        return made

    def __copy__(self) -> AmpModule:
        return self._like(Captures(copy.copy(self._model), self._signature, self._captures._whole))

    def __reduce__(self) -> tuple[Any, ...]:
        origin = self._original
        tell = self.__dict__.get("_tell")
        return _restored, (self._model, origin.converter, origin.device, origin.leaves, tell)


class _Probe:
    """Takes the graph that a call would run, and ends the call."""

    graph: CapturedGraph | None = None
    inputs: Sequence[Any] = ()

    def __init__(self, prepare: Callable[[CapturedGraph], None]) -> None:
        self._wanted = prepare

    def _prepare(self, graph: CapturedGraph) -> None:
        """Convert the graph, if that is wanted."""
        self._wanted(graph)

    def _run_graph(self, graph: CapturedGraph, inputs: Sequence[Any]) -> Any:
        """End the call."""
        self.graph, self.inputs = graph, inputs
        raise _Probed


class _AsCaptured:
    """Runs a graph as it was captured."""

    def _prepare(self, graph: CapturedGraph) -> None:
        """Do nothing: it settles no sizes."""

    def _run_graph(self, graph: CapturedGraph, inputs: Sequence[Any]) -> Any:
        """Run it, and note what it gives."""
        captured, values = graph.captured, dict(zip(graph.places, inputs, strict=True))

        def given(node: fx.Node) -> Any:
            name = str(node.target)
            return values[name] if name in values else captured.attributes[name]

        tensors = [values.get(str(node.target)) for node in captured.graph.find_nodes(op="placeholder")]
        is_inference = any(isinstance(one, torch.Tensor) and one.is_inference() for one in inputs)
        with torch.no_grad() if is_inference else nullcontext():  # autograd takes none
            outputs = NodeRun(captured.graph, given).run(*tensors, enable_io_processing=False)
        NOW.last = graph, inputs, outputs
        return outputs


def signed_forward(signature: CallSignature) -> Callable[..., Any]:
    """Make a forward with the original's signature, for export, trainers and ``help``."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._run(args, kwargs)

    forward.__code__ = forward.__code__.replace()  # torch.compile caches by code object, so each forward has its own
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = inspect.Signature([first, *signature.parameters])
    return forward


def view(captures: Captures, converter: Any, device: torch.device | None, leaves: tuple[str, ...]) -> AmpModule:
    """Return a converted model that captures by ``captures`` and converts by ``converter``."""
    kind = type(captures.model)
    if kind not in _KINDS:
        _KINDS[kind] = type(AmpModule.__name__, (AmpModule,), {"__module__": AmpModule.__module__, **members_for(kind)})
    return _KINDS[kind](captures, converter, device, leaves)


def _restored(
    model: nn.Module,
    converter: Any,
    device: torch.device | None,
    leaves: tuple[str, ...],
    tell: Callable[[AmpModule], None] | None = None,
) -> AmpModule:
    amp_model = view(Captures(model, CallSignature.of(model.forward), functions_at(leaves)), converter, device, leaves)
    if tell is not None:
        amp_model.__dict__["_tell"] = tell
    return amp_model


_OWN = frozenset({"__class__", "forward", "_observers", "_graph", "graph"})
_OF_A_GRAPH = {"_active", "_graph", *dir(AmpModule)} - set(dir(nn.Module))
_TABLES = tuple(name for name in nn.Module().__dict__ if name != "training")
# What the view does by itself; all other methods of nn.Module are the model's.
_BY_ITSELF = ("__init__", "__call__", "_call_impl", "_wrapped_call_impl", "forward", "__repr__", "_apply", "__dir__")


def _forwarded(name: str) -> Callable[..., Any]:
    def method(self: AmpModule, *args: Any, **kwargs: Any) -> Any:
        returned = getattr(self._model, name)(*map(self._bare, args), **kwargs)
        return self if returned is self._model else returned

    method.__name__, method.__doc__ = name, f"Do what ``{name}`` of the model does."
    return method


def _of_model(name: str) -> property:
    def put(self: AmpModule, value: Any) -> None:
        self._model.__dict__[name] = value

    return property(lambda self: self._model.__dict__[name], put)


for _name, _member in vars(nn.Module).items():
    if isinstance(_member, FunctionType) and _name not in (*_BY_ITSELF, *vars(AmpModule)):
        setattr(AmpModule, _name, _forwarded(_name))
for _name in (*_TABLES, "training"):
    setattr(AmpModule, _name, _of_model(_name))
AmpModule._call_impl = AmpModule._wrapped_call_impl = AmpModule.__call__
skip_frames(AmpModule.__call__, AmpModule.forward, AmpModule._run)
