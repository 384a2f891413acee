"""Record the Python attributes that a forward reads or changes, because a graph bakes in their values."""

from __future__ import annotations

import dis
import pickle
import random
import sys
import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any

from torch import nn

from autocastfx.capture.leave_intact import same_content
from autocastfx.capture.module_hooks import derived_by_hooks
from autocastfx.capture.patch import patched_here
from autocastfx.capture.plain_value import is_plain, is_same, plain_parts
from autocastfx.errors import CaptureError, shown

__all__ = ["PythonState", "Read", "StateGuard", "watched_state"]

_BARE = nn.Module()
# Attributes that every module has: tables, hooks, and the mode, which is part of a variant's key. An RNN's lists of its
# parameters are rebuilt whenever one is swapped, as export does.
_OF_MODULES = frozenset({*_BARE.__dict__, *dir(nn.Module), "_flat_weights", "_flat_weight_refs"})
_MISSING = object()
_EMPTY: dict[Any, Any] = {}


@dataclass(frozen=True)
class Read:
    """An attribute of a module, with the value that a forward read.

    Attributes:
        module: path of the module; empty for the model.
        name: the attribute's name.
        value: a plain value.
        part: if the attribute is an object, the name of that object's attribute; empty for a container's items.
    """

    module: str
    name: str
    value: Any
    part: str | None = None

    @property
    def path(self) -> str:
        """The attribute's path from the model."""
        return ".".join(filter(None, (self.module, self.name, self.part)))

    @property
    def word(self) -> str:
        """The value in words, for messages."""
        return "gone" if self.value is _MISSING else shown(self.value)


@dataclass(frozen=True)
class StateGuard:
    """The attributes that a graph depends on. Pickles."""

    reads: tuple[Read, ...] = ()

    def broken(self, model: nn.Module) -> Callable[[], Read | None]:
        """Return a function that finds the first attribute of ``model`` with another value now; None if none."""
        modules = dict(model.named_modules(remove_duplicate=False))
        fields: dict[tuple[str, str], list[Read]] = {}
        for read in (r for r in self.reads if r.part):
            fields.setdefault((read.module, read.name), []).append(read)
        plain = [(weakref.ref(modules[r.module]), r.name, r.value, r) for r in self.reads if not r.part]
        objects = [(weakref.ref(modules[path]), name, reads) for (path, name), reads in fields.items()]

        def first_broken() -> Read | None:
            for module_of, name, value, read in plain:
                module = module_of()
                if module is None:  # an original may be dropped
                    return None
                now = module.__dict__.get(name, _MISSING)
                if now is not value:
                    now = getattr(type(module), name, _MISSING) if now is _MISSING else now
                    now = now if read.part is None else plain_parts(now).get("", _MISSING)
                    if not is_same(now, value):
                        return replace(read, value=now)
            for module_of, name, reads in objects:
                table = _table(getattr(module_of(), "__dict__", _EMPTY).get(name))
                for read in reads:
                    now = table.get(read.part, _MISSING)
                    if now is not read.value:
                        now = now if is_plain(now) else plain_parts(now).get("", _MISSING)
                        if not is_same(now, read.value):
                            return replace(read, value=now)
            return None

        return first_broken

    def unchanged(self) -> Read | None:
        """Return None: used when there is no original to compare with."""
        return None


@dataclass(eq=False)
class PythonState:
    """The attributes that a model's forward read and changed.

    Attributes:
        model: the model.
        reads: the attributes read, by module and name.
        lines: by module and name, the line that first read it for more than an update such as ``self.count += 1``.
        changes: attributes that have another value afterwards.
    """

    model: nn.Module
    reads: dict[tuple[str, str], Read] = field(default_factory=dict[tuple[str, str], Read])
    lines: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])
    changes: tuple[str, ...] = ()

    def guard(self, *, everything: bool = False) -> StateGuard:
        """Return the attributes that the graph depends on: those read, or with ``everything`` all plain ones."""
        reads = dict(self.reads)
        for path, module in self.model.named_modules() if everything else ():
            held = {name: value for name, value in module.__dict__.items() if name not in _OF_MODULES}
            reads.update({(path, n): Read(path, n, v) for n, v in held.items() if is_plain(v)})
        return StateGuard(tuple(reads.values()))


@contextmanager
def watched_state(found: PythonState) -> Generator[None, None, None]:
    """While open, record reads of plain attributes of the model and its modules in ``found``; at the end, changes.

    Raises:
        CaptureError: forward computes with a number that it changes, or draws random numbers of Python or numpy: a
            graph would repeat the value of this call for ever.
    """
    model = found.model
    before = {id(m): (path, m, dict(m.__dict__)) for path, m in model.named_modules()}
    contents = {path: _contents(m) for path, m, _ in before.values()}
    objects: dict[int, tuple[str, str, Any, dict[str, Any]]] = {}
    draws = _draws()

    def note(module: nn.Module, name: str) -> Any:
        value = object.__getattribute__(module, name)
        if name in _OF_MODULES or id(module) not in before:
            return value
        path, _, table = before[id(module)]
        key = path, name
        if id(value) not in objects and value is table.get(name) and (parts := plain_parts(value)):
            objects[id(value)] = path, name, value, parts
        if is_plain(value) and value is (table[name] if name in table else _of_class(type(module), name)):
            found.reads.setdefault(key, Read(path, name, value))
        if key in found.reads and key not in found.lines:  # a read after a change depends on the first value
            frame = sys._getframe(1)
            if not _is_update(frame.f_code, frame.f_lasti, name):
                found.lines[key] = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        return value

    with patched_here(nn.Module, "__getattribute__", note):
        yield
    changed = [
        (path, name)
        for path, m, table in before.values()
        for name in _changed(table, m.__dict__)
        if name not in derived_by_hooks(m)
    ]
    for path, name in changed:
        read = found.reads.get((path, name))
        if read is not None and isinstance(read.value, (int, float)) and (path, name) in found.lines:
            raise CaptureError(
                f"forward changes {read.path!r} (here from {shown(read.value)}) and computes with it, at "
                f"{found.lines[path, name]}: a graph would use this value in every call. Keep it in a buffer, which a "
                "graph updates, or change it outside of forward."
            )
        if (path, name) not in found.lines:  # only a counter: the graph does not depend on it
            found.reads.pop((path, name), None)
    for path, name, held, parts in objects.values():
        now = plain_parts(held)
        # A None that forward fills in counts as kept: any such call fills it in (transformers' config.problem_type).
        kept = [p for p, v in parts.items() if v is None or is_same(now.get(p, _MISSING), v)]
        found.reads.update({(path, f"{name}.{p}"): Read(path, name, parts[p], p) for p in kept})
        changed += [(path, f"{name}.{part}") for part in {**parts, **now} if part and part not in kept]
    for source, now in _draws().items():
        if now != draws[source]:
            raise CaptureError(
                f"{type(model).__name__} draws random numbers of {source} in forward: a graph would use the same ones "
                "in every call. Draw them with torch (torch.rand), or outside of forward, and pass them in."
            )
    for path, m, _ in before.values():
        now = _contents(m)
        other = [n for n, c in contents[path].items() if n in now and not same_content(now[n], c)]
        changed += [(path, name) for name in other if (path, name) not in changed]
    found.changes = tuple(f"{path}.{name}" if path else name for path, name in changed)


def _draws() -> dict[str, Any]:
    numpy: Any = sys.modules.get("numpy")
    states: dict[str, Any] = {"Python's random module": random.getstate()}
    return {**states, "numpy.random": pickle.dumps(numpy.random.get_state(legacy=False))} if numpy else states


def _table(held: Any) -> dict[Any, Any]:
    """Return an object's ``__dict__`` without calling its class's ``__getattribute__``."""
    try:
        found: dict[Any, Any] = object.__getattribute__(held, "__dict__")
    except AttributeError:
        return _EMPTY
    return found


def _of_class(kind: type, name: str) -> Any:
    return next((vars(c)[name] for c in kind.__mro__ if name in vars(c)), _MISSING)


def _contents(module: nn.Module) -> dict[str, Any]:
    """Copy the attributes that are containers."""
    held = {n: v for n, v in module.__dict__.items() if n not in _OF_MODULES}
    return {n: type(v)(v) for n, v in held.items() if type(v) in (list, dict, set)}


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    names = [name for name in {**before, **after} if name not in _OF_MODULES]
    return [n for n in names if not is_same(before.get(n, _MISSING), after.get(n, _MISSING))]


# Instructions that only compute: between load and store they pass the value to no other code.
_COMPUTES = ("LOAD_", "BINARY_", "INPLACE_", "UNARY_", "SWAP", "ROT_", "CACHE", "EXTENDED_", "NOP")


def _is_update(code: CodeType, at: int, name: str) -> bool:
    """True if the read at instruction ``at`` only serves to update the attribute itself (``self.count += 1``)."""
    following = (i for i in dis.get_instructions(code) if i.offset >= at)
    first = next(following, None)
    if first is None or not first.opname.startswith("LOAD_") or first.argval != name:
        return False
    for instruction in following:
        if instruction.opname == "STORE_ATTR":
            return instruction.argval == name
        if not instruction.opname.startswith(_COMPUTES):
            return False
    return False
