"""Guards for what the model's code reads and Dynamo leaves unguarded.

- Methods of the model's classes, which Dynamo takes to stay what they are.
- What is absent: a key of a dictionary or an attribute of an object, as in ``try: ... except KeyError``; and in a class
  itself an attribute that it inherits.
- The lengths of tuples whose class has no length.
- Whether gradients are recorded.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from types import FunctionType
from typing import Any, cast

from torch import nn


def guarding_mends() -> list[tuple[Any, str, Any]]:
    """Return what takes the place of an attribute of Dynamo's, with the owner and the name."""
    from torch._C._dynamo.guards import GuardManager
    from torch._dynamo.guards import GuardBuilder, get_verbose_code_parts, install_guard
    from torch._dynamo.variables.functions import UserMethodVariable
    from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

    call: Any = UserMethodVariable.call_function

    @wraps(call)
    def call_function(self: Any, tx: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        guarded = tx.output.__dict__.setdefault("autocastfx_methods", set[Any]())
        source = self.im_func.source if hasattr(self, "im_func") else self.source_fn  # from torch 2.15 on, and before
        if source is not None and self.fn not in guarded and not str(self.fn.__module__).startswith("torch."):
            source = source.base if _is_function(tx, source) else source
            guarded.add(self.fn)
            install_guard(source.make_guard(GuardBuilder.CLOSURE_MATCH))
        return call(self, tx, args, kwargs)

    call_of_module: Any = UnspecializedNNModuleVariable.call_function

    @wraps(call_of_module)
    def call_module(self: Any, tx: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        forwards = tx.output.__dict__.setdefault("autocastfx_forwards", dict[Any, Any]())
        if self.source is not None:
            if not forwards:
                install_guard(self.source.make_guard(_guard_on(forwards)))
            forwards[type(self.value)] = _calls_of(type(self.value))
        return call_of_module(self, tx, args, kwargs)

    length: Any = GuardBuilder.SEQUENCE_LENGTH

    @wraps(length)
    def guard_length(self: Any, guard: Any) -> None:
        value = self.get(guard)
        if isinstance(value, tuple) and type(value).__len__ is not tuple.__len__:  # e3nn's Irrep raises
            self.TYPE_MATCH(guard)
            count, told = tuple.__len__(cast("tuple[Any, ...]", value)), [f"tuple.__len__({guard.name})"]

            def has_count(now: tuple[Any, ...]) -> bool:
                return tuple.__len__(now) == count

            parts = get_verbose_code_parts(told, guard)
            self.get_guard_manager(guard).add_lambda_guard(has_count, parts, guard.user_stack)
        else:
            length(self, guard)

    mends: list[tuple[Any, str, Any]] = [
        (UserMethodVariable, "call_function", call_function),
        (UnspecializedNNModuleVariable, "call_function", call_module),
        (GuardBuilder, "SEQUENCE_LENGTH", guard_length),
        *_absence_mends(),
    ]
    if (mark := getattr(GuardManager, "add_dimension_marking_guard", None)) is not None:

        def guard_marks(self: Any, *args: Any) -> None:
            if not issubclass(self.get_type_of_guarded_value(), nn.Parameter):  # whose sizes are static all the same
                mark(self, *args)

        mends.append((GuardManager, "add_dimension_marking_guard", guard_marks))
    return mends


def _is_function(tx: Any, method: Any) -> bool:
    """True if what is said to be the function of a method is that of a function, as of a descriptor's ``__get__``."""
    resolve = getattr(tx.output, "resolve_source_value", None)  # torch 2.11 has none
    if resolve is None or getattr(method, "member", "") != "__func__":
        return False
    try:
        return isinstance(resolve(method.base), FunctionType)
    except NameError:  # of a mode of torch functions, which guards alone can name
        return False


def _guard_on(forwards: Mapping[Any, Any]) -> Callable[[Any, Any], None]:
    """Return what guards that classes of modules have these methods, one guard for all: one each would take longer."""

    def guard_forwards(builder: Any, guard: Any) -> None:
        def are_as_before(_: object) -> bool:
            return all(_calls_of(kind) == calls for kind, calls in forwards.items())

        builder.get_guard_manager(guard).add_lambda_guard(
            are_as_before, ["classes of modules have the forward and __call__ that they had"], guard.user_stack
        )

    return guard_forwards


def _calls_of(kind: Any) -> tuple[Any, Any]:
    call = kind.__call__
    return kind.forward, call is nn.Module.__call__ or call  # which traces exchange for a while


def _absence_mends() -> list[tuple[Any, str, Any]]:
    """Return the mends for what code finds to be absent, or empty, some of which one torch has and the next one not."""
    from torch._dynamo import symbolic_convert
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import TypeDictSource
    from torch._dynamo.variables import builtin, dicts, user_defined
    from torch._dynamo.variables.dicts import ConstDictVariable
    from torch._dynamo.variables.misc import PythonModuleVariable

    look_up: Any = ConstDictVariable.getitem_const_raise_exception_if_absent
    has: Any = PythonModuleVariable.call_obj_hasattr

    @wraps(look_up)
    def look_key_up(self: Any, tx: Any, key: Any) -> Any:
        if key not in self:
            self.install_dict_contains_guard(tx, [key])
        return look_up(self, tx, key)

    contains: Any = GuardBuilder.DICT_CONTAINS
    not_contains: Any = getattr(GuardBuilder, "DICT_NOT_CONTAINS", partial(contains, invert=True))  # torch 2.11
    of_instance: Any = user_defined.UserDefinedObjectVariable
    from_class: Any = of_instance.get_source_by_walking_mro

    @wraps(from_class)
    def inherited(self: Any, *given: Any) -> Any:
        kind, name = type(self.value), given[-1]
        output = cast("Any", symbolic_convert.InstructionTranslator.current_tx()).output
        absent = output.__dict__.setdefault("autocastfx_absent", set[Any]())
        if self.cls_source is not None and name not in vars(kind) and (kind, name) not in absent:
            absent.add((kind, name))  # Dynamo guards the classes between this one and the one that has the attribute
            install_guard(TypeDictSource(self.cls_source).make_guard(partial(not_contains, key=name)))
        return from_class(self, *given)

    @wraps(has)
    def has_attribute(self: Any, tx: Any, name: str) -> Any:
        _guard_attribute(self, name)
        return has(self, tx, name)

    def guards_length(function: Any) -> Any:
        @wraps(function)
        def with_length(*args: Any) -> Any:
            variable = args[-1]
            if variable.source is not None and issubclass(variable.python_type(), dict):
                install_guard(variable.source.make_guard(GuardBuilder.SEQUENCE_LENGTH))
            return function(*args)

        return with_length

    of_object = getattr(dicts, "DunderDictVariable", None)  # vars(object)
    is_stdlib: Any = symbolic_convert.is_stdlib

    def is_constant(module: object) -> bool:  # whose contents Dynamo guards nowhere; os.getenv reads some
        return module is not os and is_stdlib(module)

    wrapped = [
        (builtin.BuiltinVariable, "call_getattr", _guarding_absence),  # torch 2.11
        (getattr(builtin, "GetAttrBuiltinVariable", None), "call_function", _guarding_absence),  # torch 2.13
        (symbolic_convert, "generic_getattr", _guarding_absence),  # torch 2.15
        (getattr(user_defined, "OrderedDictVariable", None), "as_python_constant", guards_length),
        *((module, "generic_bool", guards_length) for module in (symbolic_convert, builtin)),
    ]
    return [
        (ConstDictVariable, look_up.__name__, look_key_up),
        (of_instance, from_class.__name__, inherited),
        (PythonModuleVariable, has.__name__, has_attribute),
        (symbolic_convert, "is_stdlib", is_constant),
        *((owner, name, wrap(getattr(owner, name))) for owner, name, wrap in wrapped if hasattr(owner, name)),
        *(
            (of_object, name, getattr(ConstDictVariable, name))
            for name in ("install_dict_contains_guard", "install_dict_keys_match_guard")
            if of_object is not None
        ),
    ]


def _guarding_absence(get: Any) -> Any:
    """Return what stands for Dynamo's ``getattr``, and guards that an attribute is absent."""
    from torch._dynamo.exc import ObservedAttributeError

    @wraps(get)
    def get_attribute(*given: Any) -> Any:
        try:
            result = get(*given)
        except ObservedAttributeError:
            _guard_attribute(*_owner_and_name(given))
            raise
        owner, name = _owner_and_name(given)
        _guard_fallback(owner.realize(), name)
        return result

    return get_attribute


def _owner_and_name(given: Sequence[Any]) -> tuple[Any, str]:
    """Return whose attribute Dynamo's ``getattr`` reads, and its name, from all that it is given."""
    if isinstance(given[2], str):  # tx, owner, name
        return given[1], given[2]
    owner, name = given[2][:2] if isinstance(given[2], (list, tuple)) else given[2:4]  # itself, tx, and these
    return owner, name.as_python_constant()


def _guard_fallback(variable: Any, name: str) -> None:
    """Guard that an object has no attribute of its own where its class looks elsewhere, by ``__getattr__``."""
    from torch._dynamo.guards import install_guard
    from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

    if not isinstance(variable, UserDefinedObjectVariable) or variable.source is None:
        return
    kind, own = type(variable.value), getattr(variable.value, "__dict__", {})
    looks = getattr(kind, "__getattr__", None)
    if not isinstance(looks, FunctionType) or looks is nn.Module.__getattr__ or name in own or hasattr(kind, name):
        return

    def is_absent(now: object) -> bool:
        return name not in vars(now)

    def guard_absence(builder: Any, guard: Any) -> None:
        told = [f"{name!r} not in vars({guard.name})"]
        builder.get_guard_manager(guard).add_lambda_guard(is_absent, told, guard.user_stack)

    install_guard(cast("Any", variable.source).make_guard(guard_absence))


def _guard_attribute(variable: Any, name: str) -> None:
    """Guard whether an object has an attribute."""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource

    if variable.source is None:
        return
    guard: Any = GuardBuilder.HASATTR
    if "attr" in inspect.signature(guard).parameters:
        install_guard(variable.source.make_guard(partial(guard, attr=name)))
    else:  # in torch 2.11 the source says which
        install_guard(AttrSource(variable.source, name).make_guard(guard))


# Whether code that Dynamo captures asks if gradients are recorded, or switches them on.


class _Asked(threading.local):
    yes = False


_ASKED = _Asked()


def asks_for_gradients() -> bool:
    """Return whether the code that this thread captures has done so, for the graph that a backend is given."""
    asked, _ASKED.yes = _ASKED.yes, False
    return asked


class _Noting:
    """Stands for the guard that Dynamo takes where code asks or switches, and notes that it is taken.

    Code under ``torch.no_grad()`` does the same in either case: its graph with gradients serves calls without, and says
    which nodes are under it.
    """

    def __init__(self, guard: Any) -> None:
        self.guard = guard

    def __get__(self, instance: object, owner: type) -> Any:
        _ASKED.yes |= instance is None or cast("Any", instance).target_values != [False]
        return self.guard


def asking_mends() -> list[tuple[Any, str, Any]]:
    """Return what takes the place of an attribute of Dynamo's, with the owner and the name."""
    from torch._dynamo.variables.ctx_manager import GradModeVariable

    return [(GradModeVariable, "_guards_singleton", _Noting(GradModeVariable._guards_singleton))]
