"""Find the code that Dynamo has skipped, which no backend sees, and run it under torch.autocast."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import MethodType
from typing import Any, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

__all__ = ["SkippedCode", "modules_of", "now", "run_in_autocast", "skipped_since", "tried", "whole"]

_RESUMED = "torch_dynamo_resume_in_"  # the rest of a function after a graph break


@dataclass(frozen=True)
class SkippedCode:
    """A function, or the rest of one after a graph break, that Dynamo could not capture.

    Attributes:
        name, file, line: the function, and where it or the rest begins.
        reason: Dynamo's own, its first line.
    """

    name: str
    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.name} at {self.file}:{self.line} ({self.reason})"


def tried() -> int:
    """Return how many functions Dynamo has tried to capture in this process."""
    from torch._dynamo.utils import counters

    return counters["frames"]["total"]


def now() -> int:
    """Return the time as Dynamo's records have it, in microseconds."""
    return time.time_ns() // 1000


def whole(model: nn.Module) -> SkippedCode:
    """Return all the code of ``model``, for where Dynamo has captured none of it."""
    code = getattr(type(model).forward, "__code__", None)
    file, line = (code.co_filename, code.co_firstlineno) if code is not None else ("", 0)
    return SkippedCode("forward", file, line, "there is nothing that it captures")


def skipped_since(moment: int) -> list[SkippedCode]:
    """Return what Dynamo has skipped since ``moment``, a result of :func:`now`."""
    from torch._dynamo.utils import get_compilation_metrics

    return [
        SkippedCode(
            str(one.co_name).removeprefix(_RESUMED).partition("_at_")[0],
            str(one.co_filename),
            int(one.co_firstlineno or 0),
            str(one.fail_reason).partition("\n")[0],
        )
        for one in get_compilation_metrics()
        if one.fail_type is not None and (one.start_time_us or 0) >= moment
    ]


def modules_of(model: nn.Module, skipped: SkippedCode) -> list[nn.Module]:
    """Return the modules of ``model`` whose ``forward`` is the skipped code or holds it."""
    return [module for module in model.modules() if _holds(cast("Any", type(module).forward), skipped)]


def _holds(forward: Any, skipped: SkippedCode) -> bool:
    code = getattr(forward, "__code__", None)
    if code is None or code.co_filename != skipped.file:
        return False
    lines = [line for _, _, line in code.co_lines() if line is not None]
    return code.co_firstlineno <= skipped.line <= max(lines)


def run_in_autocast(modules: Iterable[nn.Module], kind: str, low: torch.dtype) -> None:
    """Let the forward of each module, and of those in it, run under torch.autocast, uncaptured, from now on.

    It returns float32 where it returned 16 bits, so that it fits what is around it.
    """
    for module in modules:
        module.forward = _InAutocast(module, kind, low)


class _InAutocast:
    """The forward of a module in a region of torch.autocast, which Dynamo leaves alone. Pickles and copies."""

    def __init__(self, module: nn.Module, kind: str, low: torch.dtype) -> None:
        self.module, self.inner, self.kind, self.low = module, module.__dict__.get("forward"), kind, low
        self._prepare()

    def _prepare(self) -> None:
        self._uncaptured = torch.compiler.disable(self._run)
        self.__signature__ = inspect.signature(self.inner or MethodType(type(self.module).forward, self.module))

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.inner or MethodType(cast("Any", type(self.module).forward), self.module)
        with torch.autocast(self.kind, self.low):
            found = forward(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, self._in_float32, found)

    def _in_float32(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.dtype == self.low else tensor

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward."""
        return self._uncaptured(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        made = ("_uncaptured", "__signature__")
        return {name: held for name, held in self.__dict__.items() if name not in made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare()
