"""The error that 16 bits would cause at each node, measured once, as plain data to and from JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autocastfx.errors import SensitivityError, UnknownNameError
from autocastfx.files import parsed_json, plain_data, read_whole, typed_data, write_whole
from autocastfx.graph.walk import MODES, Key
from autocastfx.plan.ranges import MeasuredNode, each_once, in_mode

VERSION = 1
TARGETS = ("gradient", "output")
OUTPUT = "output"  # the name of the graph's output, as a reader
# The change of a random projection of the target, relative to the target's norm: a number for each batch and probe.
# Its root mean square estimates the relative error in the 2-norm (M. F. Hutchinson, 1989).
Signature = tuple[float, ...]


@dataclass(frozen=True, repr=False)
class Sensitivity:
    """The effects of 16 bits at each node of a model.

    Attributes:
        of: the target: ``"gradient"``, of the loss by all parameters as one vector, or ``"output"``.
        dtype: name of the 16-bit dtype.
        probes: the number of random projections per batch.
        batches: the number of batches.
        effects: one for each node and mode.
        unmeasured: names of the nodes that read float32 values and could not be measured, with the reason.
        jumps_at: the error of a plan in which gradients jump as much as they were made to, 0 if none do. The last two
            projections of each batch then have one direction, and jumps of opposite signs.
        jumps_true: the measured error of that plan, which ``jumps_at`` is the predicted one of; 0 if not measured.
        float8: the recipe by which the products of nodes were measured in float8; empty: they were not.
    """

    of: str
    dtype: str
    probes: int
    batches: int
    effects: tuple[Effect, ...]
    unmeasured: Mapping[str, str] = field(default_factory=dict[str, str])
    jumps_at: float = 0.0
    jumps_true: float = 0.0
    float8: str = ""

    def __repr__(self) -> str:
        return f"Sensitivity({self})"

    def __str__(self) -> str:
        """The summary in a line."""
        worst = max(self.effects, key=lambda effect: effect.error, default=None)
        said = f"; the most sensitive: {worst.name} ({worst.op}), {worst.error:.1e}" if worst is not None else ""
        float8 = f" and float8 {self.float8}" if self.float8 else ""
        missing = f"; {len(self.unmeasured)} nodes not measured" if self.unmeasured else ""
        return (
            f"sensitivity of the {self.of} to {self.dtype}{float8}: {len(self.effects)} nodes, {self.batches} batches "
            f"of {self.probes} probes{said}{missing}"
        )

    def __getitem__(self, name: str) -> Effect:
        """Return the effect of the node called ``name``; the largest if modes or modules share the name.

        Raises:
            KeyError: no measured node has this name.
        """
        effects = [effect for effect in self.effects if effect.name == name]
        if not effects:
            raise UnknownNameError(f"no node {name!r} was measured")
        return max(effects, key=lambda effect: effect.error)

    def effects_in(self, mode: str) -> Mapping[Key, Effect]:
        """Return the effects in graphs of ``mode``; of the other mode if only that was measured."""
        return in_mode(self.effects, mode)

    def error(self, signatures: Sequence[Signature]) -> float:
        """Return the relative error of the target that several nodes cause together.

        The squared error of jumps grows with the change that makes gradients jump, and not with its square. They were
        measured at one size of that change, so their part is scaled to the size that these nodes make; and to the true
        error at that size, for jumps that follow on jumps are not independent.
        """
        error = rms(added(signatures))
        if not self.jumps_at:
            return error
        pairs = [
            pair
            for one in signatures
            for pair in zip(*(one[-n % self.probes :: self.probes] for n in (2, 1)), strict=True)
        ]
        smooth, jumps = (sum((a + sign * b) ** 2 for a, b in pairs) for sign in (1, -1))
        share = jumps / (smooth + jumps) if jumps else 0.0
        true = (self.jumps_true / self.jumps_at) ** 2 if self.jumps_true else 1.0
        return math.sqrt((1 - share) * error**2 + share * error * self.jumps_at * true)

    def bias(self, signature: Signature) -> float:
        """Return the part of an error that is the same in all batches, which adds up over steps; 0 if none shows.

        In a random direction that all batches share, the product of what two batches give is on average the square of
        what the two have in common. One batch tells nothing of it.
        """
        rows = [signature[i :: self.probes] for i in range(shared_directions(self.probes))]
        products = [sum(row) ** 2 - sum(number * number for number in row) for row in rows]
        return math.sqrt(max(0.0, sum(products)) / self._pairs) if self._pairs else 0.0

    def least_bias(self, error: float) -> float:
        """Return the smallest bias that shows in ``error``: one standard deviation of the estimate if there is none."""
        return error * (2 / self._pairs) ** 0.25 if self._pairs else math.inf

    @property
    def _pairs(self) -> int:
        """The number of products of two batches in a direction that they share; each counts twice."""
        return self.batches * (self.batches - 1) * shared_directions(self.probes)

    def merged(self, other: Sensitivity) -> Sensitivity:
        """Append what was measured on further batches.

        Raises:
            SensitivityError: it is of another target, dtype, number of probes or recipe of float8.
        """
        both = (self, other)
        for name in ("of", "dtype", "probes", "float8"):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                raise SensitivityError(f"{name} is {ours!r} here and {theirs!r} there: measure both alike.")
        return dataclasses.replace(
            self,
            batches=self.batches + other.batches,
            effects=each_once((*self.effects, *other.effects), Effect.merged),
            unmeasured={**self.unmeasured, **other.unmeasured},
            jumps_at=_mean([(one.batches, one.jumps_at) for one in both]),
            jumps_true=_mean([(one.batches, one.jumps_true or one.jumps_at) for one in both]),
        )

    def to_json(self) -> str:
        """Write as JSON text, one node a line; :meth:`from_json` reads it back."""
        rest = {"autocastfx_sensitivity": VERSION, **plain_data(self)}
        del rest["effects"]
        effects = plain_data(self.effects, {float: lambda number: float(f"{number:.4g}")})
        for record, keys in ((rest, ("float8",)), *((effect, ("products", "sizes")) for effect in effects)):
            for key in (key for key in keys if not record[key]):  # which few files have
                del record[key]
        lines = ",\n".join(json.dumps(effect, ensure_ascii=False) for effect in effects)
        return f'{json.dumps(rest, ensure_ascii=False)[:-1]}, "effects": [\n{lines}\n]}}\n'

    @classmethod
    def from_json(cls, text: str, *, file: str = "sensitivity") -> Sensitivity:
        """Read what :meth:`to_json` wrote. ``file`` is the text's name in messages.

        Raises:
            SensitivityError: the text is not such JSON, or of another version.
        """
        try:
            data: dict[str, Any] = parsed_json(text)
            version = data.pop("autocastfx_sensitivity")
            if version != VERSION:
                raise SensitivityError(f"{file} is version {version!r} of the format, not {VERSION}. Measure again.")
            read = typed_data(cls, data)
            if others := {effect.mode for effect in read.effects} - set(MODES):
                raise ValueError(f"a mode is {' or '.join(MODES)}, not {', '.join(map(repr, sorted(others)))}")
            return read
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise SensitivityError(f"{file} holds no sensitivity, which save writes ({what}). Measure again.") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to ``path`` as JSON.

        Raises:
            OSError: the file cannot be written.
        """
        write_whole(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Sensitivity:
        """Read the sensitivity that :meth:`save` wrote to ``path``.

        Raises:
            SensitivityError: the file cannot be read, or holds none.
        """
        try:
            text = read_whole(Path(path))
        except (OSError, UnicodeDecodeError) as error:
            what = getattr(error, "strerror", None) or error
            raise SensitivityError(f"cannot read {path}: {what}. Sensitivity.save writes such a file.") from None
        return cls.from_json(text, file=str(path))


def rms(signature: Iterable[float]) -> float:
    """Return the root mean square: the relative error that a signature stands for."""
    squares = [number * number for number in signature]
    return math.sqrt(sum(squares) / len(squares)) if squares else 0.0


def shared_directions(probes: int) -> int:
    """Return how many random directions are the same in all batches, to tell a bias: half of them, the first ones."""
    return (probes + 1) // 2


def added(signatures: Iterable[Signature]) -> Signature:
    """Add up signatures: what several roundings do together, to first order."""
    return tuple(map(sum, zip(*signatures, strict=True)))


@dataclass(frozen=True)
class Effect(MeasuredNode):
    """The effect of a node in 16 bits on the target.

    Attributes:
        mode: ``"train"`` or ``"eval"``.
        name: the node's name.
        op: its op name.
        module: the path of the module that made it.
        computes: the effect of the 16-bit kernel, forwards and backwards, on inputs that are rounded already. Empty
            where no 16-bit kernel ran, or nothing is computed.
        reads: by the name of each float32 value that it reads: the effect of rounding that value for this read.
        returns: by the name of each value, the effect of rounding the gradient that comes back from this read: what
            happens where the value is stored in 16 bits, and this node reads it in float32.
        overflows: a finite float32 value was beyond the 16-bit dtype's range.
        products: by the word of each of its matrix products that ran: the effect of float8 operands in that product.
        sizes: M, N and K of those products, ``[M, K] @ [K, N]`` being that of the output, on the first batch; empty
            where float8 was not measured.
    """

    computes: Signature = ()
    reads: Mapping[str, Signature] = field(default_factory=dict[str, Signature])
    returns: Mapping[str, Signature] = field(default_factory=dict[str, Signature])
    overflows: bool = False
    products: Mapping[str, Signature] = field(default_factory=dict[str, Signature])
    sizes: tuple[int, ...] = ()

    @property
    def flops(self) -> int:
        """The floating-point operations of each of its products: 2·M·N·K."""
        return 2 * math.prod(self.sizes) if self.sizes else 0

    @property
    def error(self) -> float:
        """The relative error of the target if this node alone runs in 16 bits."""
        parts = [signature for signature in (self.computes, *self.reads.values()) if signature]
        return rms(added(parts)) if parts else 0.0

    def merged(self, other: Effect) -> Effect:
        """Append what further batches gave."""
        return dataclasses.replace(
            self,
            computes=_appended(self.computes, other.computes),
            reads=_each(self.reads, other.reads),
            returns=_each(self.returns, other.returns),
            overflows=self.overflows or other.overflows,
            products=_each(self.products, other.products),
        )


def _appended(first: Signature, then: Signature) -> Signature:
    """Append, if both were measured: a node that one batch could not measure is not measured."""
    return (*first, *then) if first and then else ()


def _each(first: Mapping[str, Signature], then: Mapping[str, Signature]) -> dict[str, Signature]:
    return {name: _appended(signature, then[name]) for name, signature in first.items() if name in then}


def _mean(of_batches: Sequence[tuple[int, float]]) -> float:
    """The root mean square, by numbers of batches."""
    return math.sqrt(sum(n * error**2 for n, error in of_batches) / sum(n for n, _ in of_batches))
