"""Collect, unscale, check and clip the gradients of an optimizer's parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist

from autocastfx.errors import LossScaleError, UnsupportedError
from autocastfx.training.loss_scale import moved

# Processes that hold parts of the same parameters skip the same steps.

SHARDED, WORLD = "sharded", "world"
Agreeing: TypeAlias = "dist.ProcessGroup | str | None"
_HAS_GROUPS = dist.is_available()  # as torch was built


def agree(found_inf: torch.Tensor, agreeing: Agreeing, groups: Sequence[dict[str, Any]]) -> None:
    """Set ``found_inf`` (float32, no dimensions) to the largest among the processes that agree, in place.

    These are a process group; ``"world"``: all processes; ``"sharded"``: those that hold other parts of the parameters;
    None: this process alone. An optimizer's groups are the same in all, but for which part is held.
    """
    if agreeing is None or not _HAS_GROUPS or not dist.is_initialized():
        return
    if isinstance(agreeing, str):
        asked = dict.fromkeys(_of_shards(groups)) if agreeing == SHARDED else (None,)
    else:
        asked = (agreeing,)
    for group in asked:
        if dist.get_world_size(group) > 1:
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=group)


def _of_shards(groups: Sequence[dict[str, Any]]) -> Iterator[Any]:
    """The process groups of the meshes of DTensors, and all processes (None) for parts of FSDP1's flat parameters."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    for mesh in dict.fromkeys(mesh for p in parameters if (mesh := getattr(p, "device_mesh", None)) is not None):
        yield from (mesh.get_group(dim) for dim in range(mesh.ndim))
    if any(map(is_flat_part, parameters)):
        yield None


def is_flat_part(parameter: torch.Tensor) -> bool:
    """True for what a process holds of a parameter that ``FullyShardedDataParallel`` (FSDP1) has flattened."""
    return bool(getattr(parameter, "_fsdp_flattened", False))


_KERNELS: Any = torch  # its stubs leave the fused kernels out
_by_device_and_dtype: Any = torch._C._group_tensors_by_device_and_dtype  # its Python wrapper enters no_grad again
_dtype, _layout, _grad_fn = attrgetter("dtype"), attrgetter("layout"), attrgetter("grad_fn")


def present(groups: Sequence[dict[str, Any]]) -> list[torch.Tensor]:
    """Return the gradients as plain tensors: of a DTensor the local part, of a sparse gradient the values.

    Sparse gradients are coalesced, and partial DTensors are reduced over their processes. Parameters without a gradient
    are left out.
    """
    grads = [g for group in groups for p in group["params"] if (g := p.grad) is not None]
    if set(map(type, grads)) <= {torch.Tensor} and set(map(_layout, grads)) <= {torch.strided}:  # no frame for each
        return grads
    return [_values(p) for group in groups for p in group["params"] if p.grad is not None]


def _values(parameter: torch.Tensor) -> torch.Tensor:
    raw_grad = cast("torch.Tensor", parameter.grad)
    grad = settled(raw_grad, parameter)
    if grad is not raw_grad:
        parameter.grad = grad
    return grad._values() if grad.layout is torch.sparse_coo else local(grad)


def settled(grad: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return ``grad``: coalesced if it is sparse, reduced over the processes if it is a partial DTensor."""
    if grad.layout is torch.sparse_coo:
        return grad if grad.is_coalesced() else grad.coalesce()
    if any(placement.is_partial() for placement in getattr(grad, "placements", ())):
        return cast("Any", grad).redistribute(placements=cast("Any", parameter).placements)
    return grad


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local part of a DTensor; any other tensor as it is."""
    to_local: Any = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor


def unscale_(grads: Sequence[torch.Tensor], inverse: torch.Tensor, found_inf: torch.Tensor) -> None:
    """Multiply ``grads`` by ``inverse`` in place, and set ``found_inf`` to 1 if one is not finite. The host reads
    nothing.

    Gradients may be on any devices, of any floating dtypes; ``inverse`` and ``found_inf`` are float32, no dimensions.

    Raises:
        LossScaleError: gradients can be differentiated again, which would give them the scale that they had.
    """
    if not grads:
        return
    if any(map(_grad_fn, grads)):
        raise LossScaleError(
            "these gradients were made with create_graph=True, and derivatives of them would keep the loss scale: "
            "train without one (NoLossScale()), or derive the unscaled loss twice by torch.autograd.grad."
        )
    for device, alike in _alike(grads):
        if device == found_inf.device:
            _KERNELS._amp_foreach_non_finite_check_and_unscale_(alike, found_inf, inverse)
        else:
            device_found_inf = torch.zeros_like(found_inf, device=device)
            _KERNELS._amp_foreach_non_finite_check_and_unscale_(alike, device_found_inf, moved(inverse, device))
            found_inf.copy_(torch.maximum(found_inf, device_found_inf.to(found_inf.device)))


def _alike(grads: Sequence[torch.Tensor]) -> list[tuple[torch.device, Sequence[torch.Tensor]]]:
    if len(set(map(_dtype, grads))) == 1 and len(set(map(torch.Tensor.get_device, grads))) == 1:  # costs less
        return [(grads[0].device, grads)]
    return [(device, alike) for (device, _), ((alike,), _) in _by_device_and_dtype([list(grads)], False).items()]


def refuse_complex(group: Mapping[str, Any]) -> None:
    """Refuse a group with complex parameters.

    Raises:
        UnsupportedError: a parameter is complex.
    """
    for index, parameter in enumerate(group["params"]):
        if parameter.is_complex():
            raise UnsupportedError(
                f"parameter {index} of shape {tuple(parameter.shape)} is {parameter.dtype}: complex gradients cannot "
                "be scaled and checked. Keep complex parameters in an optimizer of their own."
            )


def parameter_names(groups: Sequence[dict[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each parameter of ``groups`` with its name if the optimizer has names, else its place and shape."""
    for number, group in enumerate(groups):
        known = group.get("param_names")
        for index, parameter in enumerate(group["params"]):
            place = f"group {number}, parameter {index} of shape {tuple(parameter.shape)}"
            yield known[index] if known is not None else place, parameter


def culprits(groups: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Return the names of the parameters whose gradients are not all finite. Waits for the device."""
    named = ((name, p) for name, p in parameter_names(groups) if p.grad is not None)
    return tuple(name for name, p in named if not torch.isfinite(_values(p)).all().item())


def norm(groups: Sequence[dict[str, Any]], norm_type: float = 2.0) -> torch.Tensor:
    """Return the norm of all gradients together, with DTensors counted whole; float32, no dimensions.

    ``torch.nn.utils.get_total_norm`` stacks the norms of all gradients, so it cannot mix plain tensors and DTensors of
    several meshes; this function can.

    Raises:
        UnsupportedError: the parameters are parts of FSDP1's flat ones, whose whole only the model knows.
    """
    if any(is_flat_part(parameter) for group in groups for parameter in group["params"]):
        raise UnsupportedError(
            "these are parts of parameters that FullyShardedDataParallel has flattened: to clip, call unscale_() and "
            "then the model's own clip_grad_norm_. fully_shard (FSDP2) has no such limit."
        )
    alike: dict[Any, list[torch.Tensor]] = {}
    for parameter in (p for group in groups for p in group["params"] if p.grad is not None):
        mesh = getattr(parameter.grad, "device_mesh", None)
        alike.setdefault(mesh, []).append(_values(parameter) if mesh is None else parameter.grad)
    norms = [_norm(mesh, grads, norm_type) for mesh, grads in alike.items()]
    if len(norms) == 1:
        return norms[0]
    return torch.nn.utils.get_total_norm(norms, norm_type)


def _norm(mesh: Any, grads: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    if mesh is None or norm_type != math.inf:
        return _whole(torch.nn.utils.get_total_norm(grads, norm_type))
    from torch.distributed.tensor import DTensor, Partial  # here, so that only users of DTensor pay for it

    parts = [part for grad in grads if (part := local(grad)).numel()]  # a process may hold no part of a small gradient
    largest = torch.nn.utils.get_total_norm(parts, norm_type) if parts else local(grads[0]).new_zeros(())
    return DTensor.from_local(largest, mesh, [Partial("max")] * mesh.ndim).full_tensor()


def clip_norm_(groups: Sequence[dict[str, Any]], max_norm: float, norm_type: float) -> torch.Tensor:
    """Clip the total norm as torch's ``clip_grad_norm_`` and return the norm before. The host reads nothing."""
    grads = present(groups)
    total_norm = norm(groups, norm_type)
    if not grads:
        return total_norm
    factor = torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)
    for device, alike in _alike(grads):
        _KERNELS._foreach_mul_(alike, factor.to(device))
    return total_norm


def clip_value_(groups: Sequence[dict[str, Any]], largest: float) -> None:
    """Clip each element of each gradient to [-largest, largest]."""
    grads = present(groups)
    if grads:
        _KERNELS._foreach_clamp_min_(grads, -largest)
        _KERNELS._foreach_clamp_max_(grads, largest)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    full: Any = getattr(tensor, "full_tensor", None)
    return full() if full is not None else tensor
