"""The backend that ``torch.compile`` knows by name. torch imports this module when a program names it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from autocastfx.integrations.backend import CompileBackend
from autocastfx.integrations.skipped_code import watch


def compile_graph(
    module: fx.GraphModule, inputs: list[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Convert and compile a graph: the backend named ``"autocastfx"``.

    Raises:
        TypeError: an option is none of :class:`CompileBackend`'s arguments.
    """
    return CompileBackend(**(options or {}))(module, inputs)


watch(lambda backend: backend is compile_graph)
