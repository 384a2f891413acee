"""Record the Python attributes that a forward reads or changes, because a graph bakes in their values."""

from __future__ import annotations

import dis
import math
import pickle
import random
import sys
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import getmro
from types import CodeType
from typing import Any, cast

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.modules import module as of_all_modules

from autocastfx.capture.failure import AgainError
from autocastfx.capture.leave_intact import patched_here, same_content, tensor_places
from autocastfx.errors import CaptureError, shown
from autocastfx.graph.alias import reachable
from autocastfx.graph.names import op_name
from autocastfx.graph.node import draws_random_numbers, example

# Plain values: None, truth values, numbers, text, dtypes and devices, and tuples of them.

_LEAVES = frozenset({type(None), bool, int, float, complex, str, torch.dtype, torch.device})
# Objects whose attributes are not settings of a model: guards do not look into them.
_OTHERS = (nn.Module, torch.Tensor, torch.Generator, type)


def is_plain(value: Any) -> bool:
    """True for a plain value, and for a tuple of plain values."""
    return type(value) in _LEAVES or (type(value) is tuple and all(map(is_plain, value)))


def is_same(a: Any, b: Any) -> bool:
    """True if two plain values are interchangeable: 0.0 is not -0.0, True is not 1, and NaN equals NaN."""
    if type(a) is tuple and type(b) is tuple:  # first, for Dynamo (torch 2.11) does not compare two by ``is``
        return len(a) == len(b) and all(map(is_same, a, b))
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, complex):
        return repr(a) == repr(b)
    if isinstance(a, float):  # Dynamo may know no text of one
        return (a == b and math.copysign(1.0, a) == math.copysign(1.0, b)) or (a != a and b != b)
    return type(a) in _LEAVES and a == b


def plain_parts(instance: Any) -> dict[str, Any]:
    """Return an object's plain attributes by name, such as a configuration's fields.

    A list, set or dictionary counts as the tuple of its items, if all are plain; if ``instance`` itself is one, its
    name is ``""``.
    """
    whole = _as_tuple(instance)
    if whole is not None:
        return {"": whole}
    if isinstance(instance, _OTHERS) or callable(instance) or not hasattr(instance, "__dict__"):
        return {}
    parts = ((n, v if is_plain(v) else _as_tuple(v)) for n, v in cast("dict[str, Any]", vars(instance)).items())
    return {name: value for name, value in parts if value is not None or vars(instance)[name] is None}


def _as_tuple(instance: Any) -> tuple[Any, ...] | None:
    kind = type(instance)  # Dynamo follows these calls, and none that a table holds
    if kind is list:
        members = tuple(instance)
    elif kind is dict:
        members = tuple(instance.items())
    elif kind is set or kind is frozenset:
        members = tuple(sorted(instance, key=repr))
    else:
        return None
    return members if is_plain(members) else None


# The hooks of a model's modules: a graph holds what they do to tensors in forward, and does not call them.

_FORWARD = ("_forward_pre_hooks", "_forward_hooks")
_BACKWARD = ("_backward_pre_hooks", "_backward_hooks")
_EVERY = "every module of the process"  # as torch.nn.modules.module.register_module_forward_hook registers them
# Hooks of these places do nothing that a graph lacks: checks of an exported program, and the outputs of layers that a
# model of transformers is asked for. What fully_shard puts on a submodule is refused where it matters.
_NOTHING_LACKS = ("torch.export.", "torch._export.", "transformers.utils.output_capturing", "torch.distributed.")
# These make a weight from others, which a graph does as well, if they are there when it is captured.
_WEIGHTS = ("torch.nn.utils.", "torch.nn.modules.lazy")


def has_hooks(module: nn.Module) -> bool:
    """True if ``module`` has hooks on its call or on its backward pass."""
    own = module.__dict__
    return any(map(own.get, (*_FORWARD, *_BACKWARD)))


def later_hooks(module: nn.Module, number: int) -> bool:
    """True if ``module`` has hooks of this number and more, which torch counts up, and a graph lacks what they do."""
    return any(at >= number for at, _ in _hooks(vars(module), (*_FORWARD, *_BACKWARD), _NOTHING_LACKS))


def process_hooks(number: int = 0, tables: Iterable[str] = (*_FORWARD, *_BACKWARD)) -> list[str]:
    """Name all modules, if hooks of this number and more have been registered for them all."""
    hooks = _hooks(vars(of_all_modules), [f"_global{table}" for table in tables], _NOTHING_LACKS)
    return [_EVERY] if any(at >= number for at, _ in hooks) else []


def unfollowed(module: nn.Module) -> bool:
    """True if ``module`` has forward hooks that may do more than to compute with tensors."""
    return any(_hooks(vars(module), _FORWARD, (*_NOTHING_LACKS, *_WEIGHTS)))


def unfollowed_names(model: nn.Module) -> list[str]:
    """Name the modules with forward hooks that may do more than to compute with tensors."""
    return [*names_of(model, unfollowed), *process_hooks(tables=_FORWARD)]


def derived_by_hooks(module: nn.Module) -> set[str]:
    """Return the attributes of ``module`` that a hook of torch's makes anew in each call, as a weight norm's weight."""
    hooks = [hook for hook in module._forward_pre_hooks.values() if _is_of(hook, _WEIGHTS)]
    names = (getattr(hook, name, None) for hook in hooks for name in ("name", "_tensor_name"))
    return {name for name in names if isinstance(name, str)}


def names_of(model: nn.Module, holds: Callable[[nn.Module], bool]) -> list[str]:
    """Return the names of the modules in ``model`` for which ``holds`` is true, for messages."""
    return [repr(name) if name else "the model" for name, module in model.named_modules() if holds(module)]


def refuse_backward_hooks(model: nn.Module) -> None:
    """Refuse modules with backward hooks, which would not run.

    Raises:
        CaptureError: a module has one.
    """
    names = names_of(model, lambda module: any(_hooks(vars(module), _BACKWARD, _NOTHING_LACKS)))
    if names := [*names, *process_hooks(tables=_BACKWARD)]:
        raise CaptureError(
            f"backward hooks on {', '.join(names)} would not run: a graph calls no modules, and gradients would be "
            "those without hooks. Register them on the converted model itself, or convert in place, with "
            "autocastfx.enable, which keeps all hooks."
        )


def _hooks(owner: Mapping[str, Any], tables: Iterable[str], left_out: tuple[str, ...]) -> Iterator[tuple[int, Any]]:
    for table in tables:
        for number, hook in (owner.get(table) or {}).items():
            if not _is_of(hook, left_out):
                yield number, hook


def _is_of(hook: Any, places: tuple[str, ...]) -> bool:
    """True if a hook is a function of one of these modules, or an instance of a class of one."""
    called: Any = hook.func if isinstance(hook, partial) else hook
    homes = (getattr(called, "__module__", None), *(kind.__module__ for kind in getmro(type(called))))
    return any(str(home).startswith(places) for home in homes)


class Live:
    """An attribute of a class of modules whose value ``read`` gives, each time that it is asked for."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self.read = read

    def __get__(self, instance: object, owner: type) -> Any:
        return self.read()


_BARE = nn.Module()
# Attributes that every module has: tables, hooks, and the mode, which is part of a variant's key. An RNN's lists of its
# parameters are rebuilt whenever one is swapped, as export does.
_OF_MODULES = frozenset({*_BARE.__dict__, *dir(nn.Module), "_flat_weights", "_flat_weight_refs"})


class _Missing:
    """Stands for an attribute that is not there. A class: of a bare object, torch 2.11's Dynamo knows no identity."""


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
        return "gone" if self.value is _Missing else shown(self.value)


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
                now = module.__dict__.get(name, _Missing)
                if now is not value:
                    now = getattr(type(module), name, _Missing) if now is _Missing else now
                    now = now if read.part is None else plain_parts(now).get("", _Missing)
                    if not is_same(now, value):
                        return replace(read, value=now)
            for module_of, name, reads in objects:
                table = _table(getattr(module_of(), "__dict__", _EMPTY).get(name))
                for read in reads:
                    now = table.get(read.part, _Missing)
                    if now is not read.value:
                        now = now if is_plain(now) else plain_parts(now).get("", _Missing)
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
            attributes = {name: value for name, value in module.__dict__.items() if name not in _OF_MODULES}
            reads.update({(path, n): Read(path, n, v) for n, v in attributes.items() if is_plain(v)})
        return StateGuard(tuple(reads.values()))


@contextmanager
def watched_state(state: PythonState) -> Generator[None, None, None]:
    """While open, record reads of plain attributes of the model and its modules in ``state``; at the end, changes.

    Raises:
        CaptureError: forward computes with a number that it changes, or draws random numbers of Python or numpy: a
            graph would repeat the value of this call for ever.
    """
    model = state.model
    before = {id(m): (path, m, dict(m.__dict__)) for path, m in model.named_modules()}
    contents = {path: _contents(m) for path, m, _ in before.values()}
    objects: dict[int, tuple[str, str, Any, dict[str, Any]]] = {}
    draws = _draws(model)

    def note(module: nn.Module, name: str) -> Any:
        value = object.__getattribute__(module, name)
        if name in _OF_MODULES or id(module) not in before:
            return value
        path, _, table = before[id(module)]
        key = path, name
        if id(value) not in objects and value is table.get(name) and (parts := plain_parts(value)):
            objects[id(value)] = path, name, value, parts
        if is_plain(value) and value is (table[name] if name in table else _of_class(type(module), name)):
            state.reads.setdefault(key, Read(path, name, value))
        if key in state.reads and key not in state.lines:  # a read after a change depends on the first value
            frame = sys._getframe(1)
            if not _is_update(frame.f_code, frame.f_lasti, name):
                state.lines[key] = f"{frame.f_code.co_filename}:{frame.f_lineno}"
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
        read = state.reads.get((path, name))
        if read is not None and isinstance(read.value, (int, float)) and (path, name) in state.lines:
            raise CaptureError(
                f"forward changes {read.path!r} (here from {shown(read.value)}) and computes with it, at "
                f"{state.lines[path, name]}: a graph would use this value in every call. Keep it in a buffer, which a "
                "graph updates, or change it outside of forward."
            )
        if (path, name) not in state.lines:  # only a counter: the graph does not depend on it
            state.reads.pop((path, name), None)
    for path, name, instance, parts in objects.values():
        now = plain_parts(instance)
        # A None that forward fills in counts as kept: any such call fills it in (transformers' config.problem_type).
        kept = [p for p, v in parts.items() if v is None or is_same(now.get(p, _Missing), v)]
        state.reads.update({(path, f"{name}.{p}"): Read(path, name, parts[p], p) for p in kept})
        changed += [(path, f"{name}.{part}") for part in {**parts, **now} if part and part not in kept]
    for source, now in _draws(model).items():
        if now != draws.get(source, now):
            _restore(model, source, draws[source])
            raise CaptureError(
                f"{type(model).__name__} draws random numbers of {source} in forward: a graph would use the same ones "
                "in every call. Draw them with torch (torch.rand), or outside of forward, and pass them in."
            )
    for path, m, _ in before.values():
        now = _contents(m)
        other = [n for n, c in contents[path].items() if n in now and not same_content(now[n], c)]
        changed += [(path, name) for name in other if (path, name) not in changed]
    state.changes = tuple(f"{path}.{name}" if path else name for path, name in changed)


def _draws(model: nn.Module) -> dict[str, Any]:
    """The states of the generators of Python and numpy: those of the process, and those that modules keep."""
    numpy: Any = sys.modules.get("numpy")
    states: dict[str, Any] = {"Python's random module": random.getstate()}
    if numpy:
        states["numpy.random"] = pickle.dumps(numpy.random.get_state(legacy=False))
    return {**states, **{f"its own {path!r}": _state(one) for path, one in private_generators(model).items()}}


def private_generators(model: nn.Module) -> dict[str, Any]:
    """The generators of Python and numpy that modules keep as attributes, by path; not those without a state."""
    numpy: Any = sys.modules.get("numpy")
    kinds = (random.Random, *((numpy.random.Generator, numpy.random.RandomState) if numpy else ()))
    return {
        f"{path}.{name}" if path else name: value
        for path, module in model.named_modules()
        for name, value in _table(module).items()
        if isinstance(value, kinds) and not isinstance(value, random.SystemRandom)
    }


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    state = generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state(legacy=False)
    return pickle.dumps(state)


def _restore(model: nn.Module, source: str, state: Any) -> None:
    """Give a generator that a module keeps the state from before a capture that is refused."""
    for path, generator in private_generators(model).items():
        if source != f"its own {path!r}":
            continue
        if isinstance(generator, random.Random):
            generator.setstate(state)
        elif hasattr(generator, "bit_generator"):
            generator.bit_generator.state = pickle.loads(state)
        else:
            generator.set_state(pickle.loads(state))


def _table(instance: Any) -> dict[Any, Any]:
    """Return an object's ``__dict__`` without calling its class's ``__getattribute__``."""
    if torch.compiler.is_compiling():  # Dynamo follows no call of object's, and reads a class's own where it has one
        return getattr(instance, "__dict__", _EMPTY)
    try:
        table: dict[Any, Any] = object.__getattribute__(instance, "__dict__")
    except AttributeError:
        return _EMPTY
    return table


def _of_class(kind: type, name: str) -> Any:
    value = next((vars(c)[name] for c in kind.__mro__ if name in vars(c)), _Missing)
    return value.read() if isinstance(value, Live) else value


def _contents(module: nn.Module) -> dict[str, Any]:
    """Copy the attributes that are containers."""
    attributes = {n: v for n, v in module.__dict__.items() if n not in _OF_MODULES}
    return {n: type(v)(v) for n, v in attributes.items() if type(v) in (list, dict, set)}


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    names = [name for name in {**before, **after} if name not in _OF_MODULES]
    return [n for n in names if not is_same(before.get(n, _Missing), after.get(n, _Missing))]


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


# Capture assignments to buffers in forward (``self.average = …``) as writes into the old tensor.


@contextmanager
def buffers_written_back(model: nn.Module, known: set[str]) -> Generator[None, None, None]:
    """Run the code of ``model`` in the block; at the end, write reassigned buffers' new values into the old tensors.

    During the block the code reads a copy of such a buffer, because values read before the assignment, or saved for
    backward, must not change. The reassigned buffers are known only at the end: then the attempt is made again.

    Args:
        model: the model, as torch.export runs it.
        known: names of the buffers found so far; new ones are added.

    Raises:
        AgainError: new buffers were found.
        CaptureError: forward reassigns a parameter; or changes a buffer's sizes or dtype, removes it, or creates one
            from data. A buffer created from sizes alone is allowed: the graph computes it in each call.
    """
    before = {path: (table, name, table[name]) for path, table, name in tensor_places(model)}
    for path in known:
        table, name, tensor = before[path]
        table[name] = tensor.clone()
    yield
    after = {path: table[name] for path, table, name in tensor_places(model)}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    reassigned: set[str] = set()
    for path in {**before, **after}:
        old, new = before[path][2] if path in before else None, after.get(path)
        if old is new:
            continue
        if isinstance(old, nn.Parameter) or path in parameters:
            raise CaptureError(
                f"forward assigns the parameter {path!r} anew, which a graph cannot hold. Write into it, with "
                "torch.no_grad(): parameter.copy_(new)."
            )
        if old is None or new is None or _kind(old) != _kind(new):
            if new is not None and _is_table(new):
                continue
            raise CaptureError(
                f"forward replaces the buffer {path!r}: {said(old)} becomes {said(new)}, but a graph holds "
                "buffers of fixed sizes and dtypes. Register it in its final size and write a part of it in each call, "
                "or pass it in as an argument and return it."
            )
        if sum(old is other for _, _, other in before.values()) > 1:
            raise CaptureError(
                f"forward assigns the buffer {path!r} anew, which is registered under several names: write into it "
                "(buffer.copy_(new)), or register it once."
            )
        reassigned.add(path)
    if not reassigned <= known:
        known |= reassigned
        raise AgainError
    for path in known:
        before[path][2].copy_(after[path].detach())


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def said(tensor: torch.Tensor | None) -> str:
    """Write the dtype and the sizes that a tensor has for the example inputs, for messages."""
    if tensor is None:
        return "none"
    sizes = [example(size) for size in tensor.shape]
    return f"{str(tensor.dtype).removeprefix('torch.')} {sizes}"


def _is_table(tensor: torch.Tensor) -> bool:
    """True if a tensor depends on no input, parameter, buffer or random number, except by sizes."""
    mode = get_proxy_mode()
    proxy: Any = tensor if mode is None else mode.tracer.unwrap_proxy(tensor)
    if not isinstance(proxy, fx.Proxy):
        return False
    made_of = reachable([proxy.node], lambda n: () if op_name(n).startswith("sym_") else n.all_input_nodes)
    return not any(n.op == "placeholder" or draws_random_numbers(n) for n in made_of)
