"""Copy the module tree of a model without its code, and give its copies a class."""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from autocastfx.capture.call import CallSignature
from autocastfx.capture.leave_intact import isolated, tensor_places
from autocastfx.capture.python_state import is_plain, is_same
from autocastfx.errors import CaptureError, UnsupportedError

# Give a converted model the attributes of the original and the signature of its forward.


def forwarded(model: nn.Module, amp_model: nn.Module, name: str, missing: AttributeError) -> Any:
    """Return the attribute ``name`` of ``model``; a method is bound to ``amp_model``.

    Raises:
        AttributeError: the original does not have it either; this is ``missing``.
        UnsupportedError: the method runs the model's forward (``generate``), or its source cannot be read.
    """
    try:
        attribute = getattr(model, name)
    except AttributeError:
        raise missing from None
    if not inspect.ismethod(attribute) or attribute.__self__ is not model:
        return attribute
    if _runs_forward(type(model), name, set()):
        raise UnsupportedError(
            f"{type(model).__name__}.{name} runs the model's own forward, which is not converted. Call it on the "
            "original, or write the loop around the converted model's call."
        )
    return attribute.__func__.__get__(amp_model)


def set_on_original(model: nn.Module | None, name: str, value: Any) -> None:
    """Set an attribute that graphs depend on, on the original, where variants check it.

    Raises:
        UnsupportedError: the original is not at hand.
    """
    if model is None:
        raise UnsupportedError(
            f"the graphs depend on the value of attribute {name!r}, and the original is not at hand to be captured "
            "again: set it on the original, and convert that."
        )
    setattr(model, name, value)


def signed_forward(signature: CallSignature) -> Callable[..., Any]:
    """Make a forward with the original's signature, for export, trainers and ``help``."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._run(args, kwargs)

    forward.__code__ = forward.__code__.replace()  # torch.compile caches by code object, so each forward has its own
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = inspect.Signature([first, *signature.parameters])
    return forward


def _runs_forward(kind: type, name: str, seen: set[str]) -> bool:
    """True if a method calls ``self(...)``, ``self.forward`` or another method that does, or has no readable source."""
    if name in ("forward", "__call__") or name in seen:
        return name not in seen
    seen.add(name)
    method = inspect.getattr_static(kind, name, None)
    if isinstance(method, (staticmethod, property)) or not callable(method):
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    except (OSError, TypeError, SyntaxError):
        return True
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef) or not function.args.args:
        return True
    own = function.args.args[0].arg
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == own:
            return True
        if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == own):
            continue
        if inspect.getattr_static(kind, node.attr, None) is not None and _runs_forward(kind, node.attr, seen):
            return True
    return False


_PARTS: WeakKeyDictionary[type[nn.Module], type[Part]] = WeakKeyDictionary()
_NOT_MIXED = (fx.GraphModule, torch.jit.ScriptModule)  # whose classes are made for each instance, or compiled
_MODULE_ATTRIBUTES = frozenset(nn.Module().__dict__)
_STATE_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


class Part(nn.Module):
    """A part of a converted model: it holds parameters, buffers and parts, and runs inside of the graph alone.

    It is an instance of the class of the module that it stands for, where that is safe, and has its methods and its
    plain attributes: helpers look for layers by class (``update_bn``, an ``init`` for ``apply``). Setting such an
    attribute sets the original's, on which graphs depend.
    """

    _stands_for: type[nn.Module] = nn.Module

    def __init__(self, original: nn.Module) -> None:
        nn.Module.__init__(self)
        if isinstance(original, Part):
            taken = {name: original.__dict__[name] for name in ("_original", "_plain", *original.__dict__["_plain"])}
        else:
            taken = plain_attributes(original)
            taken |= {"_original": weakref.ref(original), "_plain": frozenset(taken)}
        self.__dict__.update(taken)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "a part of a converted model cannot be called by itself, nor can a method of the original that calls "
            "parts: the graph runs the whole forward. Convert the part, autocastfx.convert(model.part, inputs), or "
            "keep the model's methods with autocastfx.enable(model)."
        )

    def __setattr__(self, name: str, value: Any) -> None:
        refuse_replacing(self, name, value)
        if name in self.__dict__.get("_plain", ()) and not is_same(value, self.__dict__.get(name)):
            set_on_original(_original_of(self), name, value)
        nn.Module.__setattr__(self, name, value)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a module, which takes no other's place."""
        refuse_replacing(self, name, module)
        nn.Module.add_module(self, name, module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Part:
        made: Part = object.__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        bases = (kind for kind in self._stands_for.__mro__ if kind.__module__.startswith("torch.nn."))
        return _empty_part, (next(bases, nn.Module),), {**self.__dict__, "_original": None}


def _original_of(part: Part) -> nn.Module | None:
    reference = part.__dict__["_original"]
    return reference() if reference is not None else None


def refuse_replacing(owner: nn.Module, name: str, module: object) -> None:
    """Refuse to put another module into the place of a part, which the graph would not run.

    Raises:
        UnsupportedError: ``name`` is that of a part.
    """
    part = owner.__dict__.get("_modules", {}).get(name)
    if isinstance(part, Part) and module is not part:
        raise UnsupportedError(
            f"{type(part).__name__} {name!r} is a part of a converted model, whose graph would not run what takes its "
            "place. Replace it in the original (convert_sync_batchnorm, adapters), and convert that."
        )


def plain_attributes(model: nn.Module) -> dict[str, Any]:
    """Return the attributes of ``model`` that are numbers, text, and the like."""
    return {k: v for k, v in model.__dict__.items() if k not in _MODULE_ATTRIBUTES and is_plain(v)}


def forget_original(parts: Iterable[nn.Module]) -> None:
    """Let parts refer to the original no more."""
    for part in parts:
        if isinstance(part, Part):
            part.__dict__["_original"] = None


def read_again(parts: Iterable[nn.Module]) -> None:
    """Read the plain attributes of the originals again, which may have changed since the conversion."""
    for part in parts:
        original = _original_of(part) if isinstance(part, Part) else None
        if original is not None:
            taken = plain_attributes(original)
            part.__dict__.update(taken, _plain=frozenset(taken))


# What nn.Module itself does is done so in a part, too, whatever the original's class makes of it; but for the switch
# between training and evaluation, which is the original's.
for _name, _member in vars(nn.Module).items():
    if isinstance(_member, FunctionType) and _name not in (*vars(Part), "train", "eval"):
        setattr(Part, _name, _member)


def _part_class(original: type[nn.Module]) -> type[Part]:
    """Return the class of parts that stand for modules of this class; of a base of it where that is not safe."""
    if original not in _PARTS:
        _PARTS[original] = Part
        for kind in original.__mro__:
            is_known = any(issubclass(kind, base) for base in (*_NOT_MIXED, Part))
            is_told = any("__init_subclass__" in vars(base) for base in kind.__mro__[:-1])
            if not issubclass(kind, nn.Module) or is_known or is_told or type(kind) is not type or kind is nn.Module:
                continue
            try:
                namespace = {"__module__": Part.__module__, "_stands_for": kind, "__doc__": Part.__doc__}
                _PARTS[original] = type(kind.__name__, (Part, kind), namespace)
            except TypeError:  # classes of C with a layout of their own
                continue
            break
    return _PARTS[original]


def _empty_part(kind: type[nn.Module]) -> Part:
    part: Part = object.__new__(_part_class(kind))
    return part


def mirror(model: nn.Module, image: nn.Module, made: dict[int, nn.Module], *, is_tree: bool) -> None:
    """Give ``image`` the parameters, buffers and submodules of ``model``: the same tensors, in bare modules.

    Args:
        model: the original, or the tree of a converted model. What was added to the latter stays as it is.
        image: an empty module.
        made: the bare module of each module so far, by the module's id.
        is_tree: whether ``model`` is the tree of a converted model.

    Raises:
        CaptureError: a module has extra state (``get_extra_state``).
    """
    image.training = model.training
    image._parameters.update(model._parameters)
    image._buffers.update(model._buffers)
    image._non_persistent_buffers_set.update(model._non_persistent_buffers_set)
    if type(model).get_extra_state is not nn.Module.get_extra_state:
        raise CaptureError(
            f"{type(model).__name__} keeps an extra state, which a converted model could not save. Keep it in a buffer."
        )
    for hooks in _STATE_HOOKS:
        image.__dict__[hooks].update(model.__dict__[hooks])
    for name, child in model._modules.items():
        if child is not None and id(child) not in made:
            is_added = is_tree and not isinstance(child, Part)  # to the converted model, whose graph does not run it
            kind = type(child) if isinstance(child, Part) else _part_class(type_before_parametrizations(child))
            made[id(child)] = child if is_added else kind(child)
            if not is_added:
                mirror(child, made[id(child)], made, is_tree=is_tree)
        image._modules[name] = made[id(child)] if child is not None else None


def refuse_sharded(model: nn.Module, error: RuntimeError) -> None:
    """Explain an error of a call of ``model`` by parameters that are DTensors, if there are any.

    Raises:
        UnsupportedError: there is one.
    """
    name = next((name for name, p in model.named_parameters() if hasattr(p, "device_mesh")), None)
    if name is not None:
        raise UnsupportedError(
            f"parameter {name!r} is a DTensor: the graph reads parameters directly, so a submodule that was given "
            "to fully_shard never gathers its own. Give fully_shard the converted model whole, or convert the "
            "submodules one by one and shard each; parallelize_module is not supported."
        ) from error


# The modes that a model's own ``train`` and ``eval`` give its modules, and those that its parts are given later.

Modes = tuple[bool, ...]
_Held = Callable[[], Mapping[str, torch.Tensor]]
_SWITCHES: tuple[Callable[[nn.Module], object], ...] = (lambda model: model.eval(), lambda model: model.train())


@dataclass(frozen=True)
class Switched:
    """What a switch to training, or to evaluation, does to a model.

    Attributes:
        modes: the training flag of each module afterwards.
        changes: True if it changes attributes too, on which graphs may depend, or if that is unknown.
    """

    modes: Modes
    changes: bool = False


class OriginalModes:
    """Follows the modes that parts of the original are given (``model.backbone.eval()``) after the conversion.

    The mode of the original as a whole is its own. Calls that ``torch.compile`` compiled do not look: there, give the
    mode to the converted model's part.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self.modules = tuple(model.modules()) if model is not None else ()
        self.seen = self._now()

    def _now(self) -> list[bool]:
        return [module.training for module in self.modules]

    def follow(self, own: Sequence[nn.Module]) -> None:
        """Give ``own``, the modules of the converted model, the modes that parts were given since the last look."""
        now = self._now()
        if now != self.seen:
            was, self.seen = self.seen, now
            is_switch = now[0] != was[0]
            for module, flag, before in zip(own, now, was, strict=True):
                if flag != (now[0] if is_switch else before):
                    module.training = flag

    def forget(self) -> None:
        """Let what was done to the original so far be of no account: all modules are given modes anew."""
        self.seen = self._now()


def foreseen(model: nn.Module, *, training: bool) -> Switched:
    """Return what ``model.train()``, or ``model.eval()``, would do; the model stays as it is."""
    modules = list(model.modules())
    if not _is_overridden(modules):
        return Switched((training,) * len(modules))
    with isolated(model):
        before = _attributes(modules)
        try:
            _SWITCHES[training](model)
        except Exception:  # code of the model's own, which may need values: the switch itself will raise, or work
            return Switched((training,) * len(modules), changes=True)
        is_same = list(model.modules()) == modules and _attributes(modules) == before
        return Switched(tuple(m.training for m in modules), changes=not is_same)


def switch(own: Sequence[nn.Module], model: nn.Module, held: _Held, *, training: bool) -> bool:
    """Give ``own`` the modes that ``model.train()``, or ``model.eval()``, gives the modules of ``model``.

    What else that does, it does: freeze parameters, set attributes. The modes of ``model`` stay as they are.

    Args:
        own: the modules of a converted model.
        model: the original.
        held: gives the parameters and buffers of the converted model, by name.
        training: which of the two.

    Returns:
        False if that is ``nn.Module``'s own, which switches all modules alike; nothing is done then.

    Raises:
        UnsupportedError: it adds or removes modules.
    """
    modules = list(model.modules())
    if not _is_overridden(modules):
        return False
    theirs = [module.training for module in modules]
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    try:
        set_modes(modules, [one.training for one in own])
        tensors = held()
        for path, table, name in tensor_places(model):
            tensor = table[name]
            new = tensors.get(path, tensor)
            if new is not tensor:
                replaced.append((table, name, tensor))
                table[name] = new
        _SWITCHES[training](model)
        if list(model.modules()) != modules:
            raise UnsupportedError(
                f"{'train' if training else 'eval'}() of {type(model).__name__} adds or removes modules, which a "
                "converted model cannot follow: switch the original, and convert it again."
            )
        set_modes(own, [module.training for module in modules])
        return True
    finally:
        set_modes(modules, theirs)
        for table, name, tensor in replaced:
            table[name] = tensor


def set_modes(modules: Sequence[nn.Module], modes: Sequence[bool]) -> None:
    """Give each module its training flag."""
    for module, flag in zip(modules, modes, strict=True):
        module.training = flag


def _is_overridden(modules: Sequence[nn.Module]) -> bool:
    own = (getattr(module, name) for module in modules for name in ("train", "eval"))
    return any(getattr(method, "__func__", None) not in (nn.Module.train, nn.Module.eval) for method in own)


def _attributes(modules: Sequence[nn.Module]) -> list[dict[str, int]]:
    return [{name: id(value) for name, value in vars(m).items() if name != "training"} for m in modules]
