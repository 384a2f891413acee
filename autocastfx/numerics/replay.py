"""Run one node in 16 bits and in float32 on the same rounded inputs: the difference is what its kernel rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from autocastfx.graph.node import Use, draws_random_numbers, uses
from autocastfx.numerics.segment_run import Read
from autocastfx.passes.analysis.units import Ports

__all__ = ["KernelError", "Replay", "Roundings", "rounding"]

_KEPT = torch.bfloat16  # of a difference itself, 8 bits are enough


def rounding(value: torch.Tensor, low: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """Return what rounding to ``low`` changes; nothing where the value is infinite.

    Args:
        value: in float32.
        low: the 16-bit dtype.
        scale: a power of two by which the value is multiplied to be held in ``low``.
    """
    scaled, most = _times(value, scale), torch.finfo(low).max
    changed = scaled.clamp(-most, most).to(low).float().sub_(scaled)
    return changed.nan_to_num_(0.0, 0.0, 0.0).mul_(1 / scale)


def saturated(value: torch.Tensor, low: torch.dtype) -> torch.Tensor:
    """Cast as a conversion casts masks: finite numbers beyond the range of ``low`` become its largest."""
    most = torch.finfo(low).max
    return torch.where(value.isinf(), value, value.clamp(-most, most)).to(low)


def _times(value: torch.Tensor, power_of_two: float) -> torch.Tensor:
    return value if power_of_two == 1.0 else value * power_of_two


def _difference(low: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    return (low - full).nan_to_num_(0.0, 0.0, 0.0)  # infinite numbers hide what they are added to


def _kept(changed: torch.Tensor) -> torch.Tensor:
    return changed.to(_KEPT).nan_to_num_(0.0, 0.0, 0.0)


def _counted(low: torch.Tensor | None, full: torch.Tensor | None) -> torch.Tensor | None:
    if low is None or full is None:
        return None
    changed = _kept(_difference(low, full))
    return changed if bool(changed.any()) else None


@dataclass(frozen=True)
class Roundings:
    """What rounding to ``low`` changes of tensors, for those that show the same storage at once."""

    low: torch.dtype
    _kept: dict[tuple[int, float], torch.Tensor] = field(default_factory=dict[tuple[int, float], torch.Tensor])

    def __call__(self, value: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Return the change, in bfloat16, in the shape of ``value``.

        Args:
            value: in float32. The caller holds it as long as others are asked for.
            scale: as for :func:`rounding`.
        """
        storage = value.untyped_storage()
        key = (storage._cdata, scale)
        if key not in self._kept:
            whole = value.detach().as_strided((storage.nbytes() // value.element_size(),), (1,), 0)
            self._kept[key] = _kept(rounding(whole, self.low, scale))
        return self._kept[key].as_strided(value.size(), value.stride(), value.storage_offset())


@dataclass(frozen=True)
class KernelError:
    """The difference between the 16-bit and the float32 kernel of a node.

    Attributes:
        values: of each float32 tensor that it gives, in bfloat16; None where there is none.
        gradients: of the gradient by each of its reads, likewise.
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
        inputs = {read.use: self._rounded(read, values(read.use.node).detach()) for read in reads}
        back = [None if g is None else _times(g, self.scale).to(self.low) for g in gradients]
        low, low_gradients = self._run(node, values, inputs, back, is_low=True)
        full, full_gradients = self._run(node, values, inputs, back, is_low=False)
        pairs = zip(low_gradients, full_gradients, strict=True)
        return KernelError(
            values=tuple(_counted(x, y) for x, y in zip(low, full, strict=True)),
            gradients=tuple(_counted(x, y) for x, y in pairs),
        )

    def gradients(
        self,
        node: fx.Node,
        values: Callable[[fx.Node], Any],
        inputs: Mapping[Use, torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor | None]:
        """Return the gradients by ``inputs`` in float32.

        Args:
            node: as above.
            values: as above.
            inputs: what each of its float32 reads gets, in order.
            gradients: as above.
        """
        return replace(self, scale=1.0)._run(node, values, inputs, gradients, is_low=False)[1]

    def _result_alone(self, value: Any, reads: int) -> KernelError:
        made = (_kept(rounding(t.detach(), self.low)) for t in _float32(value))
        return KernelError(tuple(made), (None,) * reads)

    def _rounded(self, read: Read, value: torch.Tensor) -> torch.Tensor:
        return value if self.ports.stays_float32(read.node, read.use) else saturated(value, self.low)

    def _run(
        self,
        node: fx.Node,
        values: Callable[[fx.Node], Any],
        inputs: Mapping[Use, torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        *,
        is_low: bool,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        wanted, leaves = any(g is not None for g in gradients), list[torch.Tensor]()
        places = iter(uses(node))

        def take(read: fx.Node) -> Any:
            use, value = next(places), values(read)
            if use not in inputs:
                return value.detach() if isinstance(value, torch.Tensor) else value
            leaf = inputs[use] if is_low else inputs[use].float()
            leaves.append(leaf.detach().requires_grad_(wanted))
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
                given = [g.to(t.dtype) for t, g in roots]
                ends = [t for t, _ in roots]
                back = cast("Sequence[Any]", torch.autograd.grad(ends, leaves, given, allow_unused=True))
                found = [None if g is None else _times(g.float(), 1 / self.scale) for g in back]
        return [t.detach().float() for t in made], found


def _float32(value: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor) and t.dtype == torch.float32]
