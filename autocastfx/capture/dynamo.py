"""Compile a function by Dynamo in one graph for each set of guards, and mend what Dynamo does while it captures."""

from __future__ import annotations

import gc
import inspect
import itertools
import re
import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, lru_cache, wraps
from importlib import import_module
from traceback import StackSummary, walk_tb
from types import CodeType, FunctionType, MethodType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.utils.rnn import pad_packed_sequence
from torch.utils import _pytree as pytree

from autocastfx.capture.call import CallSignature, sized
from autocastfx.capture.guards import asking_mends, guarding_mends
from autocastfx.capture.kept_whole import ATTENTION_WRITTEN_OUT, keeping_mends
from autocastfx.capture.leave_intact import Shared, capturing
from autocastfx.capture.mended import (
    cache_mends,
    class_mends,
    knowing_mends,
    messages_after_graph,
    object_mends,
    storing_mends,
)
from autocastfx.capture.progress import quiet_logs
from autocastfx.capture.user_casts import floats_kept, mends_that_note
from autocastfx.errors import AutocastFXError, CaptureError, UnsupportedError
from autocastfx.graph.node import place
from autocastfx.graph.sizes import any_size

Around = Callable[[], AbstractContextManager[object]]
# In evaluation they run as one operator, which is float32 as its inputs are; under torch.autocast torch avoids it, too.
FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


def compiled_in_one_graph(function: Callable[..., Any], backend: Callable[..., Any], around: Sequence[Around]) -> Any:
    """Return ``function``, whose calls run what ``backend`` makes of its graph; captured anew where guards fail.

    Args:
        function: with code of its own, as Dynamo keeps graphs by code.
        backend: takes Dynamo's graph and its inputs.
        around: contexts that are open while Dynamo captures, and not in other calls.
    """
    import_module("torch._inductor")  # first, as torch.compile does: it and Dynamo import each other
    from torch._dynamo.eval_frame import optimize

    context: Any = optimize(backend=backend, nopython=True)
    if not hasattr(context, "callback"):
        raise CaptureError(
            "Dynamo is off (TORCHDYNAMO_DISABLE=1, or torch._dynamo.config.disable), and a converted model needs it: a "
            "call would run in float32. Turn it on, or use what amp_model.freeze(*inputs) has made."
        )
    ours = capturing, garbage_left, quiet_logs, lambda: MENDED, messages_after_graph, floats_kept, _as_often_as_needed
    context.callback = _Capturing(context.callback, (*ours, *around))
    return _called_quickly(function, context(function), context.callback)


def _called_quickly(function: Callable[..., Any], compiled: Callable[..., Any], callback: Any) -> Callable[..., Any]:
    """Return what calls ``function`` under Dynamo as ``compiled`` does, in a quarter of the time.

    Dynamo's own wrapper looks for modes, traces and transforms around the call, of which there are none here. Like it,
    this refuses a call in which Dynamo leaves all code as it is.
    """
    from torch._dynamo import eval_frame

    if not hasattr(eval_frame, "get_skip_reasons"):  # as in torch 2.11
        return compiled
    frames: Any = eval_frame
    set_callback, set_count = frames.set_eval_frame, frames.set_fullgraph_compiled_frame_count

    def call(*args: Any, **kwargs: Any) -> Any:
        if frames._stance.stance != "default":
            return compiled(*args, **kwargs)
        set_count(0)
        frames.reset_skip_reasons()
        before = set_callback(callback)
        try:
            result = function(*args, **kwargs)
        finally:
            set_callback(None)
            count = set_count(-1)
            set_callback(before)
        if count == 0:
            raise RuntimeError(
                f"{_NOTHING} {'; '.join(frames.get_skip_reasons()) or 'It compiles no code at present.'}"
            )
        return result

    return call


def _as_often_as_needed() -> AbstractContextManager[object]:
    """Let Dynamo capture code any number of times: who calls it tells of many."""
    config = torch._dynamo.config
    told = {"side_effect_replay_policy": "info"} if hasattr(config, "side_effect_replay_policy") else {}  # by export
    return config.patch(recompile_limit=sys.maxsize, **told)


def for_any_size() -> AbstractContextManager[object]:
    """Let the first graph serve any sizes of its tensors, and no other numbers."""
    return torch._dynamo.config.patch(assume_static_by_default=False, specialize_int=True, specialize_float=True)


# Warnings of what Dynamo itself does: it looks through such caches, and asks tensors for gradients.
_DYNAMOS = (
    ".*should not be instantiated",
    "The .grad attribute of a Tensor",
    ".*`functools.lru_cache`-wrapped function",
)


class _Capturing:
    """Dynamo's callback for code without a graph that fits, in contexts."""

    def __init__(self, callback: Any, around: Sequence[Around]) -> None:
        self._torchdynamo_orig_backend = callback  # by this name Dynamo finds the backend inside
        self._around = around

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        unlogged: Any = torch._dynamo.config.patch(record_runtime_overhead=False)  # in each call, for a log of torch's
        with ExitStack() as stack, warnings.catch_warnings(), unlogged:
            for told in _DYNAMOS:
                warnings.filterwarnings("ignore", told)
            for context in self._around:
                stack.enter_context(context())
            return self._torchdynamo_orig_backend(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torchdynamo_orig_backend, name)


# Mend what Dynamo does where it captures a call of ours.

_CACHED = type(lru_cache(lambda: None))


@contextmanager
def _mended() -> Generator[None]:
    with ExitStack() as stack:
        for owner, name, mended in mends():
            stack.enter_context(patch.object(owner, name, mended))
        yield


MENDED = Shared(_mended)


@cache
def mends() -> list[tuple[Any, str, Any]]:
    """Return what takes the place of an attribute of Dynamo's, with the owner and the name.

    - Some calls stay whole (:func:`keeping_mends`). An autograd function inside a transform of ``torch.func`` breaks
      the graph: no tensor of the transform requires a gradient, so Dynamo would trace through the forward alone.
    - Functions with an ``lru_cache`` are noted (:func:`cache_mends`).
    - Generators and bounded deques do what they do in Python (:func:`object_mends`).
    - It is noted which results are the model's state (:func:`storing_mends`).
    - Graphs run through ``logger.warning_once(...)``, and methods of loggers like it.
    - The graphs of other models for the same code, as behind a break, do not count.
    - Casts are noted as the code writes them, and whether it asks for gradients.
    - Methods of the model's classes are guarded, tuples without a length, and what is absent (:func:`guarding_mends`).
    - Code branches on small tensors of numbers and sizes (:func:`knowing_mends`).
    - Classes of tensors give their attributes on (:func:`class_mends`).
    """
    from torch._dynamo import convert_frame
    from torch._dynamo.variables.misc import LoggingLoggerVariable

    return [
        *keeping_mends(),
        *object_mends(),
        *cache_mends(),
        *storing_mends(),
        (LoggingLoggerVariable, "call_method", _calling_once(LoggingLoggerVariable.call_method)),
        (convert_frame, "exceeds_recompile_limit", _has_many_graphs),
        *mends_that_note(),
        *asking_mends(),
        *guarding_mends(),
        *knowing_mends(),
        *class_mends(),
    ]


def _has_many_graphs(size: Any, _: object) -> tuple[bool, str]:
    from torch._C._dynamo import eval_frame

    asking, limit = sys._getframe(1).f_locals, torch._dynamo.config.recompile_limit  # Dynamo's frame knows who asks
    backend, entries = unwrapped(asking["compiler_fn"]), eval_frame._debug_get_cache_entry_list(asking["code"])
    own = sum(unwrapped(entry.backend) is backend for entry in entries)
    return own >= limit and size.will_compilation_exceed_specific_limit(limit), "recompile_limit"


def unwrapped(backend: Any) -> object:
    """Return a backend without what torch.compile wraps it in."""
    while (inner := getattr(backend, "_torchdynamo_orig_backend", getattr(backend, "compiler_fn", None))) is not None:
        backend = inner
    return backend


def _calling_once(before: Any) -> Any:
    """Return a method for Dynamo's loggers, which calls those that run just once where ``before`` breaks the graph.

    Such a method has a cache, and runs once for the same arguments: transformers makes them by ``functools.lru_cache``.
    It is called while the graph is captured, so the message is given as often as it would be. Methods without a cache,
    arguments that are no constants and results other than None break the graph, as without this.
    """

    @wraps(before)
    def call_method(self: Any, tx: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        from torch._dynamo.exc import Unsupported
        from torch._dynamo.variables import ConstantVariable

        try:
            return before(self, tx, name, args, kwargs)  # which may be told to leave the message out
        except Unsupported:
            method = getattr(self.value, name, None)
            has_cache = isinstance(getattr(method, "__func__", None), _CACHED)
            if method is None or not has_cache or not all(c.is_python_constant() for c in (*args, *kwargs.values())):
                raise
            named = {key: one.as_python_constant() for key, one in kwargs.items()}
            if method(*(one.as_python_constant() for one in args), **named) is not None:
                raise
            return ConstantVariable.create(None)

    return call_method


@contextmanager
def recurrent_layers_captured() -> Generator[None]:
    """Let Dynamo capture RNN, GRU and LSTM, which it leaves out by default, for any length.

    It calls ``pad_packed_sequence`` as it is, by a rule that torch 2.11 does not have yet.
    """
    with torch._dynamo.config.patch(allow_rnn=True), _PADDING_AS_IT_IS, any_size():
        yield


@contextmanager
def _padding_as_it_is() -> Generator[None]:
    from torch._dynamo.trace_rules import get_torch_obj_rule_map
    from torch._dynamo.variables import SkipFunctionVariable

    with patch.dict(get_torch_obj_rule_map(), {pad_packed_sequence: SkipFunctionVariable}):
        yield


_PADDING_AS_IT_IS = Shared(_padding_as_it_is)


def contexts_for(model: nn.Module, *, recurrent: bool = True) -> list[Around]:
    """Return the contexts in which a model is captured and called, by the layers that are in it."""
    modules = list(model.modules())
    around: list[Around] = [lambda: ATTENTION_WRITTEN_OUT] if any(isinstance(m, FUSED) for m in modules) else []
    if recurrent and any(isinstance(m, nn.RNNBase) for m in modules):
        around.append(recurrent_layers_captured)
    return around


# A method through which Dynamo captures the call of a module.


def caller(module: nn.Module, otherwise: Callable[..., Any] | None = None) -> MethodType:
    """Return a method that calls ``module``, through which Dynamo captures it, even if the module's code is torch's.

    Each has code of its own, because Dynamo limits the graphs for one piece of code: modules would share the limit. A
    call that Dynamo does not capture goes to ``otherwise``, if given, with the module as the first argument.
    """

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        if otherwise is None or torch.compiler.is_compiling():
            return self._call_impl(*args, **kwargs)
        return otherwise(self, *args, **kwargs)

    return _with_own_code(called, module)


def _with_own_code(called: Any, module: nn.Module) -> MethodType:
    """Return a method with code of its own: Dynamo knows code, and which sizes vary in it, by its name and line.

    Its globals are its own, too, for Dynamo keeps there what it has compiled, and which module a name stands for.
    """
    own = called.__code__.replace(co_name=type(module).__name__, co_firstlineno=next(_LINES))
    names = {"torch": torch, "__name__": __name__, "__builtins__": __builtins__}
    return MethodType(FunctionType(own, names, called.__name__, called.__defaults__, called.__closure__), module)


def forward_caller(module: nn.Module) -> MethodType:
    """Return a method, likewise with code of its own, that calls ``forward`` without the module's own hooks."""

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    return _with_own_code(called, module)


_LINES = itertools.count(10_000)
CALLER = caller.__code__.co_filename


def is_caller(call: object) -> bool:
    """True for a result of :func:`caller`."""
    return isinstance(call, MethodType) and call.__func__.__code__.co_filename == CALLER


def forward_code(module: nn.Module) -> CodeType | None:
    """Return the code of the class's ``forward``; None if it is no Python function."""
    return getattr(inspect.getattr_static(type(module), "forward"), "__code__", None)


def holds(code: CodeType | None, file: str, line: int) -> bool:
    """Return whether a line of a file is one of ``code``."""
    if code is None or code.co_filename != file:
        return False
    lines = [line for _, _, line in code.co_lines() if line is not None]
    return code.co_firstlineno <= line <= max(lines)


def is_torchs(file: str) -> bool:
    """True for files whose functions Dynamo captures only as part of what calls them."""
    from torch._dynamo.trace_rules import check_file

    return bool(check_file(file).skipped)


# Turn Dynamo's errors of a call into ours, which say in a few lines what failed and where.

_CAUSE = re.compile(r"got \w+\((['\"])(?P<said>.*)\1\)")
_RAISED = re.compile(r"raised exception (.+)")  # what Dynamo says of an exception that forward itself raises
_FAILED = re.compile(r"assertion failed.*value: ConstantVariable\(bool: False\)", re.DOTALL)
_EXPLAINED = re.compile(r"Explanation: (.+)")
_OWN_SIZE = 300  # characters of an explanation
_NOTHING = "torch.compile with fullgraph=True found no compiled frames."  # as torch says it
_IN_PLACE = "convert in place, with autocastfx.enable, which goes on behind such code"


def plain_error(
    error: Exception, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, is_enabled: bool = False
) -> Exception | None:
    """Return the error to raise in the place of one of Dynamo's; None if that should stay.

    Args:
        error: raised by a call of ``model`` that Dynamo captured.
        model: the model.
        args: the arguments of the call by position.
        kwargs: its keyword arguments.
        is_enabled: whether the model is enabled, so that its graph may break.
    """
    from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException, TorchRuntimeError, Unsupported, UserError
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    # what this package raised inside of Dynamo, as it is
    if isinstance(error, BackendCompilerFailed) and isinstance(error.inner_exception, (AutocastFXError, Warning)):
        return error.inner_exception
    if str(error).startswith(_NOTHING):
        return CaptureError(
            f"Dynamo captures nothing of {type(model).__name__}, which would run in float32:"
            f"{str(error).removeprefix(_NOTHING)}"
        )
    known = (TorchRuntimeError, Unsupported, UserError) if is_enabled else (TorchDynamoException,)
    if not isinstance(error, (*known, GuardOnDataDependentSymNode)):
        return None
    said, mode = str(error), "train" if model.training else "eval"
    if "bind arguments" in said and (misfit := _misfit(model, args, kwargs)) is not None:
        return misfit
    # who is to blame: the model's own code, the conversion, or code that Dynamo cannot follow
    name, fails = type(model).__name__, _failure_of_its_own(error)
    if fails:
        first = f"{name} fails: {fails}"
        advice = (
            f"Call the model itself with these inputs{', after autocastfx.disable(model)' if is_enabled else ''}: if "
            "that fails too, mend that. If not, please report it."
        )
    elif isinstance(error, BackendCompilerFailed):
        inner = error.inner_exception
        first = f"{name} cannot be converted in {mode} mode: {type(inner).__name__}: {str(inner).partition(chr(10))[0]}"
        advice = f"This is a fault of autocastfx: please report it. Until it is mended, {_IN_PLACE}."
    else:
        first = f"{name} cannot be captured in {mode} mode, in one graph: {_reason(said)}"
        advice = _advice(said) if (kind := _class_that_fails(error, args, kwargs)) is None else _plain_advice(kind)
    at = ", ".join(filter(None, (_innermost(error, model), _called(model, args, kwargs))))
    raised = CaptureError("\n".join(filter(None, (first, f"{at[:1].upper()}{at[1:]}", advice))))
    raised.__context__, raised.__suppress_context__ = error, True
    return raised


def may_be_of_model(error: CaptureError) -> bool:
    """True if Dynamo met code that it does not follow, which may raise an exception of the model's own."""
    from torch._dynamo.exc import Unsupported, UserError

    return isinstance(error.__context__, (Unsupported, UserError))


def _failure_of_its_own(error: Exception) -> str:
    """Return what the model's own code raises; empty if it is Dynamo that fails."""
    from torch._dynamo.exc import TorchRuntimeError

    said = str(error)
    if isinstance(error, TorchRuntimeError):
        cause = _CAUSE.search(said)
        what = cause["said"] if cause is not None else said.partition("\n")[0]
        return what.partition(r"\nException raised from")[0]  # of C++, with its stack
    if (raised := _RAISED.search(said)) is not None:
        return f"forward raises {raised[1]}"
    return "an assertion in forward does not hold" if _FAILED.search(said) else ""


def _reason(said: str) -> str:
    """Return what Dynamo cannot do: the kind in a few words, and what it explains of it."""
    kind, explained = said.strip().partition("\n")[0], _EXPLAINED.search(said)
    return kind if explained is None else f"{kind.rstrip('.')}. {explained[1].strip()[:_OWN_SIZE]}"


def _misfit(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> TypeError | None:
    """Return Python's error for arguments that do not fit ``forward``; None if they do."""
    try:
        CallSignature.of(model.forward).describe(args, kwargs)
    except TypeError as error:
        return error
    return None


def _advice(said: str) -> str:
    said = said.lower()
    if "draws in python" in said:
        return f"Draw by torch's functions, or before the call and pass the numbers in; or {_IN_PLACE}."
    if any(word in said for word in ("data-dependent", "data dependent", ".item()", "tolist", "numpy")):
        return (
            "Its control flow depends on tensor values, or Python code needs one of them as a number. Use torch.where, "
            f"torch.cond or torch's own functions there, convert the submodules apart, or {_IN_PLACE}."
        )
    return (
        "Write this line so that one graph holds it; if it runs in the first call alone, call the model once before "
        f"you convert it; or convert the submodules apart, or {_IN_PLACE}."
    )


def _class_that_fails(error: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> type | None:
    """Return the class of an argument in whose ``__torch_function__`` Dynamo fails; None if it fails elsewhere."""
    stack: StackSummary | None = getattr(error, "real_stack", None)
    is_inside = any(one.name == "__torch_function__" for one in stack or ())
    if not is_inside and "tensor subclass" not in str(error).lower():
        return None
    own = torch.Tensor.__torch_function__.__func__
    kinds = (type(one) for one in pytree.tree_leaves((tuple(args), dict(kwargs))) if isinstance(one, torch.Tensor))
    return next((kind for kind in kinds if getattr(kind.__torch_function__, "__func__", None) is not own), None)


def _plain_advice(kind: type) -> str:
    return (
        f"{kind.__name__} has a __torch_function__ that one graph cannot hold. Give the model plain tensors, "
        f"x.as_subclass(torch.Tensor), or {_IN_PLACE}."
    )


def _innermost(error: Any, model: nn.Module) -> str:
    """Return the innermost line that is not torch's, and the innermost module of the model in whose forward it is."""
    stack: StackSummary | None = getattr(error, "real_stack", None)
    own = [one for one in stack or () if one.filename != CALLER and not is_torchs(one.filename)]
    lines = [(one.filename, one.lineno or 0) for one in reversed(own)]
    named = list(model.named_modules())
    inside = [*_modules_of_node(error, named)]
    inside += [(name, m) for at in lines for name, m in named if name and holds(forward_code(m), *at)]
    module = f"in module {inside[0][0]!r} ({type(inside[0][1]).__name__})" if inside else ""
    return ", ".join(filter(None, (f"at {place(*lines[0])}" if lines else "", module)))


def _modules_of_node(error: Exception, named: Sequence[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that call the function at which Dynamo fails, innermost first."""
    frames = (frame for frame, _ in walk_tb(error.__traceback__) if frame.f_code.co_name == "get_fake_value")
    for frame in frames:
        stack: Mapping[str, Any] = frame.f_locals["node"].meta.get("nn_module_stack") or {}
        called = {key.partition("@")[0] for key in stack}
        yield from reversed([(name, module) for name, module in named if name and str(id(module)) in called])


def _called(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    try:
        return f"called with {CallSignature.of(model.forward).bind(args, kwargs)}"
    except (TypeError, UnsupportedError):  # arguments that have no words, as a cache
        sizes = [sized(one) for one in args if isinstance(one, torch.Tensor)]
        return f"called with {', '.join(sizes)}, among others" if sizes else ""


# Collections of Python's garbage, which a trace of many small objects would otherwise start again and again.

_YOUNG, _MIDDLE, _ALL = 50_000, 20, 1_000


@contextmanager
def garbage_left() -> Generator[None, None, None]:
    """While open, Python seldom looks for garbage. Each complete search goes through all objects of the process."""
    before = gc.get_threshold()
    if before[0]:  # 0: never
        gc.set_threshold(*map(max, before, (_YOUNG, _MIDDLE, _ALL)))
    try:
        yield
    finally:
        gc.set_threshold(*before)
