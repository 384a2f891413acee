"""Enable each model that a script calls, at its first call, and report on it; the script knows nothing of it."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial, wraps
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._C._dynamo import eval_frame
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autocastfx.capture.leave_intact import is_captured_here, is_in_autocast
from autocastfx.integrations.backend import CompileBackend
from autocastfx.integrations.compiled import CompiledCall
from autocastfx.integrations.skipped_code import INSIDE
from autocastfx.report.compiled_graph import CompiledGraph
from autocastfx.runtime.amp_module import AmpModule
from autocastfx.training.grad_scaler import GradScaler

# The report of a script that ran with its models converted, as text and as data.


@dataclass(frozen=True)
class RanGraph:
    """A graph of a model: how many of its nodes run in 16 bits and in float32, and its casts.

    Attributes:
        failure: why it could not be converted, else empty.
    """

    low: int
    float32: int
    casts: int
    failure: str = ""

    @staticmethod
    def of(graph: CompiledGraph) -> RanGraph:
        """Count the nodes of a compiled graph."""
        if graph.plan is None:
            return RanGraph(0, 0, 0, graph.failure)
        runs = [str(node.placement.run) for node in graph.plan.nodes]
        return RanGraph(runs.count("low"), runs.count("float32"), len(graph.plan.casts))


@dataclass(frozen=True)
class RanModel:
    """A model that was enabled.

    Attributes:
        name: its class.
        where: file and line of its first call.
        graphs: in the order in which they were captured.
        skipped: code that was not captured, with file, line and reason.
    """

    name: str
    where: str
    graphs: tuple[RanGraph, ...]
    skipped: tuple[str, ...]

    def __str__(self) -> str:
        count = len(self.graphs)
        text = f"{self.name}, called at {self.where}: {count} graph{'' if count == 1 else 's'}"
        if self.graphs:
            most = max(self.graphs, key=lambda graph: graph.low + graph.float32)
            text += f"; the largest has {most.low} low nodes, {most.float32} float32, {most.casts} casts"
        unlike = [f"not converted: {graph.failure}" for graph in self.graphs if graph.failure]
        unlike += [f"not captured: {one}" for one in self.skipped]
        return "\n".join([text, *(f"  {one}" for one in unlike)])


@dataclass(frozen=True)
class LeftAlone:
    """A call or a model that the script runs as before.

    Attributes:
        name: a module's class, or a function.
        where: file and line of the call.
        reason: why.
        calls: how often it was called there.
    """

    name: str
    where: str
    reason: str
    calls: int

    def __str__(self) -> str:
        times = f", {self.calls} call{'' if self.calls == 1 else 's'}" if self.calls else ""
        return f"left as it is: {self.name} at {self.where}{times}: {self.reason}"


@dataclass(frozen=True)
class RunReport:
    """The models that a script called, and its steps.

    Attributes:
        dtype: the 16-bit dtype.
        models: what was enabled.
        left: what was not.
        steps: steps of optimizers.
        unscaled_steps: those by gradients of a float16 loss that was not scaled.
        skipped_steps: those that a scaler skipped for an overflow.
    """

    dtype: str
    models: Sequence[RanModel]
    left: Sequence[LeftAlone]
    steps: int
    unscaled_steps: int
    skipped_steps: int

    def __str__(self) -> str:
        if not (self.models or self.left):
            return "no model was called in this process: nothing is converted"
        lines = [*(f"{self.dtype}: {model}" for model in self.models), *map(str, self.left)]
        if self.skipped_steps or self.unscaled_steps:
            lines.append(
                f"{self.steps} steps, {self.skipped_steps} more skipped for an overflow, {self.unscaled_steps} by "
                "gradients of an unscaled loss"
            )
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return all of it as JSON."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n"


# Enable each model that a script calls, at its first call, while the script knows nothing of it.

_OURS, _TORCH = Path(__file__).parents[1], Path(torch.__file__).parent  # as frames name them: links are not resolved


class ScriptRun:
    """Converts what a script runs, between entering and leaving :meth:`active`.

    A model is a module with float32 parameters that the script calls while no other module runs. The calls that the
    script makes in its own ``torch.autocast`` stay as they are, and so does what it compiles itself; both are counted.
    """

    def __init__(self, low: torch.dtype, make: Callable[[], CompileBackend]) -> None:
        """Prepare to convert to the 16-bit dtype ``low``, each model by what ``make`` makes."""
        self.low, self.make = low, make
        self._enabled: list[tuple[nn.Module, CompileBackend, str]] = []
        self._left: Counter[tuple[str, str, str]] = Counter()
        self._scalers: list[GradScaler] = []
        self._steps = self._unscaled = 0

    @contextmanager
    def active(self) -> Generator[None]:
        """Enable models at their first calls, and let ``torch.amp.GradScaler`` be this package's."""
        from torch._dynamo.eval_frame import skip_code

        for function in (_FirstCall.__get__, ScriptRun.takes):  # Dynamo is not to look at these between graphs
            skip_code(function.__code__)
        scaler, cuda_scaler = _scalers(self._scalers)
        with ExitStack() as stack:
            for module, kind in ((torch.amp, scaler), (torch.cuda.amp, cuda_scaler)):
                stack.enter_context(patch.object(module, "GradScaler", kind))
                stack.enter_context(patch.object(module.grad_scaler, "GradScaler", kind))
            stack.enter_context(patch.object(torch, "compile", self._noting(torch.compile)))
            # What nn.Module.__call__ runs in place of the module's own code, if it is not None: a model has one of its
            # own from its first call on.
            stack.enter_context(patch.object(nn.Module, "_compiled_call_impl", _FirstCall(self)))
            stack.enter_context(patch.object(AmpModule, "__call__", self._telling(AmpModule.__call__)))
            stack.callback(register_optimizer_step_pre_hook(self._count_step).remove)
            yield

    def _telling(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a call of converted models, which are left alone, and told."""

        @wraps(call)
        def told(amp_model: AmpModule, *args: Any, **kwargs: Any) -> Any:
            if not self.takes(amp_model):
                return call(amp_model, *args, **kwargs)
            self._left[_name(amp_model), _caller(), "the script converts it"] += 1
            with INSIDE.entered(call=self):
                return call(amp_model, *args, **kwargs)

        return told

    def report(self) -> RunReport:
        """Tell what became of the models so far."""
        skips = sum(scaler.skipped_steps for scaler in self._scalers)
        models = [
            RanModel(type(m).__name__, where, tuple(map(RanGraph.of, b.graphs)), tuple(map(str, b.skipped)))
            for m, b, where in self._enabled
        ]
        left = [LeftAlone(*key, calls) for key, calls in self._left.items()]
        return RunReport(str(self.low).removeprefix("torch."), models, left, self._steps, self._unscaled, skips)

    def takes(self, module: nn.Module) -> bool:
        """True if the script calls ``module``: not a module, a conversion, a tracer, compiled code or backward."""
        return not (
            torch.compiler.is_compiling()
            or eval_frame.get_eval_frame_callback() not in (None, False)  # between graphs of what Dynamo compiles
            or INSIDE.call is not None
            or is_captured_here()
            or torch._C._current_graph_task_id() != -1
            or torch._C._get_tracing_state() is not None  # pyright: ignore[reportUnnecessaryComparison]
            or isinstance(module, torch.jit.ScriptModule)
        )

    def first_call(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a module that is not enabled, after enabling it if it is a model."""
        is_ddp = isinstance(module, nn.parallel.DistributedDataParallel)
        if is_ddp or type(module).__name__ == "FullyShardedDataParallel":  # the model is what it holds
            return module._call_impl(*args, **kwargs)
        reason, name = self._why_not(module), _name(module)
        if reason is None and (whole := _module_being_made()) is not None:
            reason, name = "called while it is made", _name(whole)
        if reason is None and any(p.dtype == torch.float32 for p in module.parameters()):
            backend = self.make()
            backend.compile(module)
            if isinstance(call := module.__dict__.get("_compiled_call_impl"), CompiledCall):
                self._enabled.append((module, backend, _caller()))
                module._compiled_call_impl = _ScriptCall(self, call)
                return module(*args, **kwargs)
        elif reason:
            self._left[name, _caller(), reason] += 1
        with INSIDE.entered(call=self):
            return module._call_impl(*args, **kwargs)

    def _why_not(self, module: nn.Module) -> str | None:
        """Return why a module with parameters is left alone; None if it is not."""
        first = next(module.parameters(), None)
        if first is None:
            return None
        if isinstance(module, torch._dynamo.OptimizedModule):
            return "the script compiles it"
        if isinstance(module, nn.DataParallel):
            return "nn.DataParallel copies it in each call"
        if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
            return "a module in it is TorchScript"
        if is_in_autocast(first.device.type):
            return "called in the script's own torch.autocast"
        if any(hasattr(parameter, "device_mesh") for parameter in module.parameters()):
            return "its parameters are DTensors"
        if all(parameter.dtype != torch.float32 for parameter in module.parameters()):
            return f"its parameters are {first.dtype}"
        return None

    def _noting(self, compile_it: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``torch.compile``, to count what the script compiles itself."""

        @wraps(compile_it)
        def noted(model: Any = None, *args: Any, **kwargs: Any) -> Any:
            if model is None:
                return lambda function: noted(function, *args, **kwargs)  # pyright: ignore[reportUnknownLambdaType]
            if not isinstance(kwargs.get("backend"), CompileBackend):
                self._left[_name(model), _caller(), "the script compiles it"] += 0
            return compile_it(model, *args, **kwargs)

        return noted

    def _count_step(self, *_: object) -> None:
        self._steps += 1
        if self.low == torch.float16 and self._enabled and not any(scaler.is_enabled() for scaler in self._scalers):
            self._unscaled += 1


class _FirstCall:
    """The call of a module that is not enabled: None leaves it to ``nn.Module``."""

    def __init__(self, run: ScriptRun) -> None:
        self.run = run

    def __get__(self, module: Any, owner: type) -> Callable[..., Any] | None:
        """Return what ``nn.Module.__call__`` is to run."""
        return partial(self.run.first_call, module) if module is not None and self.run.takes(module) else None


class _ScriptCall(CompiledCall):
    """The call of an enabled model, in which no other is enabled. In torch.autocast of the script it is as before."""

    def __init__(self, run: ScriptRun, call: CompiledCall) -> None:
        call.undo()  # else the parts would ask it, and not this one, whether the model calls them
        super().__init__(call.model, call.backend, call.options)
        self.run = run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        if torch.compiler.is_compiling() or (INSIDE.call is not None and eval_frame.get_eval_frame_callback() is None):
            return self.model._call_impl(*args, **kwargs)
        if not self.run.takes(self.model):
            return super().__call__(*args, **kwargs)
        if _in_autocast(self.model):
            return self.run.first_call(self.model, *args, **kwargs)
        return super().__call__(*args, **kwargs)

    def _call_part(self, part: Any, *args: Any, **kwargs: Any) -> Any:
        if self.run.takes(part) and _in_autocast(self.model):
            return self.run.first_call(part, *args, **kwargs)
        return super()._call_part(part, *args, **kwargs)


def _name(model: Any) -> str:
    """Return the class of a module, compiled or not, or the name of a function."""
    module = getattr(model, "_orig_mod", getattr(model, "__self__", model))
    return type(module).__name__ if isinstance(module, nn.Module) else getattr(model, "__qualname__", repr(model))


def _in_autocast(module: nn.Module) -> bool:
    first = next(module.parameters(), None)
    return first is not None and is_in_autocast(first.device.type)


def _scalers(made: list[GradScaler]) -> tuple[type[GradScaler], type[GradScaler]]:
    """Return what stands for ``torch.amp.GradScaler`` and ``torch.cuda.amp.GradScaler``; both add to ``made``."""

    class NotedScaler(GradScaler):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    class CudaScaler(NotedScaler):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__("cuda", *args, **kwargs)

    return NotedScaler, CudaScaler


def _module_being_made() -> nn.Module | None:
    """Return the module in whose ``__init__`` this thread is: it has not all its parts yet."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        made = frame.f_locals.get(code.co_varnames[0]) if code.co_name == "__init__" and code.co_varnames else None
        if isinstance(made, nn.Module):
            return made
        frame = frame.f_back
    return None


def _caller() -> str:
    """Return file and line of the innermost code that is neither torch's nor this package's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_inside(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_inside(file: str) -> bool:
    """True for torch's and this package's code, and the standard library's context managers and wrappers."""
    path = Path(file)
    return (
        any(path.is_relative_to(folder) for folder in (_OURS, _TORCH))
        or path.suffix != ".py"
        or path.name in ("contextlib.py", "functools.py")
    )
