"""Keep what is executed in conversions and tools apart from the caller: torch's state of its thread, and its model."""

from __future__ import annotations

import dis
import functools
import inspect
import linecache
import random
import site
import sys
import sysconfig
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, cast
from unittest import mock

import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch.fx import _symbolic_trace, graph_module
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack

from autocastfx.graph.alias import storage_of
from autocastfx.graph.node import schema

# Keep what capture and conversion execute apart from the caller's thread state in torch.

_C: Any = torch._C
_autograd: Any = _C._autograd
_functorch: Any = _C._functorch


def is_in_autocast(kind: str) -> bool:
    """True in a region of torch.autocast for devices of this kind, of which some, such as "meta", have none."""
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


@contextmanager
def own_thread_state() -> Generator[None, None, None]:
    """Trace and run graphs unseen by the caller's hooks and modes; afterwards torch's thread state is as before.

    Activation checkpointing has hooks on saved tensors, and counts what is saved; others copy each tensor, which a
    traced one does not allow. ``FlopCounterMode`` counts ops, and has hooks on all modules. A graph may hold the halves
    of what Python pairs: it opens a level of ``torch.func``, forbids such hooks, or switches gradients, and closes or
    switches back in a later node, which an error, or a run of some nodes alone, never reaches.
    """
    hooks, forbidden = _take_hooks(), _autograd._saved_tensors_hooks_get_disabled_error_message()
    _autograd._saved_tensors_hooks_enable()
    depth: int = _functorch.get_dynamic_layer_stack_depth()
    restored = [(switch, read()) for read, switch in _SWITCHES]
    kinds = _C._autocast_supported_devices()
    autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    keys = _C._dispatch_tls_local_include_set(), _C._dispatch_tls_local_exclude_set()
    is_abstract = any(mode.is_infra_mode() for mode in _get_current_dispatch_mode_stack())
    try:
        modes = nullcontext() if is_abstract else _disable_current_modes()
        before, after = map(without_torchs, (_global_forward_pre_hooks, _global_forward_hooks))
        with _C._ForceDispatchKeyGuard(*keys), modes, before, after:  # an error inside a transform leaves its keys
            yield
    finally:
        while _functorch.get_dynamic_layer_stack_depth() > depth:  # torch 2.11's own loop fails below the first level
            _CLOSE[_functorch.peek_interpreter_stack().key().name]()
        for switch, value in restored:
            switch(value)
        for kind, is_on, dtype in autocast:
            torch.set_autocast_enabled(kind, is_on)
            torch.set_autocast_dtype(kind, dtype)
        _autograd._saved_tensors_hooks_enable()
        for pair in reversed(hooks):
            _autograd._push_saved_tensors_default_hooks(*pair)
        if forbidden is not None:
            _autograd._saved_tensors_hooks_disable(forbidden, False)


_SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (_C.is_grad_enabled, _C._set_grad_enabled),
    (_C._is_fwd_grad_enabled, _C._set_fwd_grad_enabled),
    (_C.is_autocast_cache_enabled, _C.set_autocast_cache_enabled),
    (_functorch.get_inplace_requires_grad_allowed, _functorch.set_inplace_requires_grad_allowed),
    (torch.get_default_dtype, torch.set_default_dtype),
)


_CLOSE: Mapping[str, Callable[[], object]] = {
    "Vmap": _functorch._vmap_decrement_nesting,
    "Grad": _functorch._grad_decrement_nesting,
    "Jvp": _functorch._jvp_decrement_nesting,
    "Functionalize": _functorch._func_decrement_nesting,
}


def _take_hooks() -> list[tuple[Any, Any]]:
    """Take the thread's hooks on saved tensors away, and return them, the innermost first."""
    hooks: list[tuple[Any, Any]] = []
    while (pair := _autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(pair)
        _autograd._pop_saved_tensors_default_hooks()
    return hooks


def without_torchs(hooks: Any) -> AbstractContextManager[Any]:
    """While open, a table of hooks on all modules holds none of torch's own."""
    others = {key: hook for key, hook in hooks.items() if not str(hook.__module__).startswith("torch.")}
    return mock.patch.dict(hooks, others, clear=True)


# Patch functions during a capture, for the capturing thread alone.

# Held during a capture. Re-entrant, because the model's own forward may call a converted model.
CAPTURING = threading.RLock()


def is_captured_here() -> bool:
    """True while this thread captures a model, or checks what it has captured."""
    return bool(cast("Any", CAPTURING)._is_owned())


@contextmanager
def patched_here(owner: Any, name: str, new: Any) -> Generator[None, None, None]:
    """While open, ``owner.name`` is ``new`` for the thread that opened it, and unchanged for others.

    Args:
        owner: a module or a class.
        name: the attribute's name.
        new: a function; in a class also a ``classmethod`` or ``staticmethod``.
    """
    old = inspect.getattr_static(owner, name)
    both = _InClass(old, new) if isinstance(owner, type) else _of_module(old, new)
    with mock.patch.object(owner, name, both):
        yield


@contextmanager
def tracing_here() -> Generator[None, None, None]:
    """While open, a trace of torch.fx records what the thread that opened it calls, and nothing that others call.

    torch.fx patches ``nn.Module.__call__`` for the whole process: a module called by another thread meanwhile would be
    taken for one of the traced model's, or refused.
    """
    patcher: Any = cast("Any", _symbolic_trace)._Patcher
    patch_method = patcher.patch_method

    def patch_here(self: Any, cls: type, name: str, new: Any, deduplicate: bool = True) -> None:
        patch_method(self, cls, name, _of_module(getattr(cls, name), new), deduplicate)

    with patched_here(patcher, "patch_method", patch_here):
        yield


class _InClass:
    """A member of a class: ``new`` for the thread that created it, ``old`` for others."""

    def __init__(self, old: Any, new: Any) -> None:
        self.old, self.new, self.thread = old, new, threading.get_ident()

    def __get__(self, instance: Any, owner: type) -> Any:
        return (self.new if threading.get_ident() == self.thread else self.old).__get__(instance, owner)


def _of_module(old: Any, new: Any) -> types.FunctionType:
    thread = threading.get_ident()

    def either(*args: Any, **kwargs: Any) -> Any:
        return (new if threading.get_ident() == thread else old)(*args, **kwargs)

    return either


def _compile_lock() -> threading.RLock:
    from torch._dynamo.convert_frame import compile_lock

    return compile_lock


class Shared:
    """A context that is open from when the first thread enters it until the last has left it.

    Threads that each patched the same function would restore each other's patch. It opens and closes while no thread
    compiles: Dynamo asserts that what it has read is the same when it is done.
    """

    def __init__(self, opened: Callable[[], AbstractContextManager[object]]) -> None:
        self._opened, self._lock, self._inside, self._stack = opened, threading.Lock(), 0, ExitStack()

    def __enter__(self) -> None:
        with _compile_lock(), self._lock:
            if not self._inside:
                self._stack.enter_context(self._opened())
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with _compile_lock(), self._lock:
            self._inside -= 1
            if not self._inside:
                self._stack.close()


# Register the source of generated code for tracebacks, for as long as the code exists.


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
        made = [value for name, value in namespace.items() if value is not before.get(name)]
        for function in (value for value in made if isinstance(value, types.FunctionType)):
            weakref.finalize(function.__code__, _forget, function.__code__.co_filename).atexit = False

    # Dynamo's lock comes first, as where Dynamo calls a backend that captures.
    with _compile_lock(), CAPTURING, tracing_here(), patched_here(graph_module, "_exec_with_source", run_and_forget):
        yield


def _forget(filename: str) -> None:
    linecache.cache.pop(filename, None)
    cast("Any", graph_module)._loader.eval_cache.pop(filename, None)


# What a forward can change in place, and where: saved before it runs, and restored.

CONTAINERS = (list, OrderedDict, dict, set, deque)
_BOUND = (types.MethodType, functools.partial)
_CALLS = (types.FunctionType, *_BOUND)
_OWNERS = (type, types.ModuleType)  # of attributes, which code reaches by a global name
_MISSING = object()
_TORCHS = ("torch", "autocastfx")
_LIBRARIES = (site.getusersitepackages(), *map(sysconfig.get_path, ("stdlib", "platlib", "purelib")))


@contextmanager
def intact(model: nn.Module, *, keeps_added: bool = False) -> Generator[None, None, None]:
    """While open, ``forward`` may set attributes; afterwards they are as before, containers and objects by content.

    So are the states of the random number generators of torch, Python and numpy. With ``keeps_added`` attributes, and
    entries of dictionaries, stay that were not there before.
    """
    saved = _saved_contents(model)
    numpy: Any = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        with random_numbers_kept():
            yield
    finally:
        for owner, content in saved:
            restore(owner, content, keeps_added=keeps_added)
        random.setstate(python_state)
        if numpy:
            numpy.random.set_state(numpy_state)


def tensor_places(model: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the path of each parameter and buffer, and where it is: its module's table, and its name there."""
    for prefix, module in model.named_modules():
        for table in (cast("dict[str, Any]", module._parameters), cast("dict[str, Any]", module._buffers)):
            yield from ((f"{prefix}.{name}" if prefix else name, table, name) for name in list(table))


@contextmanager
def random_numbers_kept() -> Generator[None]:
    """While open, torch's random numbers are free to be drawn; afterwards their states are as before."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)


def random_state() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the state of torch's random numbers on all devices in use.

    Those of an accelerator only once something has used it: a process that has cannot fork, as data loaders do.
    """
    accelerator: Any = _accelerator()
    count = accelerator.device_count() if accelerator else 0
    return torch.get_rng_state(), [accelerator.get_rng_state(number) for number in range(count)]


def set_random_state(state: tuple[torch.Tensor, list[torch.Tensor]]) -> None:
    """Restore a state that :func:`random_state` returned."""
    torch.set_rng_state(state[0])
    for number, own in enumerate(state[1]):
        _accelerator().set_rng_state(own, number)


def _accelerator() -> Any:
    """The module of torch for the accelerator in use, if any."""
    module: Any = torch.get_device_module(torch.accelerator.current_accelerator() or "cuda")
    return module if getattr(module, "is_initialized", torch.accelerator.is_available)() else None


def _saved_contents(model: nn.Module) -> list[tuple[Any, Any]]:
    """Return the objects that a forward can change in place, each with a copy of its content.

    These are containers at any depth, the attributes of modules, of their classes and of the objects that modules hold,
    and tensors that are neither parameters nor buffers; generators of random numbers; and what ``forward``, the methods
    and functions that it calls, and hooks refer to, with the attributes of classes and of Python's modules that these
    name. Objects inside those objects, and installed libraries, are left out: a trainer, say, refers to everything.
    """
    # begin with the model, its hooks, its classes, and what its forward refers to
    registered = {id(t) for t in (*model.parameters(), *model.buffers())}
    classes = [one for one in _classes(model) if not one.__module__.startswith("torch.")]
    saved: dict[object, tuple[Any, Any]] = {id(one): (one, dict(vars(one))) for one in classes}
    own = (value for one in classes for value in vars(one).values() if not isinstance(value, _CALLS))
    tables = [one for module in model.modules() for name, one in vars(module).items() if name.endswith("_hooks")]
    kept = (one.values() if isinstance(one, Mapping) else one for one in tables if isinstance(one, Iterable))
    hooks = (hook for one in kept for hook in cast("Iterable[Any]", one))
    first = (model, *hooks, *own, *_run_by_forward(classes))
    # from there to members, at any depth in modules and containers, and one level into other objects
    queue: deque[tuple[Any, bool]] = deque((one, True) for one in first)
    while queue:
        item, of_module = queue.popleft()
        key: object = (id(item.owner), item.code) if isinstance(item, _Named) else id(item)
        if key in saved or key in registered or isinstance(item, _OWNERS):
            continue
        members: Any = ()
        if isinstance(item, torch.Tensor):
            if type(item) in (torch.Tensor, nn.Parameter) and not item.is_inference():
                saved[id(item)] = (item, (item._version, item.detach().clone()))
        elif isinstance(item, CONTAINERS):
            content = content_of(item)
            saved[id(item)] = (item, content)
            members = content.values() if isinstance(content, dict) else content
        elif isinstance(item, torch.Generator):
            saved[id(item)] = (item, item.get_state())
        elif isinstance(item, _Named):
            saved[key], members = (item, item.content()), item.members()
        elif isinstance(item, types.CellType):
            members = (item.cell_contents,)
            saved[id(item)] = (item, members)
        elif isinstance(item, tuple):
            members = item
        elif isinstance(item, _CALLS):
            if isinstance(item, types.FunctionType):
                saved[id(item)] = (item, _assigned_globals(item))
            members = [one for one in _referred_to(item) if not isinstance(one, nn.Module)]
        elif of_module and isinstance(getattr(item, "__dict__", None), dict):
            members, of_module = (item.__dict__,), isinstance(item, nn.Module)
        elif of_module and (slots := _slots(item)):
            saved[id(item)], members, of_module = (item, slots), slots.values(), False
        of_hook = isinstance(item, (*_CALLS, _Named, types.CellType))
        queue.extend((member, of_module) for member in members if of_hook or not isinstance(member, _BOUND))
    return list(saved.values())


def _classes(model: nn.Module) -> list[type]:
    return list(dict.fromkeys(base for module in model.modules() for base in type(module).__mro__[:-1]))


def _run_by_forward(classes: Sequence[type]) -> Iterator[types.FunctionType]:
    """Yield the methods named ``forward``, and those whose names these mention, at any depth."""
    names = {"forward": None}
    queue = deque(names)
    while queue:
        name = queue.popleft()
        for method in (vars(one)[name] for one in classes if name in vars(one)):
            function = inspect.unwrap(getattr(method, "__func__", method))
            if isinstance(function, types.FunctionType):
                yield function
                queue += [other for other in function.__code__.co_names if other not in names]
                names |= dict.fromkeys(function.__code__.co_names)


def _slots(item: Any) -> dict[str, Any]:
    """Return the values in ``__slots__`` of an object."""
    kinds = (vars(one) for one in type(item).__mro__ if "__slots__" in vars(one))
    names = (name for kind in kinds for name, one in kind.items() if isinstance(one, types.MemberDescriptorType))
    return {name: getattr(item, name) for name in names if hasattr(item, name)}


def _referred_to(call: Any) -> list[Any]:
    """Return where a function may keep what it counts."""
    if isinstance(call, types.MethodType):
        return [call.__self__, call.__func__]
    if isinstance(call, functools.partial):
        return [call.func, call.args, call.keywords]
    if str(call.__module__).startswith("torch."):
        return []
    cells = [cell for cell in call.__closure__ or () if cell != types.CellType()]  # an empty one is no content
    return [*cells, *_followed(call.__globals__, call.__code__)]


def _followed(named: Mapping[str, Any], code: types.CodeType) -> Iterator[Any]:
    """Yield the values that ``code`` may change, of those that it reaches by ``named``."""
    for value in (named[name] for name in _names(code).read if name in named):
        if isinstance(value, _OWNERS):
            if not is_installed(value):
                yield _Named(value, code)
        elif not isinstance(value, _CALLS) or (isinstance(value, types.FunctionType) and not is_installed(value)):
            yield value


@dataclass(frozen=True)
class _Named:
    """The attributes of a class, or of a module of Python, that ``code`` names."""

    owner: Any
    code: types.CodeType

    def members(self) -> list[Any]:
        """Return what they hold now."""
        return list(_followed(vars(self.owner), self.code))

    def content(self) -> dict[str, Any]:
        """Return those that are assigned, with what they are now."""
        return {name: vars(self.owner).get(name, _MISSING) for name in _names(self.code).attributes}

    def give_back(self, content: Mapping[str, Any], keeps_added: bool) -> None:
        """Give them back what they were."""
        for name, was in content.items():
            if was is _MISSING:
                if name in vars(self.owner) and not keeps_added:
                    delattr(self.owner, name)
            elif vars(self.owner).get(name, _MISSING) is not was:
                setattr(self.owner, name, was)


def is_installed(one: Any) -> bool:
    """True for a function, class or module of an installed library, or of Python itself."""
    name = str(one.__name__ if isinstance(one, types.ModuleType) else one.__module__)
    file = getattr(sys.modules.get(name), "__file__", None)
    return name.partition(".")[0] in _TORCHS or name in sys.builtin_module_names or str(file).startswith(_LIBRARIES)


def _assigned_globals(function: types.FunctionType) -> dict[str, Any]:
    names = _names(function.__code__).assigned
    return {name: function.__globals__[name] for name in names if name in function.__globals__}


class _Names(NamedTuple):
    """The names in a function: those that it reads, and the globals and the attributes that it assigns."""

    read: frozenset[str]
    assigned: frozenset[str]
    attributes: frozenset[str]


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> _Names:
    codes = [code]
    for one in codes:  # with the functions inside
        codes += [inner for inner in one.co_consts if isinstance(inner, types.CodeType)]
    steps = [(step.opname, step.argval) for one in codes for step in dis.get_instructions(one)]
    read = (name for one in codes for name in one.co_names)
    return _Names(
        frozenset(read),
        frozenset(name for operation, name in steps if operation == "STORE_GLOBAL"),
        frozenset(name for operation, name in steps if operation == "STORE_ATTR"),
    )


def restore(owner: Any, content: Any, *, keeps_added: bool = False) -> None:
    """Give an object back what it held: a container, a class, a tensor, or what else is told apart here."""
    if isinstance(owner, torch.Tensor):
        version, values = content
        if owner._version != version:
            owner.detach().copy_(values)
    elif isinstance(owner, torch.Generator):
        owner.set_state(content)
    elif isinstance(owner, types.CellType):
        (owner.cell_contents,) = content
    elif isinstance(owner, types.FunctionType):
        owner.__globals__.update(content)
    elif isinstance(owner, _Named):
        owner.give_back(content, keeps_added)
    elif not isinstance(owner, CONTAINERS):  # a class, or an object with slots
        now = dict(vars(owner)) if isinstance(owner, type) else _slots(owner)
        for name in (name for name in {**now, **content} if now.get(name) is not content.get(name)):
            if name in content:
                setattr(owner, name, content[name])
            elif not keeps_added:
                delattr(owner, name)
    elif (isinstance(owner, dict) and keeps_added) or not _is_same(content_of(owner), content):
        kind = _container_type(owner)
        if not (isinstance(owner, dict) and keeps_added):
            kind.clear(owner)
        if isinstance(owner, dict):
            for key, value in content.items():
                kind.__setitem__(owner, key, value)
        else:
            add: Any = set.update if kind is set else kind.extend
            add(owner, content)


def _container_type(owner: Any) -> Any:
    """Return the built-in type whose methods read and write a container: a subclass's own may compute."""
    return next(kind for kind in CONTAINERS if isinstance(owner, kind))


def content_of(owner: Any) -> Any:
    """Return a plain copy of what a container holds."""
    kind = _container_type(owner)
    return dict(kind.items(owner)) if isinstance(owner, dict) else kind(kind.__iter__(owner))


def _is_same(content: Any, was: Any) -> bool:
    """True if two plain containers of one kind hold the same objects, in the same order where they have one."""
    if isinstance(content, set):
        return content == was
    flat, flat_was = ([*c, *c.values()] if isinstance(c, dict) else list(c) for c in (content, was))
    return len(flat) == len(flat_was) and all(a is b for a, b in zip(flat, flat_was, strict=True))


# Run models on tensors of their own.


@contextmanager
def isolated(*models: nn.Module, keeps_added: bool = False) -> Generator[Callable[[], set[int]]]:
    """While open, models that share tensors run, and learn, on tensors of their own; afterwards all is as before.

    Their parameters are others in the same memory, without gradients and hooks, so that no optimizer steps in one. If
    forward writes there, the memory is copied first, and restored. Their buffers are copies. What else a forward
    changes is restored as by :func:`intact`, but for graphs, which set no attributes. Random numbers, modes, what
    requires a gradient, and the thread's state in torch may change, too.

    Gives a function that returns the ids of the parameters, as they are now, whose numbers have changed.
    """
    models = tuple(dict.fromkeys(one.__dict__.get("_model", one) for one in models))  # what a view shows
    places = [(table, name, table[name]) for model in models for _, table, name in tensor_places(model)]
    attributes = [vars(module) for model in models for module in model.modules()]
    modes = [(one, one["training"]) for one in attributes if "training" in one]  # what torch.compile gives has none
    drawn = [one for values in attributes for one in values.values() if isinstance(one, torch.Generator)]
    generators = [(one, one.get_state()) for one in drawn]
    originals = {id(tensor): tensor for _, _, tensor in places if tensor is not None}
    own = {key: _own(tensor) for key, tensor in originals.items()}
    parameters = {key: tensor for key, tensor in originals.items() if isinstance(tensor, nn.Parameter)}
    writes = _Writes(parameters)

    def changed() -> set[int]:
        return {id(own[k]) for k, one in parameters.items() if not equal(own[k].data, writes.before.get(k, one).data)}

    with ExitStack() as kept:
        for model in models:
            if not isinstance(model, fx.GraphModule):
                kept.enter_context(intact(model, keeps_added=keeps_added))
        for context in (own_thread_state(), random_numbers_kept(), torch.inference_mode(False)):
            kept.enter_context(context)
        try:
            for table, name, tensor in places:
                table[name] = own.get(id(tensor))
            with writes:
                yield changed
        finally:
            for table, name, tensor in places:
                table[name] = tensor
            for values, mode in modes:
                values["training"] = mode
            for generator, state in generators:
                generator.set_state(state)
            for key, before in writes.before.items():
                parameters[key].data.copy_(before)


def set_up_by_call(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], None] | None:
    """Call a model as it is, and keep the flags and hooks that this adds to it: a first call may set a model up.

    Returns:
        A function that takes away what was added. None if the call fails, if it adds nothing, or if it adds what may
        hold tensors: those would be made of the model's own copies.
    """
    before = _saved_contents(model)

    def undo() -> None:
        for owner, content in before:
            restore(owner, content)

    copied = pytree.tree_map_only(
        torch.Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), (args, kwargs)
    )
    try:
        with isolated(model, keeps_added=True):
            model(*copied[0], **copied[1])
    except BaseException as error:
        undo()
        if isinstance(error, Exception):  # it is called for what it adds: the caller is told why capture fails
            return None
        raise  # Ctrl-C
    dictionaries = ((owner, content) for owner, content in before if isinstance(owner, dict))
    added = [owner[key] for owner, content in dictionaries for key in owner.keys() - content.keys()]
    if added and all(map(_holds_no_tensor, added)):
        return undo
    undo()
    return None


def _holds_no_tensor(added: Any) -> bool:
    if isinstance(added, types.FunctionType):
        return all(_holds_no_tensor(cell.cell_contents) for cell in added.__closure__ or ())
    return all(isinstance(leaf, (bool, int, float, str, type(None), type)) for leaf in pytree.tree_leaves(added))


def _own(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, nn.Parameter):
        return tensor.detach().clone()
    if not issubclass(type(tensor), nn.Parameter):  # a tensor of a class of its own, which says that it is one
        return nn.Parameter(tensor.detach(), tensor.requires_grad)
    if tensor.is_inference():  # autograd takes none
        with torch.inference_mode(False):
            return nn.Parameter(tensor.clone(), tensor.requires_grad)
    # ``data`` has a version of its own: pending backward passes do not see what is written there and restored.
    made = cast("Any", torch.Tensor)._make_subclass(type(tensor), tensor.data, tensor.requires_grad)
    made.__dict__.update(tensor.__dict__)
    return made


class _Writes(TorchDispatchMode):
    """Copies a parameter before an op first writes into its memory.

    Attributes:
        before: the copies, by the parameter's id.
    """

    supports_higher_order_operators = True

    def __init__(self, parameters: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self.before: dict[int, torch.Tensor] = {}
        self._parameters: dict[int, list[tuple[int, torch.Tensor]]] = defaultdict(list)  # by their memory
        for key, parameter in parameters.items():
            self._parameters[storage_of(parameter)].append((key, parameter))

    @classmethod
    def is_infra_mode(cls) -> bool:
        """``torch.compile`` compiles all the same."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op."""
        written: Any = (args, kwargs)  # of an operator that runs code it is not known
        if isinstance(func, OpOverload):
            names = schema(func)
            given = {**dict(zip(names.names, args, strict=False)), **(kwargs or {})} if names.written else {}
            written = [given[name] for name in names.written if name in given]
        for leaf in (one for one in pytree.tree_leaves(written) if isinstance(one, torch.Tensor)):
            self.before |= {key: one.detach().clone() for key, one in self._parameters.pop(storage_of(leaf), ())}
        return func(*args, **(kwargs or {}))


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if shapes, dtypes and numbers are the same, NaN in the same places."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return a.equal(b) or (a.is_floating_point() and bool(((a == b) | (a.isnan() & b.isnan())).all()))


# The training flags of a model's modules.

_MODES: tuple[Callable[[nn.Module], object], ...] = (lambda model: model.eval(), lambda model: model.train())


def modes_after(model: nn.Module, *, training: bool) -> tuple[bool, ...]:
    """Return the mode of each module after ``model.train()``, or ``model.eval()``; the model stays as it is.

    A switch that fails, or changes which modules there are, counts as one that switches all modules alike.
    """
    modules = list(model.modules())
    if _is_overridden(modules):
        with isolated(model):
            try:
                _MODES[training](model)
            except Exception:  # code of the model's own, which may need values: the switch itself will raise, or work
                return (training,) * len(modules)
            if list(model.modules()) == modules:
                return tuple(module.training for module in modules)
    return (training,) * len(modules)


def set_modes(modules: Sequence[nn.Module], modes: Sequence[bool]) -> None:
    """Give each module its training flag."""
    for module, flag in zip(modules, modes, strict=True):
        module.training = flag


def _is_overridden(modules: Sequence[nn.Module]) -> bool:
    own = (getattr(module, name) for module in modules for name in ("train", "eval"))
    return any(getattr(method, "__func__", None) not in (nn.Module.train, nn.Module.eval) for method in own)
