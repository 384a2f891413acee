"""Copy the module tree of a model without its code."""

from __future__ import annotations

from torch import nn

from autocastfx.errors import CaptureError

__all__ = ["mirror"]

_STATE_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
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
            made[id(child)] = nn.Module()
            mirror(child, made[id(child)], made)
        image._modules[name] = made[id(child)] if child is not None else None
