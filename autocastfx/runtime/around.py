"""Calls of a converted model inside of a mode, a trace, a transform or a compiler, which Dynamo does not look through.

Dynamo chooses the graph, and captures it, without them; they are there again while the converted graph runs.
"""

from __future__ import annotations

import itertools
import sys
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn, cast
from unittest import mock

import torch
from torch import _guards, nn
from torch._C._dynamo import eval_frame
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._guards import tracing
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx import _symbolic_trace
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.utils import _python_dispatch
from torch.utils import _pytree as pytree

from autocastfx.capture.leave_intact import CAPTURING, tensor_places, without_torchs
from autocastfx.errors import UnsupportedError

_C: Any = torch._C
_functorch: Any = _C._functorch
_tracer: Any = _symbolic_trace
_CONVERTS = ("default", "fail_on_recompile")  # the stances in which Dynamo runs nothing as it is


class Around:
    """What is around a call: left while Dynamo looks, and entered again while the converted graph runs.

    Attributes:
        compiler: Dynamo's callback of a compiler around the call, which then compiles the converted graph; or None.
        is_traced: torch.jit.trace records the call.
    """

    def __init__(self, model: nn.Module, compiler: Any) -> None:
        self.model, self.compiler = model, compiler
        self.is_traced = _C._get_tracing_state() is not None
        self._given: dict[int, torch.Tensor] = {}  # what stands in for a tensor, by id, and the tensor
        self._kept: dict[int, torch.Tensor] = {}
        self._left = ExitStack()

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call ``function`` without what is around; what it returns is that of the tensors given.

        Raises:
            UnsupportedError: torch.fx records the call without knowing sizes or dtypes.
        """
        is_unknown = isinstance(args, torch.fx.Proxy) or isinstance(kwargs, torch.fx.Proxy)
        if is_unknown or any(isinstance(one, torch.fx.Proxy) for one in pytree.tree_leaves((args, dict(kwargs)))):
            raise UnsupportedError(
                "torch.fx.symbolic_trace gives a converted model no tensors, by which it chooses a graph: trace "
                "amp_model.freeze(*inputs), which is one graph, or by make_fx."
            )
        kwargs = dict(kwargs)
        self._leave()
        try:
            given = replace_tensors(self._stand_in, (args, kwargs))
            return replace_tensors(self._of, function(*given))
        finally:
            self._left.close()
            replace_tensors(self._of, (args, kwargs))  # in lists and dicts, to which forward may have added others
            eval_frame.set_eval_frame(self.compiler)

    @contextmanager
    def entered(self) -> Generator[None]:
        """Be inside again."""
        self._left.close()
        try:
            yield
        finally:
            self._leave()

    def given(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the inputs of a graph, with the tensors that others stand in for."""
        return [self._of(one) for one in inputs]

    def places_stood_in(self, places: Sequence[str], inputs: Sequence[Any]) -> list[str]:
        """Return the names of those inputs that stand in for others."""
        return [name for name, one in zip(places, inputs, strict=True) if id(one) in self._given]

    def stands_for(self, tensor: torch.Tensor) -> bool:
        """True if another tensor stands in for this one, whose numbers cannot be read."""
        return id(tensor) in self._kept

    def run(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Run a function, compiled by the compiler that is around, if any."""
        if not callable(self.compiler):
            return function(*inputs)
        eval_frame.set_eval_frame(cast("Any", self.compiler))
        try:
            return function(*inputs)
        finally:
            eval_frame.set_eval_frame(None)

    def _leave(self) -> None:
        stack = ExitStack()
        for context in (*_left_states(), self._swapped()):
            stack.enter_context(context)
        self._left = stack

    @contextmanager
    def _swapped(self) -> Generator[None]:
        """While open, other tensors stand in for what the model holds, where Dynamo cannot look at that."""
        swapped: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        for _, table, name in tensor_places(self.model):
            if isinstance(table[name], torch.Tensor) and (other := self._stand_in(table[name])) is not table[name]:
                table[name] = other
                swapped.append((table, name, other))
        try:
            yield
        finally:
            for table, name, other in swapped:
                if table.get(name) is other:
                    table[name] = self._of(other)
            if self._given:
                for module in self.model.modules():  # which forward has kept
                    kept = {name: self._of(one) for name, one in vars(module).items() if id(one) in self._given}
                    module.__dict__.update(kept)

    def _of(self, tensor: Any) -> Any:
        return self._given.get(id(tensor), tensor)

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        if not _is_wrapped(tensor):
            return tensor
        if (known := self._kept.get(id(tensor))) is not None:
            return known
        shape, stride = ([_number(one) for one in sizes] for sizes in (tensor.shape, tensor.stride()))
        other = torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device)
        other.requires_grad_(tensor.requires_grad)
        if isinstance(tensor, nn.Parameter):
            other = nn.Parameter(other.detach(), tensor.requires_grad)
        for dim, size in enumerate(tensor.shape):
            if isinstance(size, torch.SymInt):
                torch._dynamo.maybe_mark_dynamic(other, dim)
        self._kept[id(tensor)], self._given[id(other)] = other, tensor
        return other


def is_inside() -> bool:
    """True if something is around this call that Dynamo does not look through."""
    return bool(
        _C._len_torch_dispatch_stack()
        or _functorch.peek_interpreter_stack() is not None
        or _C._get_tracing_state() is not None
        or _is_traced_here()
        or torch._dynamo.eval_frame._stance.stance != "default"
        or getattr(_guards._TLS, "tracing_context", None) is not None  # in a quarter of the time of try_get
        or _C._get_dispatch_mode(_C._TorchDispatchModeKey.PROXY) is not None
    )


def outside_of_modes(function: Callable[..., Any], *given: Any) -> Any:
    """Call a function without the modes of ``__torch_function__`` around it, whose code Dynamo has captured, too."""
    if not _C._len_torch_function_stack():
        return function(*given)
    with _C.DisableTorchFunction():
        return function(*given)


def _is_traced_here() -> bool:
    """True if torch's flags say that something is traced or compiled, unless a capture in another thread set them.

    They belong to the process: whoever restores another thread's after its end sets them for ever.
    """
    if not (_fx_traces() or torch.compiler._is_compiling_flag):
        return False
    is_mine = CAPTURING.acquire(blocking=False)
    if is_mine:
        CAPTURING.release()
    return is_mine and bool(_fx_traces() or torch.compiler._is_compiling_flag)


def _fx_traces() -> bool:
    own = getattr(_tracer, "_get_is_fx_tracing", None)  # of the thread, from torch 2.15 on
    return _tracer._is_fx_tracing_flag if own is None else own()


def replace_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """Return ``tree`` with other tensors: the same lists, dicts and deques, and what else holds no tensor replaced."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, (list, deque, dict)):
        container = cast("dict[Any, Any]", tree)
        for key, one in list(container.items() if isinstance(tree, dict) else enumerate(container)):
            if (other := replace_tensors(function, one)) is not one:
                container[key] = other
        return container
    parts, spec = pytree.tree_flatten(tree, is_leaf=lambda one: one is not tree)
    others = [part if part is tree else replace_tensors(function, part) for part in parts]
    is_same = all(one is other for one, other in zip(parts, others, strict=True))
    return tree if is_same else pytree.tree_unflatten(others, spec)


def _is_wrapped(tensor: torch.Tensor) -> bool:
    if isinstance(tensor, FakeTensor):
        return any(isinstance(size, torch.SymInt) for size in tensor.shape)
    is_functional = isinstance(tensor, FunctionalTensor) or cast("Any", torch)._is_functional_tensor(tensor)
    return is_functional or _functorch.is_functorch_wrapped_tensor(tensor)


def _number(size: Any) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


# ---- what is left, each as a context in which it is not there --------------------------------------------------------


def _left_states() -> Iterator[AbstractContextManager[Any]]:
    frames = torch._dynamo.eval_frame
    yield temporarily_clear_interpreter_stack()
    yield _without_function_modes()
    yield _python_dispatch._disable_current_modes()
    yield mock.patch.object(_python_dispatch, "_is_in_any_mode_without_ignore_compile_internals", False, create=True)
    yield without_torchs(_global_forward_pre_hooks)
    yield without_torchs(_global_forward_hooks)
    yield tracing(None)
    if _is_traced_here():
        own = getattr(_tracer, "_is_fx_tracing_context", None)
        yield mock.patch.object(_tracer, "_is_fx_tracing_flag", False) if own is None else own(False)
        yield mock.patch.object(torch.compiler, "_is_compiling_flag", False)
        yield mock.patch.object(torch.compiler, "_is_exporting_flag", False, create=True)
    if frames._stance.stance not in _CONVERTS:
        yield mock.patch.object(frames, "_stance", frames.DynamoStance())
    yield without_trace()
    yield _without_count()


@contextmanager
def without_trace() -> Generator[None]:
    """While open, torch.jit.trace records nothing, and sizes are numbers."""
    state = _C._get_tracing_state()
    _C._set_tracing_state(None)
    try:
        yield
    finally:
        _C._set_tracing_state(state)


@contextmanager
def _without_function_modes() -> Generator[None]:
    """Leave the modes of functions of a trace; Dynamo follows those of a user."""
    modes: list[Any] = []
    if _is_traced_here():
        from torch.overrides import _pop_mode

        modes = [_pop_mode() for _ in range(_C._len_torch_function_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            _C._push_on_torch_function_stack(mode)


@contextmanager
def _without_count() -> Generator[None]:
    """Count no frame of ours for a compiler around that asks whether it has compiled one."""
    switch = getattr(eval_frame, "set_fullgraph_compiled_frame_count", None)
    count = switch(-1) if switch is not None else -1
    try:
        yield
    finally:
        if switch is not None:
            switch(count)


def skip_frames(*functions: Callable[..., Any]) -> None:
    """Let Dynamo run these functions as they are, and look at what they call."""
    for function in functions:
        eval_frame.set_code_exec_strategy(
            cast("Any", function).__code__,
            eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT),
        )


def refuse_inlining() -> None:
    """Break the graph of a compiler around a converted model, which would go on with the model's own code."""
    torch._dynamo.graph_break(
        msg="a converted model is called, which is compiled by itself: with fullgraph=True, and in torch.export with "
        "strict=True, call amp_model.freeze(*inputs) instead"
    )


def refuse_scripting(_: nn.Module) -> NoReturn:
    """Refuse a converted model to torch.jit.script, which calls this as a method of each module.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        "torch.jit.script compiles Python code, which a converted model has none of: use "
        "torch.jit.trace(amp_model.freeze(*inputs), inputs) instead."
    )


# torch.export passes keyword arguments to a GraphModule by position, in the order in which they were given.
_EXPORT = str(Path(torch.__file__).parent / "export" / "_trace.py")


def keywords_of_export() -> list[str]:
    """Return the names of the last arguments, if torch.export runs the graph: it gives them in the caller's order."""
    for frame, _ in itertools.islice(traceback.walk_stack(sys._getframe(2)), 4):
        if frame.f_code.co_filename == _EXPORT and "kwargs" in frame.f_locals:
            return list(frame.f_locals["kwargs"])
    return []
