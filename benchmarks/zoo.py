"""Measure autocastfx on the model zoo against float32 and torch.autocast, on the CPU.

    python -m benchmarks.zoo [--models bert,gpt2] [--dtypes bfloat16,float16] [--fold exact,kernel]
                             [--json PATH [--again]]
    python -m benchmarks.zoo --ops [--models bert,gpt2] [--json PATH]

The zoo is transformers models and hand-written hard cases; ``--models transformers`` and ``--models hand`` select all
of either kind. Both levels of folding are measured: ``exact``, the default of ``convert``, and ``kernel``. A ratio is
our distance to float32 divided by torch.autocast's: for the output and the gradient closest to their bounds
(:mod:`benchmarks.zoo_judge`), and for all gradients as one vector; each is the geometric mean over some draws of the
inputs. With ``--json`` the file is written after each model, and models in it are not measured again without
``--again``. ``--ops`` instead counts the models in which each ATen operator meets floating values.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.machine import moment
from benchmarks.zoo_case import ZooModel
from benchmarks.zoo_hand import HAND
from benchmarks.zoo_judge import LEVELS, Distance
from benchmarks.zoo_measure import DTYPES, Row, measure
from benchmarks.zoo_models import ZOO
from benchmarks.zoo_ops import floating_ops

_HEADER = (
    f"{'model':<22} {'mode':<5} {'dtype':<8} {'fold':<6} {'capture':<12} {'nodes':>5} {'casts':>5} "
    f"{'ours':>8} {'ratio':>6} {'other':>8} {'ratio':>6} {'grad':>8} {'ratio':>6} {'tensor':>8} {'ratio':>6} "
    f"{'back':<4} {'draws':>5} {'scale':>5} {'var':>3} {'s':>5}  verdict       worst output, worst gradient"
)


def _line(row: Row) -> str:
    pairs = (
        (row.ours, row.autocast),
        (row.other_ours, row.other_autocast),
        (row.grad_ours, row.grad_autocast),
        (row.tensor_ours, row.tensor_autocast),
    )
    found = " ".join(f"{_shown(a, '.1e'):>8} {_shown(Distance('', a, b).ratio, '.2f'):>6}" for a, b in pairs)
    return (
        f"{row.model:<22} {row.mode:<5} {row.dtype:<8} {row.fold:<6} {row.capture:<12} {row.nodes:>5} {row.casts:>5} "
        f"{found} {row.backward:<4} {row.draws:>5} {row.scale:>5g} {row.variants:>3} {row.seconds:>5.1f}  "
        f"{row.verdict:<12}  {row.output}, {row.tensor}"
    )


def _shown(number: float, form: str) -> str:
    return "-" if math.isnan(number) else f"{number:{form}}"


def _totals(rows: Sequence[Row]) -> str:
    unexportable = [row for row in rows if row.verdict == "UNEXPORTABLE"]
    failed = [row for row in rows if row.verdict == "FAIL"]
    refused = sum(row.capture == "refused" and row.verdict == "PASS" for row in rows)
    lines = [
        f"\n{len({row.model for row in rows})} models, {len(rows)} rows: "
        f"{sum(row.verdict == 'PASS' for row in rows)} pass ({refused} of them refused, as they must be), "
        f"{len(failed)} fail, {len(unexportable)} not exportable"
    ]
    for title, group in (("not captured by torch.export either", unexportable), ("failed", failed)):
        lines += [f"\n{title}:"] * bool(group)
        lines += [f"  {row.model} {row.mode} {row.dtype} {row.fold}: {row.reason}" for row in group]
    noted = [row for row in rows if row.verdict == "PASS" and row.reason]
    lines += ["\npassed where torch.autocast fails:"] * bool(noted)
    lines += [f"  {row.model} {row.mode} {row.dtype} {row.fold}: {row.reason}" for row in noted]
    return "\n".join(lines)


def _measured(path: Path, versions: dict[str, str]) -> list[Row]:
    """Read the rows in ``path`` that were measured with the same versions."""
    if not path.exists():
        return []
    held: dict[str, Any] = json.loads(path.read_text())
    return [Row(**row) for row in held["rows"]] if {**held, **versions} == held else []


def _measure_all(
    models: Iterable[ZooModel],
    cases: Sequence[tuple[str, str]],
    path: Path | None,
    again: bool,
    versions: dict[str, str],
) -> int:
    models = list(models)
    held = _measured(path, versions) if path else []
    asked = [row for row in held if (row.dtype, row.fold) in cases and row.model in {m.name for m in models}]
    others, rows = [row for row in held if row not in asked], [] if again else asked
    order = {model.name: i for i, model in enumerate((*ZOO, *HAND))}

    def report(row: Row) -> None:
        rows.append(row)
        print(_line(row), flush=True)

    print(_HEADER)
    for model in models:
        missing = [case for case in cases if (model.name, *case) not in {(r.model, r.dtype, r.fold) for r in rows}]
        measure(model, missing, report) if missing else None
        if path and missing:
            kept = sorted((*others, *rows), key=lambda row: order.get(row.model, len(order)))
            written = {**versions, **moment(), "rows": [asdict(row) for row in kept]}
            path.write_text(json.dumps(written, indent=1) + "\n")
    print(_totals(rows))
    return int(any(row.verdict == "FAIL" for row in rows))


def _count_ops(models: Iterable[ZooModel], path: Path | None, versions: dict[str, str]) -> int:
    counts: dict[str, int] = {}
    for model in models:
        found = floating_ops(model)
        print(f"{model.name}: {len(found)}", file=sys.stderr, flush=True)
        for op in found:
            counts[op] = counts.get(op, 0) + 1
    counts = dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
    print(*(f"{count:>5} {op}" for op, count in counts.items()), sep="\n")
    if path:
        path.write_text(json.dumps({**versions, **moment(), "ops": counts}, indent=1) + "\n")
    return 0


def _chosen(parser: argparse.ArgumentParser, names: Sequence[str]) -> list[ZooModel]:
    groups = {"all": (*ZOO, *HAND), "transformers": ZOO, "hand": HAND}
    by_name = {model.name: (model,) for model in (*ZOO, *HAND)} | groups
    unknown = [name for name in names if name not in by_name]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; models: {', '.join(by_name)}")
    return list(dict.fromkeys(model for name in names for model in by_name[name]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the models asked for; the exit status is 1 if one fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="all", help="names or 'transformers' or 'hand', separated by commas")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="bfloat16, float16 or both, separated by a comma")
    parser.add_argument("--fold", default=",".join(LEVELS), help="exact, kernel or both, separated by a comma")
    parser.add_argument("--ops", action="store_true", help="count the operators instead")
    parser.add_argument("--json", type=Path, help="also write what was found here")
    parser.add_argument("--again", action="store_true", help="also measure what stands in the file already")
    options = parser.parse_args(arguments)
    models, dtypes = _chosen(parser, options.models.split(",")), options.dtypes.split(",")
    if unknown := [name for name in dtypes if name not in DTYPES]:
        parser.error(f"unknown: {', '.join(unknown)}; dtypes: {', '.join(DTYPES)}")
    folds = options.fold.split(",")
    if unknown := [name for name in folds if name not in LEVELS]:
        parser.error(f"unknown: {', '.join(unknown)}; levels of folding: {', '.join(LEVELS)}")

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "device": "cpu"}
    if options.ops:
        return _count_ops(models, options.json, versions)
    return _measure_all(models, list(product(dtypes, folds)), options.json, options.again, versions)


if __name__ == "__main__":
    sys.exit(main())
