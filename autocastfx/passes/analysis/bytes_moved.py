"""The cost of a placement: bytes of float32 values, and of their 16-bit versions, that ops read and write."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from autocastfx.graph.alias import moves
from autocastfx.graph.node import Use, elements, is_float32, is_member, uses
from autocastfx.passes.analysis.units import Units
from autocastfx.plan.plan import Placement, Precision

__all__ = ["BYTES", "CAST", "bytes_moved"]

BYTES = {Precision.LOW: 2, Precision.FLOAT32: 4}
CAST = sum(BYTES.values())  # one is read, the other written


def bytes_moved(
    graph: fx.Graph,
    placements: Mapping[fx.Node, Placement],
    units: Units,
    *,
    keep_output_dtype: bool = True,
    weights: frozenset[fx.Node] = frozenset(),
) -> int:
    """Bytes read and written by the computing nodes of ``graph`` and the casts that ``placements`` need.

    Values that are not float32 as captured are left out, as no placement changes them; so are casts of ``weights`` to
    16 bits. Sizes are those of the example inputs.
    """

    def stored(value: fx.Node) -> Precision:
        return placements[value].store if value in placements else Precision.FLOAT32

    casts: dict[tuple[fx.Node, Precision, fx.Node | None], int] = {}
    moved = 0
    for node in graph.nodes:
        computes = node in placements and placements[node].run is not Precision.CAPTURED and not is_member(node)
        if not computes and node.op != "output":
            continue
        counts = computes and moves(node)
        for use in (u for u in uses(node) if is_float32(u.node)):
            read_in = _read_in(node, use, placements.get(node), units, keep_output_dtype) or stored(use.node)
            is_weight = read_in is Precision.LOW and use.node in weights
            if read_in is not stored(use.node) and not is_weight:
                reader = node if use.node in units.storages else None  # what is mutated is cast anew for each reader
                casts[use.node, read_in, reader] = CAST * elements(use.node)
            if counts:
                moved += BYTES[read_in] * elements(use.node)
        if counts:
            placement = placements[node]
            moved += BYTES[placement.store] * elements(node)
            moved += CAST * elements(node) if placement.run is not placement.store else 0
    return moved + sum(casts.values())


def _read_in(
    node: fx.Node, use: Use, placement: Placement | None, units: Units, keep_output_dtype: bool
) -> Precision | None:
    """The precision that ``node`` reads a value in; None for: as it is stored."""
    if placement is None:
        return Precision.FLOAT32 if keep_output_dtype else None
    if use.argument in placement.as_stored:
        return None
    return Precision.FLOAT32 if units.ports.stays_float32(node, use) else placement.run
