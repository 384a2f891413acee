"""Measure, on one batch, what each node in 16 bits does to a model's output or to its gradient."""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from autocastfx.errors import SensitivityError
from autocastfx.graph.alias import AliasSet, alias_sets, mutated_inputs
from autocastfx.graph.names import base_name, op_name
from autocastfx.graph.node import Use, draws_random_numbers, dtypes, is_float32, module_path, uses
from autocastfx.numerics.flat_graph import FlatGraph
from autocastfx.numerics.paired_run import floating, run_side_by_side
from autocastfx.numerics.probe_run import ProbeRun, Project, signs
from autocastfx.numerics.product_effects import ProductDifferences, product_differences
from autocastfx.numerics.segments import NotDifferentiableError, Read, Receivers, SegmentRun
from autocastfx.passes.analysis.units import Ports
from autocastfx.plan.sensitivity import OUTPUT, Effect, Signature
from autocastfx.policy.float8 import Product
from autocastfx.runtime.amp_module import AmpModule


@dataclass(frozen=True)
class KernelDifference:
    """The difference between the 16-bit and the float32 kernel of a node.

    Attributes:
        values: of each float32 tensor that it gives, in bfloat16; None where there is none.
        gradients: of the gradient by each of its reads, likewise.
    """

    values: tuple[torch.Tensor | None, ...]
    gradients: tuple[torch.Tensor | None, ...]


@dataclass
class NodeEffects:
    """The effects of one batch.

    Attributes:
        run: the batch, run in float32.
        replay: runs a node in 16 bits. Its scale is set here.
        mode: ``"train"`` or ``"eval"``.
        seeds: one for each random projection. If one is that of the projection before, the jumps of gradients have the
            opposite signs, to be told from what is smooth.
        jumped: for each node whose gradient jumped, by how much the converted model changes what it reads, over by how
            much that was changed to see jumps, squared. Set here.
        errors: of nodes whose gradient switches, by name: those of the converted model there.
        float8: the recipe by which products are measured in float8; empty: they are not.
        unmeasured: names of nodes that could not be measured, with the reason.
    """

    run: ProbeRun
    replay: Replay
    mode: str
    seeds: Sequence[int]
    errors: Mapping[str, float] = field(default_factory=dict[str, float])
    float8: str = ""
    unmeasured: dict[str, str] = field(default_factory=dict[str, str])
    jumped: list[float] = field(default_factory=list[float])
    _kernels: dict[fx.Node, KernelDifference] = field(default_factory=dict[fx.Node, KernelDifference])
    _products: dict[fx.Node, ProductDifferences] = field(default_factory=dict[fx.Node, ProductDifferences])
    _sums: dict[fx.Node, _Sums] = field(default_factory=lambda: defaultdict(dict))
    _read: _Changes = field(default_factory=dict[fx.Node, torch.Tensor])
    _returned: dict[tuple[fx.Node, int], torch.Tensor] = field(default_factory=dict[tuple[fx.Node, int], torch.Tensor])
    _beyond: set[fx.Node] = field(default_factory=set[fx.Node])
    _jumps: dict[tuple[fx.Node, int], torch.Tensor] = field(default_factory=dict[tuple[fx.Node, int], torch.Tensor])
    _tangents: dict[tuple[fx.Node, int], torch.Tensor] = field(default_factory=dict[tuple[fx.Node, int], torch.Tensor])
    _seed: int = 0
    _sign: int = 1

    def of_gradient(self, loss: torch.Tensor) -> tuple[Effect, ...]:
        """Measure the effects on the gradient of ``loss`` by all parameters.

        Raises:
            SensitivityError: the gradient is zero or not finite, or an op cannot be differentiated twice.
        """
        taken = Receivers(value=self._at_value, read=self._at_read, tangent=self._at_tangent)
        try:
            self.run.differentiate(loss)
            norm = _norm(self.run.gradients.values(), "gradient")
            self.replay = replace(self.replay, scale=gradient_scale(self.run.largest, self.replay.low))
            return self._effects(self.run.projections(self.seeds), taken, norm)
        except NotDifferentiableError as error:
            raise SensitivityError(
                f"the gradient cannot be differentiated again: {error}. Measure of='output', which needs one backward "
                "pass alone."
            ) from error

    def of_output(self) -> tuple[Effect, ...]:
        """Measure the effects on the model's floating-point outputs, as one vector.

        Raises:
            SensitivityError: there is none, or it is zero or not finite.
        """
        results = [t for t in pytree.tree_leaves(self.run.output) if isinstance(t, torch.Tensor)]
        results = [t for t in results if t.is_floating_point()]
        norm = _norm(results, "output")
        taken = Receivers(value=self._at_value, read=self._at_read)
        return self._effects(self.run.projections(self.seeds, results), taken, norm)

    def _effects(
        self, pieces: Iterable[tuple[SegmentRun, Project]], taken: Receivers, norm: float
    ) -> tuple[Effect, ...]:
        piece_effects: list[tuple[Effect, ...]] = []
        for piece, project in pieces:
            self._jump_all(piece)
            self._replay_all(piece)
            self._round_all(piece)
            piece.forget()
            rows: list[dict[fx.Node, _Sums]] = []
            for number, seed in enumerate(self.seeds):
                self._sums, self._seed = defaultdict(dict), seed
                self._sign = -1 if number and seed == self.seeds[number - 1] else 1
                project(number, taken)
                self._tangents.clear()
                rows.append(self._sums)
            piece_effects.append(self._of_piece(piece, rows, norm))
            self._kernels, self._products, self._read, self._returned, self._jumps = {}, {}, {}, {}, {}
        return tuple(effect for effects in reversed(piece_effects) for effect in effects)

    def _jump_all(self, piece: SegmentRun) -> None:
        switches, low = self.replay.ports.facts.switches, self.replay.low
        for node, reads in piece.reads.items():
            known = piece.at_values.get(node, {})
            if op_name(node) not in switches or not known or node in piece.unmeasured:
                continue
            # A list may leave it in float32, and a pass may have replaced it: then one rounding is what moves it.
            least = max(least_error(value, low) for value in _of_float32(piece.values[node]))
            converted = self.errors.get(self.run.flat.names[node])
            error = max(converted or 0.0, least)
            if error > 0:
                gradients = [known.get(number) for number in range(max(known) + 1)]
                gradient_jumps = jumps(self.replay, node, piece.values.__getitem__, reads, gradients, error)
                self.jumped.append(1.0 if converted is None else (converted / error) ** 2)
                self._jumps |= {(node, place): jump for place, jump in gradient_jumps.items()}

    def _replay_all(self, piece: SegmentRun) -> None:
        names = self.run.flat.names
        for node, reads in piece.reads.items():
            if not reads or node in piece.unmeasured or not _of_float32(piece.values.get(node)):
                continue
            if not isinstance(node.target, OpOverload):
                continue
            known = piece.at_values.pop(node, {})
            gradients = [known.get(number) for number in range(max(known, default=-1) + 1)]
            try:
                self._kernels[node] = self.replay(node, piece.values.__getitem__, reads, gradients)
            except (RuntimeError, NotImplementedError, TypeError) as error:  # there is no 16-bit kernel
                said = next(iter(str(error).splitlines()), "")
                self.unmeasured[names[node]] = f"its kernel in 16 bits raises: {said}"
                continue
            if self.float8:
                gradient, values = gradients[0] if gradients else None, piece.values.__getitem__
                products = product_differences(self.float8, node, values, reads, gradient, piece.returned)
                if products is not None:
                    self._products[node] = products
        for node, why in piece.unmeasured.items():
            if _of_float32(piece.values.get(node)):
                self.unmeasured[names[node]] = why

    def _round_all(self, piece: SegmentRun) -> None:
        roundings, most = Roundings(self.replay.low), torch.finfo(self.replay.low).max
        for read in (read for reads in piece.reads.values() for read in reads):
            made = read.use.node
            if read.node in self._kernels and not self.replay.ports.stays_float32(read.node, read.use):
                self._read[made] = roundings(piece.values[made])
            if (returned := piece.returned.get((read.node, read.place))) is not None:
                self._returned[read.node, read.place] = roundings(returned, self.replay.scale)
        self._beyond = {node for node, value in piece.values.items() if _is_beyond(value, most)}

    def _at_value(self, node: fx.Node, number: int, adjoint: torch.Tensor) -> None:
        kernel = self._kernels.get(node)
        if kernel is not None and number < len(kernel.values) and (changed := kernel.values[number]) is not None:
            self._add(node, "computes", "", adjoint, changed)
        if (products := self._products.get(node)) is not None and products.output is not None:
            self._add(node, "products", Product.OUTPUT.value, adjoint, products.output)

    def _at_read(self, read: Read, adjoint: torch.Tensor) -> torch.Tensor | None:
        if read.node in self._kernels and not self.replay.ports.stays_float32(read.node, read.use):
            self._add(read.node, "reads", self.run.flat.names[read.use.node], adjoint, self._read[read.use.node])
        tangent = self._tangents.pop((read.node, read.place), None)
        if tangent is None:
            return None
        # As if it were one more projection, of signs of its own: the squares of both add up.
        jump = self._sign * self._jumps[read.node, read.place] * tangent
        return jump * signs(jump, self._seed + zlib.crc32(f"{self.run.flat.names[read.node]} {read.place}".encode()))

    def _at_tangent(self, read: Read, tangent: torch.Tensor) -> None:
        if (read.node, read.place) in self._jumps:
            self._tangents[read.node, read.place] = tangent
        kernel = self._kernels.get(read.node)
        if kernel is not None and (changed := kernel.gradients[read.place]) is not None:
            self._add(read.node, "computes", "", tangent, changed)
        if (changed := self._returned.get((read.node, read.place))) is not None:
            self._add(read.node, "returns", self.run.flat.names[read.use.node], tangent, changed)
        products = self._products.get(read.node)
        if products is not None and read.place in products.gradients:
            product, changed = products.gradients[read.place]
            self._add(read.node, "products", product.value, tangent, changed)

    def _add(self, node: fx.Node, what: str, name: str, by: torch.Tensor, changed: torch.Tensor) -> None:
        """Add a first-order effect: the gradient by a tensor, times the change of that tensor."""
        if by.is_contiguous() and changed.is_contiguous():
            effect = torch.dot(by.view(-1), changed.view(-1).float())
        else:
            effect = (by * changed).sum()
        sums = self._sums[node]
        sums[what, name] = sums[what, name] + effect if (what, name) in sums else effect

    def _of_piece(self, piece: SegmentRun, rows: list[dict[fx.Node, _Sums]], norm: float) -> tuple[Effect, ...]:
        effects: list[Effect] = []
        for node in piece.reads:
            is_output = node.op == "output"
            if not (is_output or node in self._kernels):
                continue
            keys = dict.fromkeys(key for row in rows for key in row.get(node, ()))
            zero = torch.zeros((), device="cpu")
            columns = {key: tuple(float(row.get(node, {}).get(key, zero)) / norm for row in rows) for key in keys}
            seen = (node, *filter(is_float32, node.all_input_nodes))
            overflows = not is_output and not self._beyond.isdisjoint(seen)
            effects.append(self._effect(node, columns, overflows=overflows))
        return tuple(effects)

    def _effect(self, node: fx.Node, columns: Mapping[tuple[str, str], Signature], *, overflows: bool) -> Effect:
        flat, ran = self.run.flat, self._products.get(node)
        op = flat.ops.get(node) or op_name(node)
        key = (OUTPUT, OUTPUT, "") if node.op == "output" else (flat.names[node], op, module_path(node))
        named = {what: {n: c for (w, n), c in columns.items() if w == what} for what in ("reads", "returns")}
        zeros = (0.0,) * len(self.seeds)  # of what changes nothing
        products = ran.products if ran is not None else ()
        return Effect(
            *(self.mode, *key),
            computes=columns.get(("computes", ""), zeros),
            **named,
            overflows=overflows,
            products={product.value: columns.get(("products", product.value), zeros) for product in products},
            sizes=ran.sizes if ran is not None else (),
        )


# Replace ops that write into what they read, where no other value shows it: ``relu_`` becomes ``relu``.


def write_out_of_place(flat: FlatGraph) -> None:
    """Replace the ops in ``flat``, in place; ``flat.ops`` keeps the names that they had.

    A storage keeps its writers if one of them has no op to take its place, or if its values from before a write are
    read later: those show the write.
    """
    order = {node: i for i, node in enumerate(flat.graph.nodes)}
    for shared in {one.root: one for one in alias_sets(flat.graph).values()}.values():
        targets = dict(_replaced(shared, order))
        if targets and None not in targets.values():
            for writer, target in targets.items():
                flat.ops[writer] = op_name(writer)
                writer.target = cast("OpOverload", target)


def _replaced(shared: AliasSet, order: dict[fx.Node, int]) -> Iterator[tuple[fx.Node, OpOverload | None]]:
    """Each writer of a storage, with the op to take its place; None if there is none."""
    for writer in (node for node in shared.members if mutated_inputs(node)):
        before = [node for node in shared.members if order[node] < order[writer]]
        is_seen = any(order[user] > order[writer] for node in before for user in node.users)
        is_own = shared.root.op == "call_function" and mutated_inputs(writer) == tuple(writer.all_input_nodes[:1])
        yield writer, None if is_seen or not is_own else _out_of_place(writer)


def _out_of_place(writer: fx.Node) -> OpOverload | None:
    target = cast("OpOverload", writer.target)
    packet = getattr(getattr(torch.ops, target.namespace), base_name(op_name(writer)), None)
    overload = getattr(packet, target._overloadname, None)
    read = {dtype for node in writer.all_input_nodes for dtype in dtypes(node) if dtype.is_floating_point}
    if not isinstance(overload, OpOverload) or overload is target or read != set(dtypes(writer)):  # it would promote
        return None
    ours, theirs = ([argument.name for argument in op._schema.arguments] for op in (target, overload))
    return overload if ours == theirs else None


# Run one node in 16 bits and in float32 on the same rounded inputs: the difference is what its kernel rounds.

_KEPT = torch.bfloat16  # of a difference itself, 8 bits are enough


def rounding(value: torch.Tensor, low: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """Return what rounding a float32 ``value`` to ``low`` changes; nothing where it is infinite.

    It is multiplied by ``scale``, a power of two, to be held in ``low``.
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


def _kept(changed: torch.Tensor) -> torch.Tensor:
    return changed.to(_KEPT).nan_to_num_(0.0, 0.0, 0.0)  # infinite numbers hide what they are added to


def _counted(low: torch.Tensor | None, full: torch.Tensor | None) -> torch.Tensor | None:
    if low is None or full is None:
        return None
    changed = _kept(low - full)
    return changed if bool(changed.any()) else None


@dataclass(frozen=True)
class Roundings:
    """The changes that rounding to ``low`` makes to tensors, computed once for each storage."""

    low: torch.dtype
    _kept: dict[tuple[int, float], torch.Tensor] = field(default_factory=dict[tuple[int, float], torch.Tensor])

    def __call__(self, value: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Return the change of a float32 ``value``, in bfloat16, in its shape. The caller holds it as long as others
        are asked for.
        """
        storage = value.untyped_storage()
        key = (storage._cdata, scale)
        if key not in self._kept:
            whole = value.detach().as_strided((storage.nbytes() // value.element_size(),), (1,), 0)
            self._kept[key] = _kept(rounding(whole, self.low, scale))
        return self._kept[key].as_strided(value.size(), value.stride(), value.storage_offset())


@dataclass(frozen=True)
class Replay:
    """The replays of one run.

    Attributes:
        ports: the inputs that a node takes in float32, and its operator in 16 bits.
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
    ) -> KernelDifference:
        """Run ``node``, of a captured graph, twice.

        ``values`` tells what a node gave in float32, ``reads`` are this one's float32 reads, in order, and
        ``gradients`` are by each float32 tensor that it gives; without any it runs forwards alone.

        Raises:
            Exception: whatever the 16-bit kernel raises.
        """
        if draws_random_numbers(node):  # other dtypes draw other numbers
            made = (_kept(rounding(t, self.low)) for t in _of_float32(values(node)))
            return KernelDifference(tuple(made), (None,) * len(reads))
        exact = ((read, values(read.use.node).detach()) for read in reads)
        is_wide = self.ports.stays_float32
        inputs = {r.use: t if is_wide(r.node, r.use) else saturated(t, self.low) for r, t in exact}
        back = [None if g is None else _times(g, self.scale).to(self.low) for g in gradients]
        low, low_gradients = self._run(node, values, inputs, back, is_low=True)
        full, full_gradients = self._run(node, values, inputs, back, is_low=False)
        pairs = zip(low_gradients, full_gradients, strict=True)
        return KernelDifference(
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
        """Return the gradients by ``inputs``, what each float32 read gets in order, in float32; the rest is as for a
        call.
        """
        return replace(self, scale=1.0)._run(node, values, inputs, gradients, is_low=False)[1]

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
            leaf_gradients: list[torch.Tensor | None] = [None] * len(leaves)
            roots = [(t, g) for t, g in zip(made, gradients, strict=False) if g is not None and t.requires_grad]
            if roots:
                given = [g.to(t.dtype) for t, g in roots]
                ends = [t for t, _ in roots]
                back = cast("Sequence[Any]", torch.autograd.grad(ends, leaves, given, allow_unused=True))
                leaf_gradients = [None if g is None else _times(g.float(), 1 / self.scale) for g in back]
        return [t.detach().float() for t in made], leaf_gradients


# Ops whose gradient switches: a change before a ReLU moves some of its inputs past zero, which no derivative shows.

# Inputs are moved farther than rounding moves them, so that enough of them switch to tell how much it matters. How many
# switch is proportional to how far they are moved.
_FARTHER = 8.0
_MASK = 1000.0  # times a usual value


def errors_at(ops: Set[str], amp_model: AmpModule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, float]:
    """Return by how much each node of ``ops`` gives other values converted than in float32: the root mean square.

    Zeros are left out, which a ReLU gives for all that is below, and so are masks.
    """
    if not any(base_name(node.op) in ops for variant in amp_model.variants for node in variant.plan.nodes):
        return {}
    errors: dict[str, float] = {}
    for step in run_side_by_side(None, amp_model, args, kwargs).steps():
        ours, full = floating(step.value), floating(step.reference)
        if step.twin is None or base_name(op_name(step.twin)) not in ops or not (ours and full):
            continue
        exact = full[0].float()
        errors[step.name] = _rms((ours[0].float() - exact)[_is_counted(exact.abs())])
    return errors


def least_error(value: torch.Tensor, low: torch.dtype) -> float:
    """Return the least root mean square that rounding ``value`` to ``low`` has, zeros and masks left out."""
    relative = torch.finfo(low).eps / math.sqrt(48)  # just below a power of two
    return relative * _rms(value[_is_counted(value.abs())])


def _rms(values: torch.Tensor) -> float:
    return math.sqrt(float(values.square().mean())) if values.numel() else 0.0


def _is_counted(sizes: torch.Tensor) -> torch.Tensor:
    """True for the values that are neither 0 nor as large as masks are, which may be more than half of all."""
    some = sizes[sizes > 0]
    usual = float(some.kthvalue(len(some) // 4 + 1).values) if len(some) else 0.0
    return (sizes > 0) & (sizes <= _MASK * usual)


def jumps(
    replay: Replay,
    node: fx.Node,
    values: Callable[[fx.Node], Any],
    reads: Sequence[Read],
    gradients: Sequence[torch.Tensor | None],
    error: float,
) -> dict[int, torch.Tensor]:
    """Return by how much the gradients by what ``node`` reads switch, for each unit of error there.

    Random changes of what it reads, whose root mean square is ``error``, make the gradients of some elements jump.
    These jumps, over ``error``, tell what another change does: times that, and added up with random signs, they have
    the mean square of its share in the jumps, if all changes together have the size ``error``. They are in bfloat16, by
    the place of a read. Other arguments are as for a call of :class:`Replay`.
    """
    inputs = {read.use: values(read.use.node).detach() for read in reads}
    before = replay.gradients(node, values, inputs, gradients)
    gradient_jumps: dict[int, torch.Tensor] = {}
    for read in reads:
        given = inputs[read.use]
        generator = torch.Generator().manual_seed(read.place)
        noise = torch.randn(given.shape, generator=generator, device="cpu").to(given.device)
        moved = {**inputs, read.use: given + noise * (error * _FARTHER)}
        here, there = before[read.place], replay.gradients(node, values, moved, gradients)[read.place]
        if here is not None and there is not None:
            gradient_jumps[read.place] = ((there - here) / (error * math.sqrt(_FARTHER))).to(torch.bfloat16)
    return gradient_jumps


_Sums = dict[tuple[str, str], torch.Tensor]
_Changes = dict[fx.Node, torch.Tensor]


def gradient_scale(largest: float, low: torch.dtype) -> float:
    """Return a loss scale: the largest power of two that leaves gradients a factor of 16 below ``low``'s range."""
    if low == torch.bfloat16 or not 0 < largest < math.inf:
        return 1.0
    return 2.0 ** max(0, min(24, math.floor(math.log2(torch.finfo(low).max / 16 / largest))))


def _of_float32(value: Any) -> list[torch.Tensor]:
    tensors = [t.detach() for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
    return [t for t in tensors if t.dtype == torch.float32]


def _is_beyond(value: Any, most: float) -> bool:
    """True if a finite number of float32 is larger than ``most``."""
    known = (t for t in _of_float32(value) if t.numel())
    return any(not (_is_within(t, most) or _is_within(t.nan_to_num(0.0, 0.0, 0.0), most)) for t in known)


def _is_within(tensor: torch.Tensor, most: float) -> bool:
    return all(-most <= float(end) <= most for end in tensor.aminmax())


def _norm(results: Iterable[torch.Tensor], what: str) -> float:
    norm = math.sqrt(sum(float(t.detach().double().square().sum()) for t in results))
    if not math.isfinite(norm):
        raise SensitivityError(f"the {what} of a batch is not finite in float32: leave the batch out.")
    if norm == 0:
        raise SensitivityError(
            f"the {what} of a batch is zero, so that no error can be measured against it: give a batch and a loss "
            "whose gradient is not, and unfreeze the parameters that are trained."
        )
    return norm
