"""Find the code that Dynamo has skipped, which no backend sees, and run it under torch.autocast."""

from __future__ import annotations

import copy
import inspect
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, partial, wraps
from importlib import import_module
from traceback import walk_tb
from types import FrameType, MethodType
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import Function
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autocastfx.capture.dynamo import CALLER, forward_code, holds, is_torchs, unwrapped
from autocastfx.capture.leave_intact import Shared, own_thread_state, random_numbers_kept
from autocastfx.capture.progress import capture_shown
from autocastfx.errors import UncapturedGraphWarning
from autocastfx.graph.node import place


@dataclass(frozen=True)
class SkippedCode:
    """A function, or the rest of one after a graph break, that Dynamo could not capture.

    Attributes:
        name, file, line: the function, and where it or the rest begins.
        reason: Dynamo's own, its first line.
        is_in_parts: True if the modules in it are captured one by one, and only what it computes besides is not.
        is_excluded: True if the code is captured, but for a function that it calls and torch.compiler.disable excludes.
        runs: how it runs, in a sentence.
    """

    name: str
    file: str
    line: int
    reason: str
    is_in_parts: bool = False
    is_excluded: bool = False
    runs: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.name} at {self.file}:{self.line} ({self.reason})"


# Give float32 for 16 bits in what a module returns, whatever it returns it in.


def in_float32(returned: Any, low: torch.dtype, given: Any) -> Any:
    """Return ``returned`` with float32 tensors in the places of those of ``low``.

    An object of a class that pytrees do not know is copied, and its copy holds them; objects inside it stay. So do
    objects in ``given``, the arguments of the call, such as a cache.
    """

    @cache  # few models need it
    def arguments() -> set[int]:
        return {id(leaf) for leaf in pytree.tree_leaves(given)}

    def widened(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.float() if leaf.dtype == low else leaf
        if isinstance(leaf, (nn.Module, type)) or id(leaf) in arguments():
            return leaf
        items = _widened_values(dict(cast("dict[Any, Any]", leaf)), low) if isinstance(leaf, dict) else {}
        attributes = _widened_values(_attributes(leaf), low)
        if not items and not attributes:
            return leaf
        twin = copy.copy(leaf)
        for key, value in items.items():
            dict.__setitem__(twin, key, value)
        for name, value in attributes.items():
            object.__setattr__(twin, name, value)  # a dataclass may be frozen
        return twin

    return pytree.tree_map(widened, returned)


def _attributes(leaf: Any) -> dict[str, Any]:
    table: Any = getattr(leaf, "__dict__", None)
    if isinstance(table, dict):
        return dict(cast("dict[str, Any]", table))
    return {one.name: getattr(leaf, one.name) for one in fields(leaf)} if is_dataclass(leaf) else {}  # with slots


def _widened_values(values: Mapping[Any, Any], low: torch.dtype) -> dict[Any, Any]:
    """Return the values that hold tensors of ``low``, by key, with float32 in their places."""
    return {
        key: pytree.tree_map_only(torch.Tensor, lambda t: t.float() if t.dtype == low else t, value)
        for key, value in values.items()
        if any(isinstance(leaf, torch.Tensor) and leaf.dtype == low for leaf in pytree.tree_leaves(value))
    }


class _Inside(threading.local):
    """What a thread is inside of.

    Attributes:
        call: the call that decides how the modules run which are called inside of it.
        kind: the device type of a region of torch.autocast in which backwards are tried.
        seen: gets Dynamo's records.
    """

    call: Any = None
    kind: str | None = None
    seen: Seen | None = None

    @contextmanager
    def entered(self, **now: Any) -> Generator[None]:
        """Be inside of these."""
        before = {name: getattr(self, name) for name in now}
        vars(self).update(now)
        try:
            yield
        finally:
            vars(self).update(before)


INSIDE = _Inside()

# Try the backward of custom autograd functions under torch.autocast, before a training step runs it.


@contextmanager
def backwards_tried(kind: str) -> Generator[None]:
    """Let each custom autograd function, and each operator on sparse tensors, fail at its call, if its backward would.

    torch.autocast hands a function tensors of two dtypes. Its backward runs after the region, where nothing is cast,
    and then it is too late to run in float32. So it is tried on copies, with gradients of zero. torch's own functions
    are left out: that of activation checkpointing would run a part of the model again.
    """
    with INSIDE.entered(kind=kind), _TRYING, _NoSparse():
        yield


def _applied_on_trial() -> AbstractContextManager[object]:
    before: Any = Function.__dict__["apply"]

    def original(function: type[Function], *args: Any, **kwargs: Any) -> Any:
        return before.__get__(None, function)(*args, **kwargs)

    def apply(function: type[Function], *args: Any, **kwargs: Any) -> Any:
        kind = INSIDE.kind  # None: another thread tries
        cannot_try = torch.is_inference_mode_enabled() or torch._C._are_functorch_transforms_active()
        if kind is not None and not function.__module__.startswith("torch.") and not cannot_try:
            any_gradient = not torch.is_grad_enabled()
            with random_numbers_kept(), own_thread_state(), torch.enable_grad():
                copies = pytree.tree_map_only(Tensor, partial(_copy, any_gradient=any_gradient), args)
                _run_backward(original(function, *copies, **kwargs), kind)
        return original(function, *args, **kwargs)

    return patch.object(Function, "apply", classmethod(apply))


_TRYING = Shared(_applied_on_trial)


def _copy(tensor: Tensor, any_gradient: bool) -> Tensor:
    needs = tensor.requires_grad or (any_gradient and (tensor.is_floating_point() or tensor.is_complex()))
    return tensor.detach().requires_grad_(needs).clone()  # no leaf, into which a function may not write


def _run_backward(returned: Any, kind: str) -> None:
    """Let autograd run it, which gives a function just those gradients that it asks for."""
    outputs = [leaf for leaf in pytree.tree_leaves(returned) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if outputs:
        with torch.autocast(kind, enabled=False):
            try:
                torch.autograd.backward(outputs, [torch.zeros_like(one) for one in outputs])
            except Exception as error:  # whatever a person's code raises: the model has not called it
                raise RuntimeError(str(error)) from error


_RESUMED = "torch_dynamo_resume_in_"  # the rest of a function after a graph break
# What 16 bits may make fail: torch's errors, those of numpy for bfloat16, and checks of values. Others may be meant.
FAILURES = (ArithmeticError, AssertionError, RuntimeError, TypeError, ValueError)
_LIMIT = (
    ": a value that the code reads differs in each call, and Dynamo's log says which; torch._dynamo.config."
    "recompile_limit allows more graphs"
)


@dataclass
class Seen:
    """Dynamo's records of the code that it has failed at, and of where its graphs broke; what it looks at now."""

    failures: list[Any] = field(default_factory=list)
    breaks: list[Any] = field(default_factory=list)
    code: Any = None


def noting(capture: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``capture``, which Dynamo calls in one thread at a time, with its records added to ``INSIDE.seen``."""

    @wraps(capture)
    def noting_capture(*args: Any, **kwargs: Any) -> Any:
        from torch._dynamo.utils import graph_break_reasons

        seen = INSIDE.seen or Seen()
        seen.code = args[0]
        moment, broken = time.time_ns() // 1000, len(graph_break_reasons)  # as Dynamo's records have the time
        try:
            others = args[10]  # Dynamo's entry of a graph that does not fit
            with capture_shown(plain_name(args[0].co_name), lambda: "no graph fits the call" if others else ""):
                return capture(*args, **kwargs)
        finally:
            _add_new(seen.failures, (one for one in _failures() if (one.start_time_us or 0) >= moment))
            _add_new(seen.breaks, graph_break_reasons[broken:])

    return noting_capture


def _add_new(known: list[Any], records: Iterable[Any]) -> None:
    """Add records that a capture inside has not added."""
    known += [one for one in records if all(one is not other for other in known)]


def whole(model: nn.Module, reason: str = "there is nothing that it captures") -> SkippedCode:
    """Return all the code of ``model``, for where Dynamo has captured none of it, or does not say which."""
    code = forward_code(model)
    file, line = (code.co_filename, code.co_firstlineno) if code is not None else ("", 0)
    return SkippedCode("forward", file, line, reason)


def no_call() -> None:
    """Return what a module without a call of its own has."""


# Dynamo skips code for all models of the process once it has failed in one, and says so only then: threads, and codes.
_SKIPS: list[tuple[int, tuple[str, int, str]]] = []


def skips() -> int:
    """Return how often Dynamo has skipped code in this process."""
    return len(_SKIPS)


def skips_before_others(since: int) -> int:
    """Return the number of :func:`skips` before the first in another thread after ``since``, or of all."""
    others = (i for i, (thread, _) in enumerate(_SKIPS[since:], since) if thread != threading.get_ident())
    return next(others, len(_SKIPS))


# The backends of which Dynamo is watched, as it gives them no word of what it skips.
_WATCHED: list[Callable[[object], bool]] = []


def watch(is_watched: Callable[[object], bool]) -> None:
    """Say what Dynamo skips where it captures for a backend of this kind, until ``torch._dynamo.reset``."""
    import_module("torch._dynamo")  # before its parts: threads that import these at once would find them half done
    from torch._dynamo.callback import callback_handler

    if is_watched not in _WATCHED:
        _WATCHED.append(is_watched)
    if _tell_of_skip not in callback_handler.end_callbacks:
        callback_handler.register_end_callback(_tell_of_skip)


def _tell_of_skip(_: object) -> None:
    """Note the capture that ends here, if it has failed, and warn for a watched backend, if no error says so."""
    from torch._dynamo import config
    from torch._dynamo.exc import SkipFrame, Unsupported, UserError

    error = sys.exc_info()[1]
    if not (isinstance(error, (Unsupported, UserError, SkipFrame)) or (error is not None and config.suppress_errors)):
        return
    frame: FrameType | None = sys._getframe(1)  # only Dynamo's own frame knows the backend that it captures for
    while frame is not None and not (frame.f_code.co_name == "_compile" and "compiler_fn" in frame.f_locals):
        frame = frame.f_back
    if frame is None or frame.f_locals.get("one_graph"):
        return
    backend, code = unwrapped(frame.f_locals["compiler_fn"]), frame.f_locals["code"]
    _SKIPS.append((threading.get_ident(), (code.co_filename, code.co_firstlineno, code.co_name)))
    if any(is_watched(backend) for is_watched in _WATCHED):
        reason = str(error).partition("\n")[0]
        skipped = SkippedCode(plain_name(code.co_name), code.co_filename, code.co_firstlineno, reason)
        told = (
            f"torch.compile cannot capture {skipped}, so no backend sees it: it runs in float32, in all models that "
            "call it. autocastfx.enable(model) runs it under torch.autocast, in 16 bits."
        )
        warnings.warn(told, UncapturedGraphWarning, stacklevel=2)


def compiler_is_off() -> str | None:
    """Return the setting by which Dynamo runs code as it is, also code that it has captured; None if there is none."""
    from torch._dynamo import config, eval_frame

    if config.disable:
        return "torch._dynamo.config.disable"
    if eval_frame._stance.stance != "default":
        return f"torch.compiler.set_stance({eval_frame._stance.stance!r})"
    return None


def look_again(since: int, known: Sequence[SkippedCode]) -> None:
    """Let Dynamo look again at code that it has skipped in another model: it would skip it unsaid in the next, too.

    That is code skipped ``since`` a result of :func:`skips`; since 0 all code that has no graphs, also of models that
    others have compiled, or as many as Dynamo allows. But not what is ``known`` in the model that is called next, and
    told.
    """
    from torch._C._dynamo import eval_frame
    from torch._dynamo import config
    from torch._dynamo.convert_frame import input_codes

    skipped = {*(code for _, code in _SKIPS[since:]), *([] if since else map(_code, _failures()))}
    told = {(one.file, one.line, one.name) for one in known}
    for reference in list(input_codes.seen):
        code = reference()
        if code is None:
            continue
        graphs = len(eval_frame._debug_get_cache_entry_list(code))
        place = code.co_filename, code.co_firstlineno
        is_unsaid = (*place, code.co_name) in skipped and (*place, plain_name(code.co_name)) not in told
        if is_unsaid or not (since or 0 < graphs < config.recompile_limit):
            look = eval_frame._FrameAction.DEFAULT  # a reset would end the process if another thread runs the code
            eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(look, look))


def _code(record: Any) -> tuple[str, int, str]:
    return str(record.co_filename), int(record.co_firstlineno or 0), str(record.co_name)


def _failures() -> Iterator[Any]:
    from torch._dynamo.utils import get_compilation_metrics

    return (one for one in get_compilation_metrics() if one.fail_type is not None)


def skipped_in(record: Any, model: nn.Module) -> SkippedCode:
    """Return what Dynamo has skipped in a call of ``model``, from its record."""
    reason = str(record.fail_reason).partition("\n")[0] or str(record.fail_type)
    name = plain_name(str(record.co_name))
    reason += _in_which_hook(reason, record.fail_user_frame_filename, record.fail_user_frame_lineno, model)
    if record.co_filename is None:  # the limit of graphs: Dynamo names no code, as it has looked at none
        return whole(model, f"{reason}{_LIMIT}" if "recompile limit" in reason else reason)
    if record.co_filename == CALLER:
        return whole(next((m for m in model.modules() if type(m).__name__ == name), model), reason)
    return SkippedCode(name, str(record.co_filename), int(record.co_firstlineno or 0), reason)


_SIDE_EFFECT = "Unsafe side effect"  # what Dynamo says of code in activation checkpointing, or in a tensor's hook
_BACKWARD_HOOKS = "Module-level backwards hooks"


def _in_which_hook(reason: str, file: str | None, line: int | None, model: nn.Module) -> str:
    """Say which hook, of which module, makes Dynamo skip code; else in which line it is. Empty for other reasons.

    The reason is Dynamo's own; file and line are of the innermost line that it has looked at.
    """
    named = list(model.named_modules())
    if _BACKWARD_HOOKS in reason:
        hooks = [(path, hook) for path, module in named for hook in _hooks_of(module, "_backward")]
        return f" Here {_hooks_said(hooks)}: remove it to have the code captured" if hooks else ""
    if _SIDE_EFFECT not in reason or file is None or line is None:
        return ""
    hooks = [(path, hook) for path, module in named for hook in _hooks_of(module, "_") if _has_line(hook, file, line)]
    if not hooks:
        return f": an object that lies outside is changed at {place(file, line)}"
    return (
        f": {_hooks_said(hooks)}, changes an object outside of it, which is not captured inside of activation "
        "checkpointing. Remove the hook, or register it on a module around the checkpointed one"
    )


def _hooks_of(module: nn.Module, kind: str) -> Iterator[Callable[..., Any]]:
    """Yield the functions that are registered on a module as hooks of its calls, of a kind such as ``_backward``."""
    for name, table in vars(module).items():
        if name.startswith(kind) and name.endswith(("_forward_hooks", "_backward_hooks", "_pre_hooks")):
            yield from cast("Mapping[int, Callable[..., Any]]", table).values()


def _function_of(hook: Any) -> Any:
    """Return the Python function that a hook runs: inside of partials and methods, or the ``__call__`` of an object."""
    while isinstance(hook, (partial, MethodType)):
        hook = cast("partial[Any]", hook).func if isinstance(hook, partial) else hook.__func__
    return hook if hasattr(hook, "__code__") else inspect.getattr_static(type(hook), "__call__")


def _has_line(hook: Callable[..., Any], file: str, line: int) -> bool:
    return holds(getattr(_function_of(hook), "__code__", None), file, line)


def _hooks_said(hooks: Sequence[tuple[str, Callable[..., Any]]]) -> str:
    """Name each hook, with its place and its module: ``the hook keep at net.py:6, on module 'layers.1'``."""
    by_hook: dict[str, list[str]] = {}
    for path, hook in hooks:
        function = _function_of(hook)
        code = getattr(function, "__code__", None)
        name = getattr(function, "__qualname__", type(hook).__name__)
        at = f" at {code.co_filename}:{code.co_firstlineno}" if code is not None else ""
        by_hook.setdefault(f"the hook {name}{at}", []).append(f"module {path!r}" if path else "the model")
    return " and ".join(f"{hook}, on {', '.join(dict.fromkeys(paths))}" for hook, paths in by_hook.items())


def plain_name(name: str) -> str:
    """Return the name of a function; of what Dynamo makes of the rest of one, the function's."""
    return name.removeprefix(_RESUMED).partition("_at_")[0] if name.startswith(_RESUMED) else name


def modules_of(model: nn.Module, skipped: SkippedCode) -> list[nn.Module]:
    """Return the modules of ``model`` whose ``forward`` is the skipped code or holds it."""
    return [module for module in model.modules() if holds(forward_code(module), skipped.file, skipped.line)]


# Run what is not converted under torch.autocast, or in float32 where that fails.


def graph_in_autocast(module: fx.GraphModule, kind: str, low: torch.dtype) -> fx.GraphModule:
    """Return a copy of ``module`` whose nodes run in a region of torch.autocast."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    region: fx.Node | None = None
    for node in module.graph.nodes:
        if region is None and node.op not in ("placeholder", "get_attr"):
            region = graph.call_function(torch.amp.autocast_mode._enter_autocast, (kind, low, True, None))
        if node.op == "output":
            graph.call_function(torch.amp.autocast_mode._exit_autocast, (region,))
        copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(module, graph)


@contextmanager
def autocast_as_before(kind: str) -> Generator[None]:
    """Leave the regions of torch.autocast, and those of torch.func, that what fails inside has entered by itself."""
    functorch: Any = cast("Any", torch._C)._functorch
    depth, levels = _depth(), functorch.get_dynamic_layer_stack_depth()
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    try:
        yield
    except FAILURES:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
        while _depth() > depth:
            torch.autocast_decrement_nesting()
        functorch.pop_dynamic_layer_stack_and_undo_to_depth(levels)
        if not depth:
            torch.clear_autocast_cache()
        raise


def _depth() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def float32_where_it_fails(
    run: Callable[..., Any], exact: Callable[..., Any], kind: str, what: str
) -> Callable[..., Any]:
    """Return a call of ``run``, which is under torch.autocast, and of ``exact`` from its first failure on.

    In the call that fails it has run twice, in part. That ``what`` fails is told. Where ``exact`` fails, too, the model
    does so by itself, and what fails there again is raised at once.
    """
    is_float32 = False
    by_itself = set[tuple[object, ...]]()

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_float32
        failure: Exception | None = None
        if not is_float32:
            try:
                with autocast_as_before(kind):
                    return run(*args, **kwargs)
            except FAILURES as error:
                if _place_of(error) in by_itself:
                    raise
                failure = error
        try:
            with torch.autocast(kind, enabled=False):
                result = exact(*args, **kwargs)
        except FAILURES:
            by_itself.update([] if failure is None else [_place_of(failure)])
            raise
        if failure is not None:
            is_float32 = True
            warn_of_failure(what, failure)
        return result

    return call


def _place_of(error: Exception) -> tuple[object, ...]:
    """Return the line that raises an error; what is said tells those of torch's functions apart."""
    *_, (frame, line) = walk_tb(error.__traceback__)
    code = frame.f_code
    return type(error), code, line, str(error) if is_torchs(code.co_filename) else ""


def warn_of_failure(what: str, failure: Exception) -> None:
    """Say that what failed under torch.autocast runs in float32."""
    said = str(failure).partition("\n")[0]
    told = f"{what} fails under torch.autocast ({said}), and runs in float32 from now on."
    warnings.warn(told, UncapturedGraphWarning, stacklevel=5)


class InAutocast:
    """The call of a module, and of those in it, in a region of torch.autocast, which Dynamo leaves alone.

    It returns float32 where it returned 16 bits, to fit what is around it. Copies and pickles of the module lack it.
    What fails in the region, but not in float32, runs in float32 from then on (:func:`float32_where_it_fails`).
    """

    def __init__(self, module: nn.Module, name: str, kind: str, low: torch.dtype) -> None:
        self.kind, self.low, self.is_tried = kind, low, False
        self._exact: Any = cast("Any", module)._call_impl
        self._uncaptured = torch.compiler.disable(float32_where_it_fails(self._run, self._exact, kind, name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        with INSIDE.entered(call=INSIDE.call or self):
            return self._uncaptured(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave it out of copies of modules that copy all their attributes, as nn.LSTM does."""
        return no_call, ()

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.kind, self.low), nullcontext() if self.is_tried else backwards_tried(self.kind):
            returned = self._exact(*args, **kwargs)
        self.is_tried = True
        return in_float32(returned, self.low, (args, kwargs))


class _NoSparse(TorchDispatchMode):
    """Fails where an operator takes a sparse tensor: under torch.autocast, only its backward would fail."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let Dynamo capture what is compiled by itself: under other modes it skips code, and that for good."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, torch.Tensor) and leaf.layout != torch.strided for leaf in leaves):
            raise RuntimeError("sparse tensors have no gradients there")
        return func(*args, **(kwargs or {}))
