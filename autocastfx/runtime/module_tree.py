"""Copy the module tree of a model without its code, and give its copies a class."""

from __future__ import annotations

from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

from autocastfx.errors import CaptureError, UnsupportedError

__all__ = ["Part", "class_of_converted", "mirror", "refuse_sharded"]

Kind = TypeVar("Kind", bound=nn.Module)
_KINDS: WeakKeyDictionary[type[nn.Module], type[nn.Module]] = WeakKeyDictionary()

_STATE_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


class Part(nn.Module):
    """A part of a converted model: it holds parameters, buffers and parts, and runs inside of the graph alone."""

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


def mirror(model: nn.Module, image: nn.Module, made: dict[int, nn.Module]) -> None:
    """Give ``image`` the parameters, buffers and submodules of ``model``: the same tensors, in bare modules.

    Args:
        model: the original.
        image: an empty module.
        made: the bare module of each module so far, by the module's id.

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
            made[id(child)] = Part()
            mirror(child, made[id(child)], made)
        image._modules[name] = made[id(child)] if child is not None else None


def class_of_converted(original: type[nn.Module], base: type[Kind]) -> type[Kind]:
    """Return the class of converted models whose originals are of class ``original``, a subclass of ``base``.

    ``torch.func.stack_module_state`` stacks models of one class alone.
    """
    if original not in _KINDS:
        _KINDS[original] = type(base.__name__, (base,), {"__module__": base.__module__})
    kind = _KINDS[original]
    if not issubclass(kind, base):
        raise TypeError(f"{kind.__name__} is no {base.__name__}")
    return kind


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
