"""The call of a model that is compiled in place: nothing of it runs in float32 without being told."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from importlib import import_module
from inspect import CO_GENERATOR
from pathlib import Path
from traceback import FrameSummary
from types import FrameType
from typing import Any, Protocol, cast
from unittest.mock import patch

import torch
from torch import fx, nn
from torch._C._dynamo import eval_frame
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.utils._python_dispatch import any_torch_dispatch_mode_on_stack
from torch.utils.hooks import RemovableHandle

from autocastfx.capture.call import Call, CallSignature, device_of
from autocastfx.capture.dynamo import (
    CALLER,
    Around,
    caller,
    contexts_for,
    forward_code,
    holds,
    is_caller,
    is_torchs,
    mends,
    plain_error,
)
from autocastfx.capture.kept_whole import keeping_whole
from autocastfx.capture.leave_intact import Shared
from autocastfx.capture.progress import quiet_logs
from autocastfx.dtypes import dtype_name
from autocastfx.errors import CaptureError, UncapturedGraphWarning, UnsupportedError
from autocastfx.graph.node import module_path, stack_trace
from autocastfx.integrations import skipped_code as skipped
from autocastfx.integrations.checked_copies import plain_copy
from autocastfx.plan.plan import Precision
from autocastfx.report.compiled_graph import CompiledGraph
from autocastfx.report.view import source_line

# Mend what Dynamo does where it captures a call of ours, and note what it looks at.


@contextmanager
def _mended() -> Generator[None]:
    with ExitStack() as stack:
        for owner, name, mended in (*mends(), *_mends_behind_breaks()):
            stack.enter_context(patch.object(owner, name, mended))
        yield


MENDED = Shared(_mended)


@cache
def _mends_behind_breaks() -> list[tuple[Any, str, Any]]:
    """Return mends, as :func:`mends` does, for where code runs between graphs.

    - Dynamo skips the code that it fails at by itself, such as a class whose ``__len__`` raises, from which it makes a
      guard. Its ``suppress_errors`` would hide our errors, and those of the model, too.
    - What it looks at is noted for the thread in which it does.
    """
    from torch._dynamo import convert_frame
    from torch._dynamo.exc import InternalTorchDynamoError, Unsupported

    class Skipped(Unsupported, InternalTorchDynamoError):
        """An error inside Dynamo that makes it skip the code."""

    return [
        (convert_frame, "InternalTorchDynamoError", Skipped),
        (convert_frame, "_compile", skipped.noting(convert_frame._compile)),
    ]


# Find the code of torch that runs in Python behind a break of Dynamo's graph, uncaptured.
#
# Where a graph breaks in a user's function, Dynamo captures what follows. Where it breaks inside a function of torch,
# the call of that function runs in Python as a whole, with all that it calls: only what is compiled by itself is
# captured.

_RECURRENT = "RNN, GRU, or LSTM"  # what Dynamo names where it does not capture one
_DISABLED = "torch.compiler.disable()"  # what it names where it meets a function that a user has excluded
_TORCH = str(Path(torch.__file__).parent)
_SWITCH = str(Path(_TORCH, "_dynamo", "eval_frame.py"))  # whose wrappers switch Dynamo off
_MODULE = cast("Any", nn.Module)._call_impl.__code__.co_filename


def left_by(breaks: Sequence[Any], model: nn.Module) -> Iterator[skipped.SkippedCode]:
    """Yield what breaks of the graph in a call of ``model``, as Dynamo records them, leave to Python, uncaptured.

    A module of torch is captured by itself then, through its :func:`caller`. If the graph breaks in it again, the
    modules in it are, and what it computes besides is left. A function in which the graph broke is left if Dynamo has
    not looked at it by itself either: it is a generator, or activation checkpointing calls it.
    """
    for one in breaks:
        stack = [frame for frame in one.user_stack if not _calls_modules(frame.filename)]
        reason = one.reason.partition("\n")[0]
        inner = next((i for i, frame in enumerate(stack) if is_torchs(frame.filename)), None)
        if _DISABLED in reason:
            # What runs under torch.autocast is excluded, too, and was told of. A model that is, itself, has no stack.
            if stack and one.user_stack[-1].filename != CALLER:
                yield replace(_code(stack[-1], "it calls a function under torch.compiler.disable"), is_excluded=True)
            continue
        if inner is None:
            if _RECURRENT in reason:
                yield _code(stack[-1], reason)
            elif len(stack) > 1 and not _is_looked_at(stack[1]):
                yield _code(
                    stack[0], f"the graph breaks in {skipped.plain_name(stack[1].name)}, which it calls: {reason}"
                )
            continue
        left = _code(stack[inner], reason)
        holders = skipped.modules_of(model, left)
        is_new = any(module.__dict__.get("_compiled_call_impl") is None for module in holders)
        if holders and all(type(module).forward is nn.Sequential.forward for module in holders) and not is_new:
            continue  # it calls its modules, and does nothing besides
        if inner == 0 or is_new:
            inside = (part for holder in holders for part in holder.modules())
            yield replace(left, is_in_parts=not any(isinstance(part, nn.RNNBase) for part in inside))
        elif not holders:
            yield _code(stack[inner - 1], f"in {left.name}: {reason}")


def _is_looked_at(frame: FrameSummary) -> bool:
    """True if Dynamo has tried to capture a function by itself, not as part of what calls it."""
    from torch._dynamo.convert_frame import input_codes

    codes = (code for one in input_codes.seen if (code := one()) is not None and not code.co_flags & CO_GENERATOR)
    own = (code for code in codes if (code.co_filename, code.co_name) == (frame.filename, frame.name))
    return any(line == (frame.lineno or 0) for code in own for _, _, line in code.co_lines())


def left_by_torch() -> skipped.SkippedCode | None:
    """Return the code that has called a function of torch's that is running, and in which Dynamo captures nothing.

    Activation checkpointing is one, where the graph breaks in what it calls: records name that place alone. The call of
    a module that a user has excluded is another. None if the function in which Dynamo is switched off is not torch's.
    """
    frame: FrameType | None = sys._getframe(1)
    inner = None
    while frame is not None and frame.f_code.co_filename != _SWITCH:
        frame, inner = frame.f_back, frame
    if inner is None or not inner.f_code.co_filename.startswith(_TORCH):
        return None
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    if frame is None:
        return None
    is_excluded = _calls_modules(inner.f_code.co_filename)
    reason = f"the graph breaks in what {inner.f_code.co_name} calls"
    if is_excluded:
        reason = "it calls a module under torch.compiler.disable"
    name, file = skipped.plain_name(frame.f_code.co_name), frame.f_code.co_filename
    return skipped.SkippedCode(name, file, frame.f_lineno, reason, is_excluded=is_excluded)


def _code(frame: FrameSummary, reason: str) -> skipped.SkippedCode:
    return skipped.SkippedCode(frame.name, frame.filename, frame.lineno or 0, reason)


def _calls_modules(file: str) -> bool:
    """True for the code between a module's call and its forward."""
    return file in (_MODULE, CALLER)


# The call of a model that is compiled in place: nothing of it runs in float32 without being told.


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def hooks_around(model: nn.Module) -> tuple[int | str, ...]:
    """Return what tells of hooks: whether a module in ``model`` has one, and those of all modules by their numbers."""
    own = any(getattr(module, table) for module in model.modules() for table in _HOOKS)
    every = [getattr(nn.modules.module, f"_global{table}") for table in _HOOKS]
    return ("own",) * own + tuple(number for table in every for number in table)


class _Backend(Protocol):
    """The backend of a compiled call, which enables models."""

    low: torch.dtype
    uncaptured: str
    graphs: list[CompiledGraph]
    skipped: list[skipped.SkippedCode]
    runs: int
    whole: frozenset[Any]

    @property
    def takes_recurrent_layers(self) -> bool: ...

    def __call__(self, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]: ...

    def like(self) -> _Backend: ...

    def bare(self) -> _Backend: ...

    def compile(self, model: nn.Module) -> nn.Module: ...

    def tell_unmatched(self, model: nn.Module) -> None: ...

    def paths(self) -> dict[int, str]: ...


class CompiledCall:
    """The call of a model, captured by Dynamo and converted; also of a part of it, if that is called by itself."""

    def __init__(self, model: nn.Module, backend: _Backend, options: Mapping[str, Any]) -> None:
        from torch._dynamo.eval_frame import skip_code
        from torch._dynamo.utils import to_subclass

        self.model, self.backend, self.options = model, backend, options
        self.given: tuple[Sequence[Any], Mapping[str, Any]] = (), {}  # the arguments of the call that runs
        self.hooks, self._hook = hooks_around(model), RemovableHandle.next_id
        self.call: Callable[..., Any] = torch.compile(caller(model), backend=backend, **options)
        self._calls = {self.hooks: self.call}
        self._called = self.call  # the one that has run last: what backward recomputes runs as it ran
        self._is_broken = False  # code runs between graphs, and modules that it calls may be new
        self._around: list[Around] = []
        self._parts: dict[nn.Module, CompiledCall] = {}
        self._alone: set[nn.Module] = set()  # parts that were called by themselves last
        self._looked: set[nn.Module] = set()  # parts that have been called where Dynamo captures nothing
        self._left: list[skipped.SkippedCode] = []
        self._told: set[str] = set()
        self._skips = -1  # how often Dynamo had skipped code when it was last let look again
        self._seen = skipped.Seen()  # what Dynamo has recorded, and is not told: it records a failure once
        self._graphs: list[CompiledGraph] = []  # captured in calls of the model
        for function in (self._call_part, PartCall.__call__, skipped.InAutocast.__call__):
            skip_code(function.__code__)  # Dynamo looks at what they call
        # Dynamo's code calls this. A program's own ``as_subclass``, captured there, would call it again, without end.
        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(to_subclass.__code__, eval_frame._FrameExecStrategy(skip, skip))
        self._take_parts()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, and see to the code that Dynamo has not captured in this call."""
        if any_torch_dispatch_mode_on_stack():  # Dynamo would skip the model's code, and that for good
            return self._run_as_it_is("a TorchDispatchMode around the call", args, kwargs)
        if torch._C._get_tracing_state() is not None:  # pyright: ignore[reportUnnecessaryComparison]
            return self._run_as_it_is("torch.jit.trace around the call", args, kwargs)
        if is_fx_symbolic_tracing():
            return self._run_as_it_is("a trace by torch.fx around the call", args, kwargs)
        if self._hook != RemovableHandle.next_id:  # torch numbers all hooks of a process
            self._look_at_hooks()
        if self._skips != (skips := skipped.skips()):
            skipped.look_again(max(self._skips, 0), self.backend.skipped)
        count, runs = len(self.backend.graphs), self.backend.runs
        if self._is_broken:
            self._take_parts()
        try:
            with ExitStack() as stack:
                stack.enter_context(skipped.INSIDE.entered(call=self, seen=self._seen))
                stack.enter_context(quiet_logs())
                stack.enter_context(MENDED)
                for around in self._around:
                    stack.enter_context(around())
                if not _is_in_backward():
                    self._called = self.call
                self.given = args, kwargs
                result = self._called(*args, **kwargs)
        except RuntimeError as error:
            if (plain := plain_error(error, self.model, args, kwargs, is_enabled=True)) is None:
                raise
            raise plain from None
        finally:
            self.given = (), {}
        if (failures := [*self._seen.failures]) or self._seen.breaks:
            breaks = [*self._seen.breaks]
            self._is_broken |= bool(breaks)
            told = (skipped.skipped_in(one, self.model) for one in failures)
            self._see_to([*told, *left_by(breaks, self.model)])
            del self._seen.failures[: len(failures)], self._seen.breaks[: len(breaks)]
        self._skips = skipped.skips_before_others(skips)
        if self._left:
            left, self._left = self._left, []
            self._see_to(left)
        if self.backend.runs == runs and not isinstance(self.call, skipped.InAutocast):
            self._see_to_no_graph()
        self._graphs += self.backend.graphs[count:]
        self.backend.tell_unmatched(self.model)
        return result

    def _look_at_hooks(self) -> None:
        """Have a model with hooks captured apart: guards on hooks take time. Those guards see to a hook that goes."""
        self._hook, hooks = RemovableHandle.next_id, hooks_around(self.model)
        if hooks != self.hooks and not isinstance(self.call, skipped.InAutocast):
            self.hooks, known = hooks, self._calls
            self._calls = {key: call for key, call in known.items() if not {*key} - {"own"}}  # others go with a hook
            if (call := known.get(hooks)) is None:
                call = torch.compile(caller(self.model), backend=self.backend, **self.options)
            self.call = self._calls[hooks] = call

    def _see_to_no_graph(self) -> None:
        """Say why no graph ran in a call, if it is known."""
        if (why := skipped.compiler_is_off()) is not None:
            self._tell(why, "in float32")
        elif not (self.backend.graphs or self.backend.skipped):
            self._see_to([skipped.whole(self.model)])

    def _run_as_it_is(self, why: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the model without Dynamo, as ``uncaptured`` says."""
        in_autocast = self._takes_autocast()
        self._tell(why, f"under torch.autocast, in {dtype_name(self.backend.low)}" if in_autocast else "in float32")
        if in_autocast:
            return self._in_autocast(self.model, type(self.model).__name__)(*args, **kwargs)
        with skipped.INSIDE.entered(call=self):
            return torch.compiler.disable(self.model._call_impl)(*args, **kwargs)

    def _takes_autocast(self) -> bool:
        return self.backend.uncaptured == "autocast" and torch.amp.is_autocast_available(device_of(self.model).type)

    def _in_autocast(self, module: nn.Module, name: str) -> skipped.InAutocast:
        return skipped.InAutocast(module, name, device_of(self.model).type, self.backend.low)

    def _tell(self, why: str, runs: str) -> None:
        told = f"torch.compile is off, by {why}: {type(self.model).__name__} runs {runs} in such calls."
        if self.backend.uncaptured == "error":
            raise CaptureError(told)
        if why not in self._told:
            self._told.add(why)
            warnings.warn(told, UncapturedGraphWarning, stacklevel=5)

    def _take_parts(self) -> None:
        """Take the calls of the modules in the model, which are converted as well if they are called by themselves.

        Dynamo looks at the functions that Python calls between graphs, but not at torch's: a :func:`caller` is none of
        these. RNN, GRU and LSTM are left out, because their copies copy all attributes.
        """
        self._around = contexts_for(self.model, recurrent=self.backend.takes_recurrent_layers)
        self._around.append(lambda: keeping_whole(self.backend.whole, autograd=True))
        for module in list(self.model.modules()):
            code = forward_code(module)
            is_free = module is not self.model and module.__dict__.get("_compiled_call_impl") is None
            if is_free and code is not None and type(module).__getstate__ is nn.Module.__getstate__:
                part = PartCall(module, self._call_part)
                module._compiled_call_impl = caller(module, self._call_part) if is_torchs(code.co_filename) else part

    def _call_part(self, part: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a part: as it is if a model calls it, this one or another, or a tracer, else converted.

        In backward it is called to be recomputed, and then runs as it ran last.
        """
        if (call := skipped.INSIDE.call) is not None:
            is_off = isinstance(call, CompiledCall) and eval_frame.get_eval_frame_callback() is None
            if is_off and part not in call._looked:
                call._looked.add(part)
                call._left += filter(None, [left_by_torch()])
            self._alone.discard(part)
            return part._call_impl(*args, **kwargs)
        is_between_graphs = eval_frame.get_eval_frame_callback() not in (None, False)
        if is_between_graphs or (_is_in_backward() and part not in self._alone):
            self._alone.discard(part)
            return part._call_impl(*args, **kwargs)
        self._alone.add(part)
        if part not in self._parts:
            self._parts[part] = CompiledCall(part, self.backend, self.options)
        return self._parts[part](*args, **kwargs)

    @contextmanager
    def copies(self) -> Generator[tuple[nn.Module, nn.Module, nn.Module, _Backend]]:
        """Give copies of the model to check it on: as it is, enabled alike, and as it is captured, without casts.

        Last comes the backend of the one that is enabled alike, which holds its graphs.

        Raises:
            UnsupportedError: the model cannot be copied.
        """
        alike = self.backend.like()
        ours, bare = (one.compile(plain_copy(self.model)) for one in (alike, self.backend.bare()))
        yield plain_copy(self.model), ours, bare, alike

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave it out of copies of modules that copy all their attributes."""
        return skipped.no_call, ()

    def undo(self) -> None:
        """Give the model's own call back, and those of the modules in it."""
        for module in self.model.modules():
            call = module.__dict__.get("_compiled_call_impl")
            if _is_ours(call):
                module._compiled_call_impl = None

    def _modules_in_autocast(self) -> set[nn.Module]:
        """Return the modules that run in regions of torch.autocast."""
        calls = ((m, self.call if m is self.model else m._compiled_call_impl) for m in self.model.modules())
        return {inner for module, call in calls if isinstance(call, skipped.InAutocast) for inner in module.modules()}

    def has_left(self, graph: CompiledGraph) -> bool:
        """Return whether the code that a graph was captured from runs under torch.autocast by now."""
        if graph not in self._graphs:
            return any(part.has_left(graph) for part in self._parts.values())
        modules, known = self._modules_in_autocast(), self.backend.paths()
        paths = {known.get(id(module)) for module in modules}
        codes = [forward_code(module) for module in modules]

        def is_inside(node: fx.Node) -> bool:
            line = source_line(stack_trace(node))
            is_in_code = line is not None and any(holds(code, line.path, line.number) for code in codes)
            return is_in_code or module_path(node) in paths

        planned = {node.name for node in graph.plan.nodes} if graph.plan is not None else set[str]()
        return bool(modules) and all(is_inside(node) for node in graph.module.graph.nodes if node.name in planned)

    def _has_converted(self, holders: Sequence[nn.Module]) -> bool:
        """True if graphs have been captured in modules, so that not all of them has run in float32."""
        known = self.backend.paths()
        paths = {known.get(id(module)) for holder in holders for module in holder.modules()}
        planned = (node for graph in self.backend.graphs if graph.plan is not None for node in graph.plan.nodes)
        return any(node.placement.run is Precision.LOW and node.module in paths for node in planned)

    def _see_to(self, codes: Sequence[skipped.SkippedCode]) -> None:
        """Decide how skipped code runs from now on, and say so."""
        backend, low = self.backend, self.backend.low
        for one in codes:
            if one.file == logging.__file__:
                continue  # a logger computes nothing
            holders = skipped.modules_of(self.model, one) or [self.model]
            if one in backend.skipped or set(holders) <= self._modules_in_autocast():
                continue
            told = f"torch.compile cannot capture {'all of ' if one.is_excluded else ''}{one}"
            if backend.uncaptured == "error":
                raise CaptureError(f"{told}.")
            what = "What was not captured of it" if self._has_converted(holders) else "It"
            runs = f"{what} runs in float32."
            if one.is_excluded:
                runs = "What it computes there runs in float32."
            elif one.is_in_parts:
                runs = "Its modules are converted one by one; what it computes besides runs in float32."
            elif self._takes_autocast():
                paths = {m: name or "(the model)" for name, m in self.model.named_modules() if m in holders}
                for module in holders:
                    in_autocast = self._in_autocast(module, paths[module])
                    if module is self.model:
                        self.call = in_autocast
                    else:
                        module._compiled_call_impl = in_autocast
                runs = (
                    f"{what} has run in float32; from now on {', '.join(paths.values())} runs under torch.autocast, in "
                    f"{dtype_name(low)}."
                )
            backend.skipped.append(replace(one, runs=runs))
            warnings.warn(f"{told}. {runs}", UncapturedGraphWarning, stacklevel=4)


def sees_to_hooks(module: fx.GraphModule) -> bool:
    """True if a graph of Dynamo's is that of a whole call of a model without hooks, which sees to the first one."""
    call, why = skipped.INSIDE.call, getattr(module, "compile_subgraph_reason", None)
    is_ours = isinstance(call, CompiledCall) and not call.hooks
    is_whole = is_ours and getattr(call._seen.code, "co_filename", "") == CALLER  # not a part of it
    return is_whole and why is not None and not why.graph_break


def called() -> Call | None:
    """Return the call of an enabled model that is running in this thread; None if there is none, or it has no names."""
    call = skipped.INSIDE.call
    if not isinstance(call, CompiledCall):
        return None
    args, kwargs = call.given
    try:
        return CallSignature.of(call.model.forward).describe(tuple(args), kwargs)
    except (TypeError, UnsupportedError):  # arguments that do not fit, or have no words
        return None


def _is_ours(call: object) -> bool:
    """True for what an enabled model or a module in one has in the place of its own call."""
    return isinstance(call, (CompiledCall, skipped.InAutocast, PartCall)) or is_caller(call)


@cache
def refuse_scripting() -> None:
    """Have torch.jit.script refuse enabled models from now on: it would compile their own code, in float32."""
    script: Any = import_module("torch.jit._script")
    prepare = script.call_prepare_scriptable_func

    def checked(model: nn.Module) -> nn.Module:
        for name, module in model.named_modules():
            if _is_ours(module.__dict__.get("_compiled_call_impl")):
                raise UnsupportedError(
                    f"{f'the module {name!r}' if name else f'this {type(model).__name__}'} is enabled, and "
                    "torch.jit.script compiles its own Python code, without its conversion: convert a copy.deepcopy of "
                    "it, and use torch.jit.trace(amp_model.freeze(*inputs), inputs)."
                )
        return prepare(model)

    script.call_prepare_scriptable_func = checked


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class PartCall:
    """The call of a module whose own code Dynamo looks at by itself."""

    def __init__(self, module: Any, call: Callable[..., Any]) -> None:
        self.module, self.call = module, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        if torch.compiler.is_compiling():
            return self.module._call_impl(*args, **kwargs)
        return self.call(self.module, *args, **kwargs)
