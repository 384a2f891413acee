"""Run one node in 16 bits and in float32 on the same rounded inputs: the difference is what its kernel rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from autocastfx.graph.node import draws_random_numbers, uses
from autocastfx.numerics.probe_run import Read
from autocastfx.passes.analysis.ports import Ports

__all__ = ["KernelError", "Replay", "rounding"]

_KEPT = torch.bfloat16  # of a difference itself, 8 bits are enough


def rounding(value: torch.Tensor, low: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """Return what rounding to ``low`` changes; nothing where the value is infinite.

    Args:
        value: in float32.
        low: the 16-bit dtype.
        scale: a power of two by which the value is multiplied to be held in ``low``.
    """
    scaled = value if scale == 1.0 else value * scale
    changed = _difference(saturated(scaled, low).float(), scaled)
    return changed if scale == 1.0 else changed / scale


def saturated(value: torch.Tensor, low: torch.dtype) -> torch.Tensor:
    """Cast as a conversion casts masks: finite numbers beyond the range of ``low`` become its largest."""
    most = torch.finfo(low).max
    return torch.where(value.isinf(), value, value.clamp(-most, most)).to(low)


def _difference(low: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    return (low - full).nan_to_num_(0.0, 0.0, 0.0)  # infinite numbers hide what they are added to


@dataclass(frozen=True)
class KernelError:
    """The difference between the 16-bit and the float32 kernel of a node.

    Attributes:
        values: of each float32 tensor that it gives; None where it gives no difference to count.
        gradients: of the gradient by each of its reads; None where no gradient flows.
    """

    values: tuple[torch.Tensor | None, ...]
    gradients: tuple[torch.Tensor | None, ...]


@dataclass(frozen=True)
class Replay:
    """The replays of one run.

    Attributes:
        ports: the inputs that a node takes in float32, and its operator in 16 bits.
        low: the 16-bit dtype.
        scale: of the gradients, a power of two: what a loss scale does.
    """

    ports: Ports
    low: torch.dtype
    scale: float = 1.0

    def __call__(
        self,
        node: fx.Node,
        values: Callable[[fx.Node], Any],
        reads: Sequence[Read],
        gradients: Sequence[torch.Tensor | None] = (),
    ) -> KernelError:
        """Run ``node`` twice.

        Args:
            node: of a captured graph.
            values: what a node gave in float32.
            reads: its float32 reads, in order.
            gradients: the gradient by each float32 tensor that it gives; empty: run forwards alone.

        Raises:
            Exception: whatever the 16-bit kernel raises.
        """
        if draws_random_numbers(node):  # other dtypes draw other numbers
            return self._result_alone(values(node), len(reads))
        low, low_gradients = self._run(node, values, reads, gradients, is_low=True)
        full, full_gradients = self._run(node, values, reads, gradients, is_low=False)
        pairs = zip(low_gradients, full_gradients, strict=True)
        return KernelError(
            values=tuple(_difference(x, y).to(_KEPT) for x, y in zip(low, full, strict=True)),
            gradients=tuple(None if x is None or y is None else _difference(x, y).to(_KEPT) for x, y in pairs),
        )

    def _result_alone(self, value: Any, reads: int) -> KernelError:
        made = (rounding(t.detach(), self.low).to(_KEPT) for t in _float32(value))
        return KernelError(tuple(made), (None,) * reads)

    def _run(
        self,
        node: fx.Node,
        values: Callable[[fx.Node], Any],
        reads: Sequence[Read],
        gradients: Sequence[torch.Tensor | None],
        *,
        is_low: bool,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        wanted, leaves = any(g is not None for g in gradients), list[torch.Tensor]()
        of_reads = iter(reads)
        expected = next(of_reads, None)
        places = iter(uses(node))

        def take(read: fx.Node) -> Any:
            nonlocal expected
            use, value = next(places), values(read)
            if expected is None or expected.use != use:
                return value.detach() if isinstance(value, torch.Tensor) else value
            expected = next(of_reads, None)
            leaf = value.detach()
            if not self.ports.stays_float32(node, use):
                leaf = saturated(leaf, self.low) if is_low else saturated(leaf, self.low).float()
            leaves.append(leaf.requires_grad_(wanted))
            return leaves[-1]

        target = cast("Any", (self.ports.stand_in(node) if is_low else None) or node.target)
        with torch.inference_mode(False), torch.set_grad_enabled(wanted), torch._C._DisableAutocast():
            args: Any = tuple(map_arg(argument, take) for argument in node.args)
            kwargs: Any = {name: map_arg(argument, take) for name, argument in node.kwargs.items()}
            made = [t for t in pytree.tree_leaves(target(*args, **kwargs)) if isinstance(t, torch.Tensor)]
            made = [t for t in made if t.is_floating_point()]
            found: list[torch.Tensor | None] = [None] * len(leaves)
            roots = [(t, g) for t, g in zip(made, gradients, strict=False) if g is not None and t.requires_grad]
            if roots:
                given = [(g * self.scale).to(self.low).to(t.dtype) for t, g in roots]
                back = torch.autograd.grad([t for t, _ in roots], leaves, given, allow_unused=True)
                found = [
                    None if g is None else g.float() / self.scale for g in cast("Sequence[torch.Tensor | None]", back)
                ]
        return [t.detach().float() for t in made], found


def _float32(value: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor) and t.dtype == torch.float32]
