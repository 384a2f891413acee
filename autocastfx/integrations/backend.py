"""A backend of ``torch.compile`` that converts its graphs, and ``enable`` and ``disable``, which use it in a model."""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import fx, nn

from autocastfx.calibration import Measuring
from autocastfx.capture.call import (
    arguments_of,
    conversion_is_off,
    device_among,
    device_of,
    refuse_scripted,
)
from autocastfx.capture.kept_whole import are_kept, functions_at
from autocastfx.capture.leave_intact import is_in_autocast, own_thread_state
from autocastfx.capture.mended import stored_results, tell_of_caches
from autocastfx.capture.progress import stage
from autocastfx.dtypes import dtype_name
from autocastfx.errors import (
    ArgumentError,
    ArgumentTypeError,
    AutocastFXError,
    CaptureError,
    UncapturedGraphWarning,
    UnmatchedRuleWarning,
    UnsupportedError,
)
from autocastfx.graph.cell import table
from autocastfx.graph.names import op_name
from autocastfx.graph.node import STORED, attributes_of
from autocastfx.graph.sizes import own_sizes
from autocastfx.graph.walk import all_nodes, mode_of, names_stood_for
from autocastfx.integrations import skipped_code as skipped
from autocastfx.integrations.checked_copies import check_capture, plain_copy
from autocastfx.integrations.compiled import CompiledCall, called, refuse_scripting, sees_to_hooks
from autocastfx.integrations.graph_run import GraphRun
from autocastfx.options import DType, Options, for_models
from autocastfx.passes.pipeline import Converter
from autocastfx.plan.plan import Precision
from autocastfx.plan.ranges import Ranges
from autocastfx.policy.match import MatchedRules
from autocastfx.policy.op_list import OpListLike, load_op_list
from autocastfx.report.compiled_graph import CompiledGraph
from autocastfx.report.conversion_warnings import (
    match_graph,
    unmatched,
    warn_of_other_parameters,
    without_float8,
    without_saved,
)
from autocastfx.runtime.amp_module import AmpModule
from autocastfx.runtime.captures import captured_graph, paths_of
from autocastfx.runtime.working_copies import WorkingCopies
from autocastfx.training.unscaled_step import watch_first_step

# Have a graph of Dynamo's captured again once a module in it gets its first hook, which torch does not see to.


class _Restore:
    """Undoes what :func:`guard_hooks` has set, at the end of a compilation."""

    def __init__(self) -> None:
        self.is_due = False

    def __call__(self, _: object) -> None:
        from torch._dynamo import config

        if self.is_due:
            config.skip_nnmodule_hook_guards, self.is_due = True, False


_RESTORE = _Restore()


def guard_hooks() -> None:
    """Let the guards of the graph that is being compiled hold for modules without hooks, until they get one.

    A backend calls this: Dynamo makes the guards after the backend has returned. By default it makes none for modules
    without hooks, and hooks that they get later never run.
    """
    from torch._dynamo import config
    from torch._dynamo.callback import callback_handler

    if config.skip_nnmodule_hook_guards:
        config.skip_nnmodule_hook_guards, _RESTORE.is_due = False, True
        if _RESTORE not in callback_handler.end_callbacks:  # torch._dynamo.reset() drops all
            callback_handler.register_end_callback(_RESTORE)


# A backend of ``torch.compile`` that converts each of Dynamo's graphs, and hands it on to another backend.

_MOST_IN_A_CELL = 20  # graphs
# torch's attention layers in evaluation, as one operator.
_FUSED = {"_transformer_encoder_layer_fwd", "_native_multi_head_attention"}
UNCAPTURED = ("autocast", "float32", "error")
_OPTIONS = tuple(one.name for one in fields(Options))


class CompileBackend:
    """Converts graphs: ``autocastfx.CompileBackend(dtype=torch.bfloat16).compile(model)``.

    The model keeps its class, its modules and its methods, and Dynamo's guards and dynamic sizes hold. Parameters stay
    float32, and are cast in the graph. ``torch.compile(model, backend="autocastfx", options={"dtype": ...})`` does the
    same with the arguments below as options; but code that Dynamo cannot capture then runs in float32. That is told
    where Dynamo meets it first: it skips the same code in other models, and says nothing.

    Attributes:
        graphs: the graphs compiled so far, in order.
        skipped: the code of models given to :meth:`compile` that Dynamo could not capture.
        runs: how often one of the graphs has run.
    """

    def __init__(
        self,
        *,
        inner: str | Callable[..., Any] = "inductor",
        uncaptured: str = "autocast",
        report: Callable[[CompiledGraph], object] | None = None,
        **options: Any,
    ) -> None:
        """Choose how to convert.

        Args:
            inner: the backend that compiles what was converted: a name that ``torch.compile`` knows, such as
                ``"inductor"``, ``"aot_eager"`` or ``"eager"``, or a callable. A compiler decides itself what is kept
                for backward, and casts parameters in each call: ``saved`` and ``weights="cached"`` are for ``"eager"``.
            uncaptured: how a graph runs that cannot be converted, and code that Dynamo cannot capture: under
                ``torch.autocast`` with the same dtype, in ``"float32"``, or not at all (``"error"``). The first two
                warn.
            report: called with each graph.
            options: of :func:`convert`, by keyword, from ``dtype`` on. The dtype is by default float16 where torch
                finds a GPU, else bfloat16. Rules by module read the paths in the compiled module. Python and autograd
                functions cannot be named in a list: Dynamo has traced through the first, and gives no names of the
                second. ``calibrate`` takes ranges that were measured; :func:`enable` takes batches, too.

        Raises:
            OpListError: a list is wrong.
            TypeError: an option is none of these.
            ValueError: an argument has no such choice.
            UnsupportedError: ``weights="low"`` was given.
        """
        if uncaptured not in UNCAPTURED:
            raise ArgumentError(f"uncaptured is one of {', '.join(map(repr, UNCAPTURED))}, not {uncaptured!r}")
        if not (isinstance(inner, str) or callable(inner)):
            raise ArgumentTypeError(f"inner is the name of a backend of torch.compile or a function, not {inner!r}")
        if not (report is None or callable(report)):
            raise ArgumentTypeError(f"report is a function of a graph, not {report!r}")
        given = Options(**options)
        if given.weights == "low":
            raise UnsupportedError(
                'weights="low" makes a model of its own, for inference, and what is enabled stays the model that it '
                'is: convert it. weights="cached" keeps copies of 16 bits beside its parameters.'
            )
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._converter = given.converter(None, device, _refuse_batches)
        self.low, self.inner, self.uncaptured, self.report = self._converter.low, inner, uncaptured, report
        lists = self._converter.op_list
        if lists.saved and inner != "eager":
            told = 'the compiler behind inner= decides what is kept for backward; inner="eager" keeps what they say.'
            warnings.warn(
                f"the rules under 'saved' of the op list {lists.name} have no effect: {told}",
                UnmatchedRuleWarning,
                stacklevel=3,
            )
            lists = lists.without_saved()
        if given.weights == "cached" and inner != "eager":
            warnings.warn(
                'weights="cached" has no effect: the compiler behind inner= gets graphs that cast their parameters in '
                'each call, as with weights="cast". inner="eager" reads the copies.',
                UnmatchedRuleWarning,
                stacklevel=3,
            )
            given = replace(given, weights="cast")
        self._converter = replace(self._converter, op_list=lists, weights=given.weights)
        self.whole = functions_at(lists.functions())
        self.graphs: list[CompiledGraph] = []
        self.skipped: list[skipped.SkippedCode] = []
        self.runs = 0
        self.measuring: Measuring | None = None  # runs the graphs as captured, if given
        skipped.watch(_is_on_its_own)
        self._models = weakref.WeakSet[nn.Module]()
        self._cached = dict[str, None]()  # functions that were told of
        self._trained = weakref.WeakSet[nn.Module]()  # those of them that have been called in training
        self._matched = MatchedRules(lists)
        self.are_ranges_new = False  # they were measured for this
        self._stood_for = set[str]()  # names of nodes that others stand for
        self._is_told = self._is_told_of_region = False
        self._copies = weakref.WeakKeyDictionary[nn.Module, WorkingCopies]()
        self._device = given.target

    def __repr__(self) -> str:
        return f"CompileBackend({'; '.join(self._summary())})"

    def _repr_html_(self) -> str:
        rows = [("graph", "nodes", "casts", "not converted, for")]
        for number, graph in enumerate(self.graphs, 1):
            plan = graph.plan
            runs = Counter(str(node.placement.run) for node in plan.nodes) if plan is not None else Counter[str]()
            counts = ", ".join(f"{runs[run]} {run}" for run in map(str, Precision) if runs[run])
            rows.append((str(number), counts, str(len(plan.casts)) if plan is not None else "", graph.failure))
        above = [*self._summary(), *(f"not captured: {one}. {one.runs}" for one in self.skipped)]
        return table(above, rows if self.graphs else [], most=_MOST_IN_A_CELL, below="the attribute graphs has all")

    def _summary(self) -> list[str]:
        """How it converts, and what became of what it was given, in short lines."""
        inner = self.inner if isinstance(self.inner, str) else _name_of(self.inner)
        plans = [graph.plan for graph in self.graphs if graph.plan is not None]
        runs = Counter(node.placement.run for plan in plans for node in plan.nodes)
        counts = "".join(f", {_counted(runs[run], 'node')} {run}" for run in (Precision.LOW, Precision.FLOAT32))
        failed = len(self.graphs) - len(plans)
        said = f"{_counted(len(self.graphs), 'graph')}{counts if plans else ''}"
        said += f"; {failed} not converted" if failed else ""
        said += f"; {_counted(len(self.skipped), 'function')} not captured" if self.skipped else ""
        name = self._converter.op_list.name
        return [f"{dtype_name(self.low)}, op list {name}, then {inner}", f"{said}; run {_counted(self.runs, 'time')}"]

    def like(self) -> CompileBackend:
        """Return another one that converts in the same way."""
        return self._by(self._converter, self.inner, self.uncaptured)

    def bare(self) -> CompileBackend:
        """Return one that runs what is captured without casts."""
        lists = load_op_list("float32")
        bare = Converter(lists, self._converter.facts, self.low, as_captured=True)
        return self._by(bare, "eager", "float32")

    def _by(self, converter: Converter, inner: Any, uncaptured: str) -> CompileBackend:
        made = CompileBackend(dtype=converter.low, inner=inner, uncaptured=uncaptured)
        made._converter, made.whole, made._device = converter, self.whole, self._device
        made._matched = MatchedRules(converter.op_list)
        return made

    @property
    def fold(self) -> str:
        """The level of folding."""
        return self._converter.fold

    @property
    def takes_recurrent_layers(self) -> bool:
        """True if graphs may hold RNN, GRU and LSTM: compilers unroll them, for each length anew."""
        return self.inner == "eager"

    def __call__(self, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Convert and compile a graph; Dynamo calls this. With ``AUTOCASTFX_DISABLE=1`` it is compiled as it is.

        Raises:
            BannedOpError: the list bans an op.
            CaptureError: the graph cannot be converted, with ``uncaptured="error"``.
            UnsupportedError: the list names Python functions, and Dynamo has traced through them.
            VerifyError: a defect of this package.
        """
        self._refuse_traced()
        tell_of_caches(self._cached)
        device = device_among(inputs)
        if not sees_to_hooks(module):
            guard_hooks()
        if conversion_is_off():
            return self._compile(module, inputs, device)
        try:
            with own_thread_state(), stage(f"converting a graph of {len(module.graph.nodes)} nodes"):
                run = self._converted(module, inputs)
        except Exception as error:  # whatever an operator or a tracer raises: it is told
            if isinstance(error, AutocastFXError) and not isinstance(error, CaptureError):
                raise
            return self._compile_unconverted(module, inputs, device, error)
        shown = run.shown
        _warn_of_fused_layers(shown)
        self._warn_of_regions(shown)
        self._add(shown)
        if self.low == torch.float16 and torch.is_grad_enabled() and not self._converter.as_captured:
            for model in self._models:
                if model.training:
                    watch_first_step(model)
        if self.inner != "eager":
            run.compiled = self._inner(shown.module, inputs)
        return self._outside_autocast(run, device.type)

    def _refuse_traced(self) -> None:
        """Refuse a graph in which Dynamo keeps no calls of Python functions that the list names."""
        own = [one for one in self.whole if not one.__module__.startswith("torch.")]
        if not are_kept(own) and not conversion_is_off():
            names = ", ".join(sorted(f"{one.__module__}.{one.__qualname__}" for one in own))
            raise UnsupportedError(
                f"the op list {self._converter.op_list.name} names {names}, which torch.compile traces through: call "
                "autocastfx.enable, or the backend's own compile, which keep such functions whole."
            )

    def compile(self, model: nn.Module, **options: Any) -> nn.Module:
        """Compile ``model`` in place, and see to the code that Dynamo skips, which a backend cannot see.

        The modules whose code Dynamo cannot capture run as ``uncaptured`` says from the next call on, with a warning;
        in the call that finds them they have run in float32.

        Args:
            model: the model; its class, modules and parameters stay. Copies of it are not compiled.
            options: of ``torch.compile``, as ``dynamic=True``.

        Returns:
            The same model.

        Raises:
            CaptureError: Dynamo skips code, with ``uncaptured="error"``; in a call of the model.
            UnsupportedError: a module in it is TorchScript.
        """
        if not conversion_is_off():
            refuse_scripted(model)
            refuse_scripting()
            self._models.add(model)
            model._compiled_call_impl = CompiledCall(model, self, options)
        return model

    @property
    def unmatched(self) -> tuple[str, ...]:
        """A sentence on each rule, line of a plan and measurement given that matches no node of the graphs so far."""
        return tuple(message for _, message in self._unmatched())

    def _unmatched(self) -> Iterator[tuple[type[Warning], str]]:
        if plans := [graph.plan for graph in self.graphs if graph.plan is not None]:
            lists, converter = self._matched.op_list, self._converter
            not_saved = without_saved(lists, plans) if self._trained else ()
            for message in (*self._matched.unmatched(), *without_float8(lists, plans), *not_saved):
                yield UnmatchedRuleWarning, message
            yield from unmatched(
                *(plans, self._stood_for),
                ranges=None if self.are_ranges_new else converter.ranges,
                sensitivity=converter.prices.sensitivity if converter.prices is not None else None,
                plan=converter.plan,
                saved=lists.saved,
            )

    def tell_unmatched(self, model: nn.Module) -> None:
        """Warn of what matches no node, once: when each compiled model has been called in training.

        Before, graphs are missing that a rule may be for.
        """
        if not self._is_told and model.training and model in self._models:
            self._trained.add(model)
            self._is_told = len(self._trained) == len(self._models)
            for category, message in self._unmatched() if self._is_told else ():
                count = len(self.graphs)
                told = f"{message} Captured so far: {count} graph{'s' if count > 1 else ''}."
                warnings.warn(told, category, stacklevel=4)

    def _warn_of_regions(self, graph: CompiledGraph) -> None:
        """Say, once, that operators in a region of torch.autocast that is open in the graph stay as they are."""
        nodes = all_nodes(graph.module.graph, attributes_of(graph.module, graph.module.graph))
        if not self._is_told_of_region and any(op_name(n) == "wrap_with_autocast" and n.args[2] for n in nodes):
            self._is_told_of_region = True
            told = (
                "forward opens a region of torch.autocast, and what runs in it stays as it is. A trainer opens one "
                'around all of forward (bf16=True, mixed_precision="bf16"): turn that off to have the model converted.'
            )
            warnings.warn(told, UncapturedGraphWarning, stacklevel=3)

    def paths(self) -> dict[int, str]:
        """Return the paths of modules, parameters and buffers of the compiled models, by their ``id``."""
        return paths_of(self._models)

    def refresh_weights(self) -> None:
        """Make the 16-bit working copies anew, with ``weights="cached"``, after writes into ``parameter.data``."""
        for copies in self._copies.values():
            copies.expire()

    def _converted(self, module: fx.GraphModule, inputs: list[Any]) -> GraphRun:
        """Convert a graph of Dynamo's, and those in it that run again in backward."""
        parameters = {id(one): one for one in inputs if isinstance(one, nn.Parameter)}
        owners = [m for m in self._models if not parameters.keys().isdisjoint(map(id, m.parameters()))]
        owners = owners if parameters else list(self._models)  # a graph without any may belong to each
        modes = tuple(m.training for owner in owners for m in owner.modules()) or (True,)
        graph = captured_graph(module, inputs, self.whole, self.paths(), modes, called(), is_whole=False)
        graph.captured.graph.output_node().meta[STORED] = stored_results()
        converter = self._converter
        if not converter.as_captured:
            converter = for_models(converter, owners, parameters.values())
        run = GraphRun(graph, converter, self._device, self._copies_of(owners), self.measuring)
        made, facts = run.variant, self._converter.facts
        self._stood_for.update(names_stood_for(graph.captured.graph, graph.captured.attributes))
        match_graph(self._matched, graph.captured.graph, graph.captured.attributes, made.graph, made.plan, facts)
        return run

    def _copies_of(self, owners: Sequence[nn.Module]) -> WorkingCopies | None:
        """Return the working copies of the model that a graph is of; None without ``weights="cached"``."""
        if self._converter.weights != "cached":
            return None
        if not owners:
            told = "the graph is of no model that the backend has compiled: call backend.compile(model), or enable."
            warnings.warn(f'weights="cached" has no effect: {told}', UnmatchedRuleWarning, stacklevel=2)
            return None
        owner = owners[0]
        if owner not in self._copies:
            self._copies[owner] = WorkingCopies(owner)
        return self._copies[owner]

    def _compile_unconverted(
        self, module: fx.GraphModule, inputs: list[Any], device: torch.device, error: Exception
    ) -> Callable[..., Any]:
        """Compile a graph that cannot be converted as ``uncaptured`` says."""
        failure = f"{type(error).__name__}: {error}"
        if self.uncaptured == "error":
            raise CaptureError(f"a graph of torch.compile cannot be converted: {failure}") from error
        in_autocast = self.uncaptured == "autocast" and torch.amp.is_autocast_available(device.type)
        runs = f"under torch.autocast, in {dtype_name(self.low)}" if in_autocast else "in float32"
        told = f"a graph of torch.compile cannot be converted and runs {runs}: {failure}"
        warnings.warn(told, UncapturedGraphWarning, stacklevel=2)
        exact = module
        if in_autocast:
            module = skipped.graph_in_autocast(exact, device.type, self.low)
        self._add(CompiledGraph(module, None, failure))
        if module is exact:
            return self._compile(exact, inputs, device)
        try:
            with skipped.autocast_as_before(device.type):
                run = self._compile(module, inputs, device)
        except skipped.FAILURES as error:
            skipped.warn_of_failure("the graph", error)
            return self._compile(exact, inputs, device)
        return skipped.float32_where_it_fails(run, exact, device.type, "the graph")

    def _compile(self, module: fx.GraphModule, inputs: list[Any], device: torch.device) -> Callable[..., Any]:
        return self._outside_autocast(self._inner(module, inputs), device.type)

    def _inner(self, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        from torch._dynamo.backends.registry import lookup_backend

        inner = lookup_backend(self.inner) if isinstance(self.inner, str) else self.inner
        with own_sizes(), torch._C._DisableAutocast():
            return inner(module, inputs)

    def _outside_autocast(self, run: Callable[..., Any], kind: str) -> Callable[..., Any]:
        """Run without torch.autocast: what runs in which precision is decided."""

        @wraps(run)
        def call(*inputs: Any) -> Any:
            self.runs += 1
            if is_in_autocast(kind):
                with torch.autocast(kind, enabled=False):
                    return run(*inputs)
            return run(*inputs)

        return call

    def _add(self, graph: CompiledGraph) -> None:
        self.graphs.append(graph)
        if self.report is not None:
            self.report(graph)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _name_of(function: object) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _is_on_its_own(backend: object) -> bool:
    """True for a backend that ``torch.compile`` itself calls, and no compiled call, which would see to skipped code."""
    return isinstance(backend, CompileBackend) and not backend._models


def _refuse_batches(*_: Any) -> Ranges:
    raise UnsupportedError(
        "calibrate takes ranges here, as autocastfx.calibrate(model, batches) returns them: a backend does not know "
        "the model yet. autocastfx.enable(model, calibrate=batches) measures them."
    )


def _warn_of_fused_layers(graph: CompiledGraph) -> None:
    if graph.plan is not None and (fused := _FUSED & {node.op for node in graph.plan.nodes}):
        warnings.warn(
            f"a layer of torch's runs as one operator in float32 ({', '.join(sorted(fused))}). To convert it, use "
            "autocastfx.enable(model), or call torch.backends.mha.set_fastpath_enabled(False) before the model.",
            UncapturedGraphWarning,
            stacklevel=3,
        )


# ``enable`` and ``disable``: convert a model that stays the object it is.


Model = TypeVar("Model", bound=nn.Module)


def enable(
    model: Model,
    *,
    dtype: DType | None = None,
    inner: Any = "eager",
    check: Any = None,
    **arguments: Any,
) -> Model:
    """Convert ``model`` in place: its calls run partly in 16 bits from now on, and all else of it stays.

    Class, modules, hooks, parameters, ``state_dict`` and methods such as ``generate`` and ``save_pretrained`` are the
    model's own. Dynamo captures it at its calls, and again when what its code reads has changed: a module, a hook, an
    adapter, an attribute, ``training``. A module in it that is called by itself is converted, too; so
    ``model.forward(...)`` converts the modules one by one. Copies of the model are not enabled.

    Args:
        model: the model, or a part of one.
        dtype: as in :func:`convert`; the model is where it should run. A 16-bit model is converted as there.
        inner: as in :class:`CompileBackend`, but by default ``"eager"``, which needs no compiler.
        check: the inputs of a call, as a batch of :func:`calibrate`. What is captured for it, without casts, must do
            what the model does, as in ``convert(check=True)``; that is tried on copies, before the model is enabled.
        arguments: of :class:`CompileBackend`, and options of :func:`convert`, such as ``op_list``.

    Returns:
        The same model.

    Raises:
        CaptureError: ``check`` found a difference.
        UnsupportedError: the model is enabled already, compiled by ``torch.compile``, TorchScript, or what ``convert``
            returned; or it is 16-bit, and was given another dtype, ``fold="kernel"``, or names to recompose.
        OpListError: a list is wrong.
        ValueError: an argument has no such choice.
        TypeError: ``model`` is not a module.
    """
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        what = "a class" if isinstance(model, type) else f"a {name}"
        raise ArgumentTypeError(f"enable takes an nn.Module, not {what}; convert takes functions of tensors, too.")
    if isinstance(model, AmpModule):
        raise UnsupportedError("the model is converted already: enable the original.")
    if backend_of(model) is not None:
        raise UnsupportedError(
            f"this {name} is enabled already: call disable first, to enable it with other arguments."
        )
    if getattr(model, "_compiled_call_impl", None) is not None:
        raise UnsupportedError(
            f"this {name} is compiled already: enable it instead, with inner= the backend that it was compiled by."
        )
    # the options, with errors before anything is done to the model
    warn_of_other_parameters(model, stacklevel=3)
    known = (*_OPTIONS, *inspect.signature(CompileBackend).parameters, "check")
    if unknown := [argument for argument in arguments if argument not in known]:
        raise ArgumentTypeError(f"enable takes no {', '.join(map(repr, unknown))}, but {', '.join(known)}.")
    given = Options(dtype=dtype, **{name: one for name, one in arguments.items() if name in _OPTIONS})

    def measure(batches: Any, lists: OpListLike) -> Ranges:
        measuring = Measuring(mode_of(m.training for m in model.modules()))
        bare = CompileBackend(inner="eager", op_list=lists).bare()
        bare.measuring = measuring
        copied = bare.compile(plain_copy(model))
        return measuring.measure(copied, copied, batches)

    # measured ranges and chosen dtype, as of convert
    converter = given.converter(model, given.target or device_of(model), measure)
    if given.has_batches:
        arguments["calibrate"] = converter.ranges
    backend = CompileBackend(dtype=converter.low, inner=inner, **arguments)
    backend.are_ranges_new = given.has_batches
    if check is not None:
        check_capture(model, backend.bare().compile, arguments_of(check))
    backend.compile(model)
    return model


def disable(model: Model) -> Model:
    """Undo :func:`enable`: the model's calls run its own code again. A model that is not enabled stays as it is.

    Returns:
        The same model.
    """
    if isinstance(call := model.__dict__.get("_compiled_call_impl"), CompiledCall):
        call.undo()
    return model


def backend_of(model: nn.Module) -> CompileBackend | None:
    """Return what converts an enabled model, with its graphs and their plans; None if the model is not enabled."""
    call = model.__dict__.get("_compiled_call_impl")
    backend = call.backend if isinstance(call, CompiledCall) else None
    return backend if isinstance(backend, CompileBackend) else None
