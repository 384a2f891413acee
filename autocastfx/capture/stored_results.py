"""Which results of a graph of Dynamo's are the next contents of the model's state: forward assigns them anew."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import wraps
from types import NoneType
from typing import Any, cast


class _Latest(threading.local):
    """Of the graph that a thread captures: where state is among its results, by their numbers."""

    places: Mapping[int, str] = {}


_LATEST = _Latest()


def stored_results() -> Mapping[int, str]:
    """Return the names of buffers, and of attributes that the graph reads, by the results that become their contents.

    A backend calls this for the graph that it is given.
    """
    return _LATEST.places


def storing_mends() -> list[tuple[Any, str, Any]]:
    """Return what takes the place of an attribute of Dynamo's, with the owner and the name."""
    from torch._dynamo.output_graph import OutputGraph

    before: Any = OutputGraph.compile_and_call_fx_graph

    @wraps(before)
    def compile_graph(self: Any, tx: Any, rv: Sequence[Any], root: Any) -> Any:
        _LATEST.places = _places(self, rv)
        return before(self, tx, rv, root)

    return [(OutputGraph, "compile_and_call_fx_graph", compile_graph)]


def _places(output: Any, results: Sequence[Any]) -> dict[int, str]:
    from torch._dynamo.source import TempLocalSource
    from torch._dynamo.variables import ConstDictVariable

    effects = output.side_effects
    read = {argument.source.name for argument in output.graphargs if argument.source is not None}
    stored: dict[int, str] = {}
    known: Sequence[Any] = list(effects.id_to_variable.values())
    for one in known:
        is_table = isinstance(one, ConstDictVariable) and not isinstance(one.source, (TempLocalSource, NoneType))
        source = cast("Any", one.source).name if is_table else ""
        if source.endswith("._buffers") and effects.is_modified(one):
            stored |= {id(value): key.vt.as_python_constant() for key, value in one.items.items()}
    for owner, table in effects.store_attr_mutations.items():
        if owner.source is not None and not isinstance(owner.source, TempLocalSource):  # what forward has made
            named = table.items()
            stored |= {id(value): name for name, value in named if f"{owner.source.name}.{name}" in read}
    return {i: stored[id(result)] for i, result in enumerate(results) if id(result) in stored}
