"""Register the source of generated code for tracebacks, for as long as the code exists."""

from __future__ import annotations

import linecache
import types
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

from torch.fx import graph_module

from autocastfx.capture.patch import CAPTURING, patched_here, tracing_here

__all__ = ["capturing", "keep_source"]


def keep_source(function: types.FunctionType, source: str) -> None:
    """Show ``source`` in tracebacks for the code of ``function``, for as long as that exists."""
    code = function.__code__
    linecache.cache[code.co_filename] = (len(source), None, source.splitlines(keepends=True), code.co_filename)
    weakref.finalize(code, linecache.cache.pop, code.co_filename, None).atexit = False


@contextmanager
def capturing() -> Generator[None, None, None]:
    """While open, no other thread captures or is traced, and sources of new graph modules live as long as their code.

    torch itself never frees these sources.
    """
    module: Any = graph_module
    run = module._exec_with_source

    def run_and_forget(source: str, namespace: dict[str, Any], *rest: Any) -> None:
        before = dict(namespace)
        run(source, namespace, *rest)
        made = [held for name, held in namespace.items() if held is not before.get(name)]
        for function in (held for held in made if isinstance(held, types.FunctionType)):
            weakref.finalize(function.__code__, _forget, function.__code__.co_filename).atexit = False

    with CAPTURING, tracing_here(), patched_here(graph_module, "_exec_with_source", run_and_forget):
        yield


def _forget(filename: str) -> None:
    linecache.cache.pop(filename, None)
    cast("Any", graph_module)._loader.eval_cache.pop(filename, None)
