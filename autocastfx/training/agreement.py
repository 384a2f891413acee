"""Processes that hold parts of the same parameters skip the same steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

__all__ = ["SHARDED", "Agreeing", "agree", "checked", "is_flat_part"]

SHARDED, WORLD = "sharded", "world"
Agreeing: TypeAlias = "dist.ProcessGroup | str | None"
_HAS_GROUPS = dist.is_available()  # as torch was built


def checked(agreeing: Agreeing) -> Agreeing:
    """Return ``agreeing``.

    Raises:
        ValueError: it is a word that means no processes.
    """
    if isinstance(agreeing, str) and agreeing not in (SHARDED, WORLD):
        raise ValueError(f"process_group is {SHARDED!r}, {WORLD!r}, a process group or None, not {agreeing!r}.")
    return agreeing


def agree(found_inf: torch.Tensor, agreeing: Agreeing, groups: Sequence[dict[str, Any]]) -> None:
    """Set ``found_inf`` to the largest among the processes that agree.

    Args:
        found_inf: float32, no dimensions, changed in place.
        agreeing: a process group; ``"world"``: all processes; ``"sharded"``: those that hold other parts of the
            parameters; None: this process alone.
        groups: an optimizer's parameter groups. They are the same in all processes, but for which part is held.
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
