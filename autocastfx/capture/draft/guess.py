"""Infer dtypes and ranks without inputs, by running operators on stand-ins: tensors of size 1 in every dimension.

An input may have any dtype and rank until an operator accepts only some: the index of an embedding is an integer, the
input of a convolution with float32 weights is float32 and has a batch. Each operator runs with every combination of its
inputs' possible dtypes and ranks, and those that it refuses are ruled out.
"""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from autocastfx.graph.names import op_name
from autocastfx.graph.node import set_value, value

_MOST_RUNS = 600
_ones, _zeros = torch.ones, torch.zeros  # the originals: a trace replaces them in torch by recording functions
_STARTS = ("start", "index", "storage_offset")
# Integer arguments that are not sizes: they mean the same for tensors of size 1.
_NO_SIZE = re.compile(r"dim|^(source|destination|reduction|diagonal|offset|ignore_index|padding_idx|num_layers)")
_OF_N_LESS_ONE = ("correction", "unbiased")  # set to 0, because torch warns of the variance of one value


@dataclass(frozen=True)
class Guess:
    """The possible dtypes and ranks (numbers of dimensions) of a tensor, the likeliest first."""

    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64, torch.int64, torch.bool)
    ranks: tuple[int, ...] = (2, 3, 4, 1, 5)

    @classmethod
    def of(cls, *tensors: torch.Tensor) -> Guess:
        """Make the guess that allows the dtypes and the ranks of ``tensors``."""
        return cls(tuple(dict.fromkeys(t.dtype for t in tensors)), tuple(dict.fromkeys(t.ndim for t in tensors)))

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype; None if there are several."""
        return self.dtypes[0] if len(self.dtypes) == 1 else None

    @property
    def rank(self) -> int | None:
        """The rank; None if there are several."""
        return self.ranks[0] if len(self.ranks) == 1 else None

    @property
    def is_certain(self) -> bool:
        """True if dtype and rank are known."""
        return len(self.dtypes) == len(self.ranks) == 1

    def narrowed(self, other: Guess) -> Guess:
        """Return the dtypes and the ranks that both guesses allow; if they share none, this guess's."""
        dtypes = tuple(d for d in self.dtypes if d in other.dtypes)
        ranks = tuple(r for r in self.ranks if r in other.ranks)
        return Guess(dtypes or self.dtypes, ranks or self.ranks)

    def each(self) -> Iterator[Guess]:
        """Yield every combination of a dtype and a rank, as a certain guess."""
        return (Guess((d,), (r,)) for d, r in itertools.product(self.dtypes, self.ranks))

    def stand_in(self) -> torch.Tensor:
        """Make the likeliest tensor, with size 1 in every dimension."""
        shape, dtype = (1,) * self.ranks[0], self.dtypes[0]
        computes = dtype.is_floating_point or dtype.is_complex  # an index of 1 would be out of range
        return _ones(shape, dtype=dtype) if computes else _zeros(shape, dtype=dtype)


ANY = Guess()


@dataclass
class StandIns:
    """The guesses of one trace.

    Attributes:
        hints: findings of earlier traces of the model, by node name; new ones are added.
        open: the guesses that are not certain, by node.
        members: for a tuple or list with an uncertain member, the guesses of all members.
        is_late: True if this trace narrowed a guess that another node had used before.
    """

    hints: dict[str, Guess] = field(default_factory=dict[str, Guess])
    open: dict[fx.Node, Guess] = field(default_factory=dict[fx.Node, Guess])
    members: dict[fx.Node, tuple[Guess, ...]] = field(default_factory=dict[fx.Node, tuple[Guess, ...]])
    is_late: bool = False

    def guess(self, node: fx.Node) -> Guess:
        """Return the guess of a tensor."""
        return self.open.get(node) or Guess.of(value(node))

    def begin(self, node: fx.Node, guess: Guess) -> None:
        """Record the guess of a tensor that no operator computes."""
        self._note(node, guess.narrowed(self.hints.get(node.name, ANY)))

    def pin(self, node: fx.Node, guess: Guess) -> None:
        """Narrow the guess of ``node``, for this trace and further ones."""
        if node in self.open and (narrowed := self.open[node].narrowed(guess)) != self.open[node]:
            self.hints[node.name] = narrowed
            self.is_late = self.is_late or len(node.users) > 1
            self._note(node, narrowed)

    def _note(self, node: fx.Node, guess: Guess) -> None:
        set_value(node, guess.stand_in())
        self.open[node] = guess
        if guess.is_certain:
            del self.open[node]

    def infer(self, node: fx.Node) -> None:
        """Run a computing node on stand-ins, to get its abstract value and narrow the guesses of its inputs."""
        reads = [read for read in node.all_input_nodes if read in self.open]
        runs = list(self._runs(node, reads))
        for read, taken in zip(reads, zip(*[choice for choice, _ in runs], strict=True), strict=False):
            self._learn(read, taken)
        results = [result for choice, result in runs if all(map(self._allows, reads, choice))]
        set_value(node, results[0] if results else self._unrun(node))
        outputs = [_tensors(result) for result in results] or [[t] for t in _tensors(value(node))]
        guesses = (
            [Guess.of(*each) for each in zip(*outputs, strict=False)]
            if results
            else [self._widest(node)] * len(outputs)
        )
        if (member := self._member(node)) is not None:
            guesses = [member]
        if not isinstance(value(node), torch.Tensor):
            if not all(guess.is_certain for guess in guesses):
                self.members[node] = tuple(guesses)
        elif not guesses[0].is_certain:
            self._note(node, guesses[0].narrowed(self.hints.get(node.name, ANY)))

    def _allows(self, node: fx.Node, guess: Guess) -> bool:
        known = self.guess(node)
        return guess.dtypes[0] in known.dtypes and guess.ranks[0] in known.ranks

    def _learn(self, read: fx.Node, taken: tuple[Guess, ...]) -> None:
        ranks = tuple(dict.fromkeys(guess.ranks[0] for guess in taken))
        if len(ranks) == 2:  # with and without a batch: inputs come in batches
            ranks = (max(ranks),)
        self.pin(read, Guess(tuple(dict.fromkeys(guess.dtypes[0] for guess in taken)), ranks))

    def _member(self, node: fx.Node) -> Guess | None:
        """Return the guess of the member that ``node`` takes out of an uncertain tuple or list; else None."""
        container = node.all_input_nodes[0] if node.all_input_nodes else None
        if container not in self.members or op_name(node) != "getitem" or not isinstance(node.args[1], int):
            return None
        return self.members[container][min(node.args[1], len(self.members[container]) - 1)]

    def _runs(self, node: fx.Node, reads: list[fx.Node]) -> Iterator[tuple[tuple[Guess, ...], Any]]:
        """Yield each combination of guesses that ``node`` accepts for its uncertain inputs, with its result."""
        guesses = [self.open[read] for read in reads]
        for choice in _choices(guesses):
            ran, result = _run(node, {read: guess.stand_in() for read, guess in zip(reads, choice, strict=True)})
            if ran:
                yield choice, result

    def _unrun(self, node: fx.Node) -> Any:
        """Make an abstract value from the schema of an operator that does not run on stand-ins."""
        stand_in = self._widest(node).stand_in()
        if not isinstance(node.target, OpOverload):
            return stand_in
        kinds = [str(r.type) for r in node.target._schema.returns]
        made = {"Tensor": stand_in, "List[Tensor]": [stand_in]}
        results = tuple(made.get(kind, 1) for kind in kinds)
        return results[0] if len(results) == 1 else results

    def _widest(self, node: fx.Node) -> Guess:
        """Return a guess with the dtype that the floating inputs of ``node`` promote to; any if there are none."""
        widest: torch.dtype | None = None
        for read in node.all_input_nodes:
            for tensor in _tensors(value(read)) if read not in self.open or self.open[read].dtype else []:
                if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
                    widest = torch.promote_types(widest or tensor.dtype, tensor.dtype)
        return Guess((widest,)) if widest is not None else ANY


def _choices(guesses: list[Guess]) -> Iterator[tuple[Guess, ...]]:
    """Yield every combination; if these are too many, those where all inputs share a dtype and a rank if they can."""
    each = [list(guess.each()) for guess in guesses]
    if math.prod(map(len, each)) <= _MOST_RUNS:
        yield from itertools.product(*each)
        return
    for same in ANY.each():
        yield tuple(Guess(g.narrowed(same).dtypes[:1], g.narrowed(same).ranks[:1]) for g in guesses)


def _tensors(abstract: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(abstract) if isinstance(leaf, torch.Tensor)]


def _run(node: fx.Node, others: Mapping[fx.Node, torch.Tensor]) -> tuple[bool, Any]:
    """Run ``node`` on stand-ins. Returns True and its result, or False if it raises."""
    args, kwargs = map_arg(_small(node), lambda n: others.get(n, value(n)))
    target: Any = node.target
    foreign = isinstance(target, OpOverload) and target.namespace != "aten"  # runs on abstract values alone
    if foreign:
        args, kwargs = pytree.tree_map(_abstract, (args, kwargs))
    call: Callable[..., Any] = target if callable(target) else getattr(torch.Tensor, str(target))
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = call(*args, **kwargs)
    except Exception:  # kernels raise various errors for sizes and dtypes that they do not take
        return False, None
    if foreign:
        result = pytree.tree_map(_concrete, result)
    return True, result


def _abstract(leaf: object) -> object:
    return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf


def _concrete(leaf: object) -> object:
    return Guess.of(leaf).stand_in() if isinstance(leaf, torch.Tensor) else leaf


def _small(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of ``node`` with numbers limited to fit sizes of 1."""
    if op_name(node) == "getitem":
        container, index = node.args
        if isinstance(index, int) and isinstance(container, fx.Node) and isinstance(value(container), (tuple, list)):
            return (container, min(index, len(value(container)) - 1)), {}  # of a list whose length is not known
        return (container, pytree.tree_map(_first, index)), {}
    if not isinstance(node.target, OpOverload):
        return node.args, dict(node.kwargs)
    kinds = {a.name: str(a.type) for a in node.target._schema.arguments}

    def small(name: str, arg: Any) -> Any:
        if "int" not in kinds[name] or _NO_SIZE.search(name):
            return arg
        limit = 0 if name in _STARTS else 1

        def limited(number: object) -> object:
            return min(number, limit) if type(number) is int else number

        return pytree.tree_map(limited, arg)

    given = {**dict(zip(kinds, node.args, strict=False)), **node.kwargs}
    given = {name: small(name, arg) for name, arg in given.items()}
    given.update(dict.fromkeys((name for name in _OF_N_LESS_ONE if name in kinds), 0))
    return tuple(given.pop(name) for name in list(kinds)[: len(node.args)]), given


def _first(index: Any) -> Any:
    if isinstance(index, slice):
        return slice(None)
    return max(min(index, 0), -1) if type(index) is int else index
