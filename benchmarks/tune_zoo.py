"""How well errors are predicted for the transformers models of the zoo, which nobody tuned anything for.

    python -m benchmarks.tune_zoo [--models "gpt*"] [--json PATH]

Each model is small, and its weights are random. Sensitivity is measured on one batch with 32 probes, which tell an
error to within 1 / √64 of itself. The default list's error in bfloat16 is then predicted, and measured on the same
batch. Dropout is off. The loss is the model's own, or the mean square of its first output. Where gradients jump, a
sensitivity also holds the measured error of this very plan: it is left out, so that all errors are predicted.
"""

from __future__ import annotations

import argparse
import fnmatch
import statistics
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import autocastfx
from autocastfx.errors import AutocastFXError
from autocastfx.numerics.compare import TargetError
from benchmarks.store import Store
from benchmarks.zoo_case import ZooModel
from benchmarks.zoo_measure import FIRST_SIZE
from benchmarks.zoo_models import ZOO

__all__ = ["Row", "main", "measure", "table"]

PROBES = 32
LEAST, MOST = 0.7, 1.5
_LEFT_OUT = ("bert-eager", "gpt2-eager", "llama-eager", "bart-eager", "vit-eager")  # the same models' other attention


@dataclass(frozen=True)
class Row:
    """The relative errors of a model's gradient.

    Attributes:
        unmeasured: nodes in 16 bits that the prediction leaves out.
        refused: why there is no prediction.
    """

    model: str
    predicted: float = 0.0
    true: float = 0.0
    unmeasured: int = 0
    refused: str = ""


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a table, with how many are near."""
    lines = [f"{'model':20}{'predicted':>10}{'true':>9}{'ratio':>7}{'left out':>10}"]
    for row in rows:
        if row.refused:
            lines.append(f"{row.model:20}{row.refused}")
            continue
        said = f"{row.predicted:>10.1e}{row.true:>9.1e}{row.predicted / row.true:>7.2f}{row.unmeasured or '':>10}"
        lines.append(f"{row.model:20}{said}".rstrip())
    ratios = [row.predicted / row.true for row in rows if not row.refused]
    near = sum(LEAST <= ratio <= MOST for ratio in ratios)
    middle = f"; half of them within {_quartile(ratios, 0)} to {_quartile(ratios, 2)}" if len(ratios) > 1 else ""
    return "\n".join(
        [*lines, "", f"Predicted within {LEAST} to {MOST} of the true error: {near} of {len(ratios)} models{middle}."]
    )


def _quartile(ratios: Sequence[float], number: int) -> str:
    return f"{statistics.quantiles(ratios, method='inclusive')[number]:.2f}"


def measure(case: ZooModel) -> Row:
    """Predict the error of one model, and measure it."""
    model = case.build().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    batch = case.inputs(*FIRST_SIZE)
    options: dict[str, Any] = {"dtype": "bfloat16", "probes": PROBES, "progress": False}
    try:
        found = replace(autocastfx.sensitivity(model, [batch], _loss, **options), jumps_true=0.0)
        amp_model = autocastfx.convert(model, (), batch, dtype="bfloat16", sensitivity=found)
    except AutocastFXError as error:
        return Row(case.name, refused=f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"[:150])
    true = TargetError(model, [batch], _loss, "gradient", None)(amp_model, torch.bfloat16)
    assert amp_model.plan.error is not None
    return Row(case.name, amp_model.plan.error, true, amp_model.plan.low_unmeasured)


def _loss(output: Any, batch: Any) -> Tensor:
    return output["loss"] if "loss" in output else output[0].square().mean()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the models chosen, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="*", help="a glob of names")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = Store(chosen.json, Row, {"transformers": __import__("transformers").__version__})
    done = {row.model for row in store.rows}
    for case in ZOO:
        if case.name in done or case.name in _LEFT_OUT or not fnmatch.fnmatch(case.name, chosen.models):
            continue
        store.extend([measure(case)])
        print(f"{case.name}: done", file=sys.stderr, flush=True)
    print(table(store.rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
