"""Count the bytes that casts move in a training forward, by op list and fold level, for models at full size.

    python -m benchmarks.placement [--models GPT-2] [--json PATH]

Placements are for a CUDA device, which is not needed; nothing is allocated or computed. A cast counts 6 bytes per
element: 4 on its float32 side and 2 on its 16-bit side. Casts of parameters, and of values computed from parameters
alone, are counted separately: they need not be repeated before the next update. Outputs keep their computed dtype, as
under torch.autocast, and the model's own casts are not counted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import torch
from torch import fx

import autocastfx
from autocastfx.errors import OpListError, UnsupportedError
from autocastfx.graph.names import of_function, op_name
from autocastfx.graph.node import origin
from autocastfx.runtime.operators.casts import saturating_cast
from benchmarks.command import Command, verdict
from benchmarks.models.families import FullModel
from benchmarks.models.full import BATCH, MODELS
from benchmarks.store import Store

BYTES = 6  # that a cast moves for each element
AUTOCAST = "torch_autocast_cuda"
# What is measured: a label, and the arguments of convert.
POLICIES: dict[str, dict[str, Any]] = {
    AUTOCAST: {"op_list": AUTOCAST},
    "default, fold=none": {"fold": "none"},
    "default, fold=exact": {"fold": "exact"},
    "default, fold=kernel": {"fold": "kernel"},
}


@dataclass(frozen=True)
class Row:
    """The casts of a model under a policy; ``ratio`` is activation bytes divided by those of the autocast preset."""

    model: str
    policy: str
    parameter_casts: int = 0
    parameter_bytes: int = 0
    activation_casts: int = 0
    activation_bytes: int = 0
    ratio: float | None = None
    note: str = ""


def measure(name: str, model: FullModel, policy: str) -> Row:
    """Convert ``model`` under ``policy`` and count the casts of its graph in training mode."""
    with torch.device("meta"):
        module, inputs = model.build().train(), model.inputs()
    try:
        options = {"dtype": torch.float16, "device": "cuda", "keep_output_dtype": False, **POLICIES[policy]}
        amp = autocastfx.convert(module, (), inputs, **options)
    except (UnsupportedError, OpListError) as error:
        return Row(name, policy, note=f"not there yet: {str(error).splitlines()[0]}")
    casts = [n for n in amp.graph.nodes if origin(n) is not None and op_name(n) in ("to", of_function(saturating_cast))]
    if len(casts) != len(amp.plan.casts):
        raise RuntimeError(f"{name}: the plan has {len(amp.plan.casts)} casts, its graph {len(casts)}")
    parameters = {parameter for parameter, _ in amp.named_parameters(remove_duplicate=False)}
    fixed = [node for node in casts if _is_fixed(node, parameters)]
    return Row(
        name,
        policy,
        parameter_casts=len(fixed),
        parameter_bytes=sum(map(_bytes, fixed)),
        activation_casts=len(casts) - len(fixed),
        activation_bytes=sum(map(_bytes, casts)) - sum(map(_bytes, fixed)),
    )


def _is_fixed(node: fx.Node, parameters: set[str]) -> bool:
    """True if a value is a parameter, or computed from parameters alone."""
    if node.op == "get_attr":
        return node.target in parameters
    return bool(node.all_input_nodes) and all(_is_fixed(read, parameters) for read in node.all_input_nodes)


def _bytes(node: fx.Node) -> int:
    elements = node.meta["val"].numel()
    return BYTES * (elements.node.hint if isinstance(elements, torch.SymInt) else elements)


def by_policy(name: str) -> list[Row]:
    """Return a row for each policy, with its ratio if the preset was measured."""
    rows = [measure(name, MODELS[name], policy) for policy in POLICIES]
    baseline = next((row.activation_bytes for row in rows if row.policy == AUTOCAST and not row.note), 0)
    has_ratio = [bool(baseline) and not row.note for row in rows]
    return [
        replace(row, ratio=row.activation_bytes / baseline) if has else row
        for row, has in zip(rows, has_ratio, strict=True)
    ]


_HEADER = f"{'model':<18} {'policy':<20} {'parameters':>10} {'MB':>8} {'activations':>11} {'MB':>8} {'to autocast':>11}"


def _line(row: Row) -> str:
    if row.note:
        return f"{row.model:<18} {row.policy:<20} {row.note[:80]}"
    ratio = f"{row.ratio:.2f}" if row.ratio is not None else "-"
    return (
        f"{row.model:<18} {row.policy:<20} {row.parameter_casts:>10} {row.parameter_bytes / 1e6:>8.1f} "
        f"{row.activation_casts:>11} {row.activation_bytes / 1e6:>8.1f} {ratio:>11}"
    )


def table(rows: Sequence[Row]) -> str:
    """Write the table to print, of the policies measured."""
    return "\n".join([_HEADER, *(_line(row) for row in rows if not row.note)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the models asked for."""
    command = Command("placement", __doc__)
    command.names("--models", MODELS)
    options = command.begin(arguments)
    given = {"transformers": version("transformers"), "batch": BATCH, "dtype": "float16", "device": "cuda"}
    store = Store(options.json, Row, given)
    store.fill(options.models, "model", by_policy)
    notes = [f"{row.model}, {row.policy}: {row.note}" for row in store.rows if row.note]
    verdict(table(store.rows), notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
