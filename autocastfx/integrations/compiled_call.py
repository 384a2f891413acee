"""The call of a model that is compiled in place: nothing of it runs in float32 without being told."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Protocol
from unittest.mock import patch

import torch
from torch import fx, nn
from torch._C._dynamo import eval_frame
from torch.nn.utils.rnn import pad_packed_sequence
from torch.utils._python_dispatch import any_torch_dispatch_mode_on_stack

from autocastfx.capture.call import device_of
from autocastfx.capture.failure import quiet_logs
from autocastfx.capture.whole_calls import attention_written_out
from autocastfx.dtypes import dtype_name
from autocastfx.errors import CaptureError, UncapturedGraphWarning
from autocastfx.graph.any_size import any_size
from autocastfx.graph.node import module_path, stack_trace
from autocastfx.integrations.checked_copies import Backend, converted_copies, plain_copy
from autocastfx.integrations.dynamo_error import capture_mended, plain_error
from autocastfx.integrations.graph_break import breaks, is_torchs, left_by_torch, left_since
from autocastfx.integrations.one_time_messages import one_time_messages
from autocastfx.integrations.skipped_code import (
    InAutocast,
    SkippedCode,
    caller,
    compiler_is_off,
    forward_code,
    holds,
    is_caller,
    look_again,
    modules_of,
    no_call,
    now,
    skipped_since,
    skips,
    tried,
    whole,
)
from autocastfx.plan.plan import Precision
from autocastfx.report.compiled_graph import CompiledGraph
from autocastfx.report.view import source_line

__all__ = ["CompiledCall"]


class _Backend(Backend, Protocol):
    """The backend of a compiled call."""

    low: torch.dtype
    uncaptured: str
    graphs: list[CompiledGraph]
    skipped: list[SkippedCode]
    runs: int

    @property
    def takes_recurrent_layers(self) -> bool: ...

    def __call__(self, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]: ...

    def tell_unmatched(self, model: nn.Module) -> None: ...

    def paths(self) -> dict[int, str]: ...


class CompiledCall:
    """The call of a model, captured by Dynamo and converted; also of a part of it, if that is called by itself."""

    def __init__(self, model: nn.Module, backend: _Backend, options: Mapping[str, Any]) -> None:
        from torch._dynamo.eval_frame import skip_code

        self.model, self.backend, self.options = model, backend, options
        self.call: Callable[..., Any] = torch.compile(caller(model), backend=backend, **options)
        self._is_broken = False  # code runs between graphs, and modules that it calls may be new
        self._around: list[Callable[[], AbstractContextManager[None]]] = []
        self._parts: dict[nn.Module, CompiledCall] = {}
        self._looked: set[nn.Module] = set()  # parts that have been called where Dynamo captures nothing
        self._left: list[SkippedCode] = []
        self._told: set[str] = set()
        self._skips = -1  # how often Dynamo had skipped code at the end of the last call
        self._graphs: list[CompiledGraph] = []  # captured in calls of the model
        self._thread = threading.local()
        for function in (self._call_part, PartCall.__call__, InAutocast.__call__):  # Dynamo looks at what they call
            skip_code(function.__code__)
        self._take_parts()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, and see to the code that Dynamo has not captured in this call."""
        if any_torch_dispatch_mode_on_stack():  # Dynamo would skip the model's code, and that for good
            return self._run_as_it_is("a TorchDispatchMode around the call", args, kwargs)
        if self._skips != skips():
            look_again(max(self._skips, 0), self.backend.skipped)
        before, moment, broken = tried(), now(), breaks()
        count, runs = len(self.backend.graphs), self.backend.runs
        if self._is_broken:
            self._take_parts()
        try:
            with ExitStack() as stack:
                stack.enter_context(self._as_own())
                stack.enter_context(quiet_logs())
                stack.enter_context(capture_mended())
                stack.enter_context(one_time_messages())
                for around in self._around:
                    stack.enter_context(around())
                result = self.call(*args, **kwargs)
        except RuntimeError as error:
            if (plain := plain_error(error, self.model, args, kwargs)) is None:
                raise
            raise plain from None
        if tried() != before:
            self._see_to([*skipped_since(moment, self.model), *left_since(broken, self.model)])
            self._is_broken |= breaks() != broken
        self._skips = skips()
        if self._left:
            left, self._left = self._left, []
            self._see_to(left)
        if self.backend.runs == runs and not isinstance(self.call, InAutocast):
            self._see_to_no_graph()
        self._graphs += self.backend.graphs[count:]
        self.backend.tell_unmatched(self.model)
        return result

    def _see_to_no_graph(self) -> None:
        """Say why no graph ran in a call, if it is known."""
        if (why := compiler_is_off()) is not None:
            self._tell(why, "in float32")
        elif not (self.backend.graphs or self.backend.skipped):
            self._see_to([whole(self.model)])

    def _run_as_it_is(self, why: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the model without Dynamo, as ``uncaptured`` says."""
        in_autocast = self.backend.uncaptured == "autocast"
        self._tell(why, f"under torch.autocast, in {dtype_name(self.backend.low)}" if in_autocast else "in float32")
        if in_autocast:
            return self._in_autocast(self.model, type(self.model).__name__)(*args, **kwargs)
        with self._as_own():
            return torch.compiler.disable(self.model._call_impl)(*args, **kwargs)

    def _in_autocast(self, module: nn.Module, name: str) -> InAutocast:
        return InAutocast(module, name, device_of(self.model).type, self.backend.low, self._as_own)

    @contextmanager
    def _as_own(self) -> Generator[None]:
        """Let parts that are called run as the model's own."""
        was_inside, self._thread.is_inside = getattr(self._thread, "is_inside", False), True
        try:
            yield
        finally:
            self._thread.is_inside = was_inside

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
        found = list(self.model.modules())
        self._around = [attention_written_out] if any(isinstance(m, _FUSED) for m in found) else []
        if self.backend.takes_recurrent_layers and any(isinstance(m, nn.RNNBase) for m in found):
            self._around.append(_recurrent_layers_captured)
        for module in found:
            code = forward_code(module)
            is_free = module is not self.model and module.__dict__.get("_compiled_call_impl") is None
            if is_free and code is not None and type(module).__getstate__ is nn.Module.__getstate__:
                part = PartCall(module, self._call_part)
                module._compiled_call_impl = caller(module, self._call_part) if is_torchs(code.co_filename) else part

    def _call_part(self, part: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a part: as it is if the model calls it, or a tracer or autograd, else converted."""
        if getattr(self._thread, "is_inside", False):
            if eval_frame.get_eval_frame_callback() is None and part not in self._looked:
                self._looked.add(part)
                self._left += filter(None, [left_by_torch()])
            return part._call_impl(*args, **kwargs)
        if (
            eval_frame.get_eval_frame_callback() not in (None, False)  # between graphs
            or torch._C._current_graph_task_id() != -1
            or torch._C._get_tracing_state() is not None  # pyright: ignore[reportUnnecessaryComparison]
        ):
            return part._call_impl(*args, **kwargs)
        if part not in self._parts:
            self._parts[part] = CompiledCall(part, self.backend, self.options)
        return self._parts[part](*args, **kwargs)

    @contextmanager
    def copies(self) -> Generator[tuple[nn.Module, nn.Module, nn.Module]]:
        """Give copies of the model to check it on: as it is, enabled alike, and as it is captured, without casts.

        Raises:
            UnsupportedError: the model cannot be copied.
        """
        with converted_copies(self.model, self.backend.like(), self.backend.bare()) as (ours, bare):
            yield plain_copy(self.model), ours, bare

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave it out of copies of modules that copy all their attributes."""
        return no_call, ()

    def undo(self) -> None:
        """Give the model's own call back, and those of the modules in it."""
        for module in self.model.modules():
            call = module.__dict__.get("_compiled_call_impl")
            if isinstance(call, (CompiledCall, InAutocast, PartCall)) or is_caller(call):
                module._compiled_call_impl = None

    def _modules_in_autocast(self) -> set[nn.Module]:
        """Return the modules that run in regions of torch.autocast."""
        calls = ((m, self.call if m is self.model else m._compiled_call_impl) for m in self.model.modules())
        return {inner for module, call in calls if isinstance(call, InAutocast) for inner in module.modules()}

    def has_left(self, graph: CompiledGraph) -> bool:
        """Return whether the code that a graph was captured from runs under torch.autocast by now."""
        if graph not in self._graphs:
            return any(part.has_left(graph) for part in self._parts.values())
        modules, known = self._modules_in_autocast(), self.backend.paths()
        paths, codes = {known.get(id(module)) for module in modules}, [forward_code(module) for module in modules]

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

    def _see_to(self, skipped: Sequence[SkippedCode]) -> None:
        """Decide how skipped code runs from now on, and say so."""
        backend, low = self.backend, self.backend.low
        for one in skipped:
            if one.file == logging.__file__:
                continue  # a logger computes nothing
            holders = modules_of(self.model, one) or [self.model]
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
            elif backend.uncaptured == "autocast":
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


# In evaluation they run as one operator, which is float32 as its inputs are; under torch.autocast torch avoids it, too.
_FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


@contextmanager
def _recurrent_layers_captured() -> Generator[None]:
    """Let Dynamo capture RNN, GRU and LSTM, which it leaves out by default, for any length.

    It calls ``pad_packed_sequence`` as it is, by a rule that torch 2.11 does not have yet.
    """
    from torch._dynamo.trace_rules import get_torch_obj_rule_map
    from torch._dynamo.variables import SkipFunctionVariable

    rule = patch.dict(get_torch_obj_rule_map(), {pad_packed_sequence: SkipFunctionVariable})
    with torch._dynamo.config.patch(allow_rnn=True), rule, any_size():
        yield


class PartCall:
    """The call of a module whose own code Dynamo looks at by itself."""

    def __init__(self, module: Any, call: Callable[..., Any]) -> None:
        self.module, self.call = module, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        if torch.compiler.is_compiling():
            return self.module._call_impl(*args, **kwargs)
        return self.call(self.module, *args, **kwargs)
