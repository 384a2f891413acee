"""The criterion of the zoo: the allowed distance of a converted model from float32, relative to torch.autocast's.

Each output, buffer, mutated input and gradient is judged separately, because in one vector of all a small tensor could
be entirely wrong. With the default settings each may be at most 1.2 times torch.autocast's distance, plus the dtype's
epsilon, away. With ``fold="kernel"`` outputs, and all gradients as one vector, may be at twice torch.autocast's
distance, and each gradient at ten times. Distances are taken over several draws of the inputs, because in a single draw
one unit of a ReLU that rounding switches off may dominate a tensor's distance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Where torch.autocast itself fails, its distance is taken to be this many eps: about the median of the zoo.
ASSUMED_EPS = 2
_LEAST = 1e-6


@dataclass(frozen=True)
class Level:
    """The allowed multiples of torch.autocast's distance: for a value, for all gradients as one, and for each."""

    value: float
    gradients: float
    gradient: float


LEVELS = {"exact": Level(1.2, 1.2, 1.2), "kernel": Level(2, 2, 10)}  # by the fold that a model is converted with


@dataclass(frozen=True)
class Forward:
    """A forward: its tensor outputs, and the floating buffers and inputs after it, which it may change."""

    outputs: Mapping[str, Tensor]
    buffers: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]


@dataclass(frozen=True)
class Distance:
    """The distances of a value from float32's: ours, and torch.autocast's (or an assumed one)."""

    name: str
    ours: float
    autocast: float

    @property
    def ratio(self) -> float:
        """Our distance divided by torch.autocast's; 1 if both are 0."""
        if self.autocast == 0:
            return 1.0 if self.ours == 0 else math.inf
        return self.ours / self.autocast

    def bound(self, times: float, eps: float) -> float:
        """The largest allowed distance of ours."""
        return times * self.autocast + eps

    def fails(self, times: float, eps: float) -> bool:
        """True if our distance exceeds the bound, or is NaN."""
        return not (math.isfinite(self.ours) and self.ours <= self.bound(times, eps))

    def said(self, times: float, eps: float) -> str:
        """Write the distances for a row's reason."""
        return (
            f"{self.name}: distance {self.ours:.2e} against {self.autocast:.2e}, allowed {self.bound(times, eps):.2e}"
        )


def typical(found: Sequence[Distance]) -> Distance:
    """Return a value's distance over all draws: the geometric mean, which a single unlucky draw does not decide.

    If one distance is NaN or infinite, so is the result. One below ``_LEAST`` counts as ``_LEAST``.
    """
    ours, autocast = (_geometric_mean(side) for side in zip(*((d.ours, d.autocast) for d in found), strict=True))
    return Distance(found[0].name, ours, autocast)


def _geometric_mean(found: Sequence[float]) -> float:
    if len(set(found)) == 1 or not all(map(math.isfinite, found)):
        return max(found, key=lambda x: (math.isnan(x), x))
    return math.exp(math.fsum(math.log(max(x, _LEAST)) for x in found) / len(found))


def worst(found: Iterable[Distance], times: float, eps: float) -> Distance:
    """Return the distance that is nearest to its bound, or farthest beyond."""
    return max(found, key=lambda d: math.inf if math.isnan(d.ours) else d.ours / d.bound(times, eps))


def distance(ours: Tensor, reference: Tensor) -> float:
    """Return the relative L2 distance, without elements that are the same infinity, or NaN, in both."""
    if ours.shape != reference.shape:
        return math.inf
    kind = torch.complex128 if reference.is_complex() else torch.float64
    a, b = ours.detach().to(kind), reference.detach().to(kind)
    same = (a == b) | (a.isnan() & b.isnan())
    difference = (a - b).masked_fill(same, 0.0).norm().item()
    norm = b.where(b.isfinite(), 0.0).norm().item()
    relative = difference / norm if norm > 0 else difference
    return math.inf if math.isnan(relative) else relative


def outputs_apart(ours: Forward, autocast: Forward | None, reference: Forward, eps: float) -> list[Distance]:
    """Return the distances of each floating output, of all buffers as one vector, and of all inputs as one vector.

    A single running mean of centred values may consist of rounding errors only, and would fail any bound.
    """
    theirs = dict(_values(autocast)) if autocast is not None else None
    mine = dict(_values(ours))
    return [
        Distance(
            name, distance(mine[name], right), ASSUMED_EPS * eps if theirs is None else distance(theirs[name], right)
        )
        for name, right in _values(reference)
    ]


def gradients_apart(
    ours: Mapping[str, Tensor], autocast: Mapping[str, Tensor] | None, reference: Mapping[str, Tensor], eps: float
) -> tuple[Distance, list[Distance]]:
    """Return the distance of all gradients as one vector, and of each separately."""
    names = list(reference)
    right = {name: reference[name] for name in names}

    def whole(found: Mapping[str, Tensor]) -> float:
        return distance(_vector(found[name] for name in names), _vector(right.values()))

    assumed = ASSUMED_EPS * eps
    mine = gradient_distances(ours, right)
    theirs = dict.fromkeys(names, assumed) if autocast is None else gradient_distances(autocast, right)
    one = Distance("gradients", whole(ours), assumed if autocast is None else whole(autocast))
    return one, [Distance(name, mine[name], theirs[name]) for name in names]


def gradient_scales(reference: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the scale of each gradient's error: its norm, but at least that of a typical gradient of its module.

    Some parameters have a true gradient of zero: a bias before a batch norm, or the keys' bias in attention. Their
    computed gradient is rounding noise. It comes from the same output gradients as the gradient of the weight in the
    same module: elements of both are sums over the same rows, and inputs are about 1. If each term is off by an
    epsilon, so is each sum, relative to a typical element of the module's gradients. The smallest scale of a tensor is
    therefore the root mean square of its module's gradients times the square root of its number of elements. Noise
    then counts as about an epsilon, and larger gradients are judged by their own norm.

    Args:
        reference: float32 gradients by parameter name, those of a module under ``module.name``.
    """
    squares, counts = dict[str, float](), dict[str, int]()
    norms = {name: float(gradient.detach().double().norm()) for name, gradient in reference.items()}
    for name, gradient in reference.items():
        module = name.rpartition(".")[0]
        squares[module] = squares.get(module, 0.0) + norms[name] ** 2
        counts[module] = counts.get(module, 0) + gradient.numel()
    typical = {module: math.sqrt(square / max(1, counts[module])) for module, square in squares.items()}
    floors = {name: typical[name.rpartition(".")[0]] * math.sqrt(g.numel()) for name, g in reference.items()}
    return {name: max(norm, floors[name]) for name, norm in norms.items()}


def gradient_distances(ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the error of each gradient of ``reference``, divided by its scale if that is not zero.

    Elements with the same infinity, or NaN in both, do not count; other non-finite errors count as infinite.
    """
    scales, found = gradient_scales(_finite(reference)), dict[str, float]()
    for name, right in reference.items():
        a, b = ours[name].detach().double(), right.detach().double()
        error = float((a - b).masked_fill((a == b) | (a.isnan() & b.isnan()), 0.0).norm())
        relative = error / scales[name] if scales[name] > 0 else error
        found[name] = math.inf if math.isnan(relative) else relative
    return found


def _finite(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: gradient.detach().where(gradient.isfinite(), 0.0) for name, gradient in gradients.items()}


def _values(forward: Forward) -> Iterator[tuple[str, Tensor]]:
    yield from ((name, value) for name, value in forward.outputs.items() if value.is_floating_point())
    yield "buffers", _vector(forward.buffers)
    yield "inputs", _vector(forward.inputs)


def _vector(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([torch.empty(0), *(tensor.flatten() for tensor in tensors)])
