"""Check the small models of tests/numerics/corpus against an expert's error bounds, on the CPU.

    python -m benchmarks.corpus [--dtypes float16,bfloat16] [--fold none|exact|kernel] [--cases 'rotary*'] [--json PATH]

Each model is judged converted, under torch.autocast, and under torch.autocast with hand-written float32 islands. The
worst tensor has the largest error relative to its bound. `ratio` is our error divided by torch.autocast's, after an
epsilon of the dtype is subtracted from each, for the tensor where it is largest: it should be at most 1.2, or 2 with
`--fold kernel`. If it is larger, it is measured again over more draws of the inputs, from geometric means of errors.
"""

from __future__ import annotations

import fnmatch
import math
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks.command import Command
from benchmarks.judge import Distance, typical
from benchmarks.store import Store
from benchmarks.zoo import DRAWS
from tests.numerics.corpus import CASES
from tests.numerics.corpus.case import Case
from tests.numerics.corpus.judge import DTYPES, Judgement, judge_model, judge_ours, refer

RATIOS = {"none": 1.2, "exact": 1.2, "kernel": 2.0}  # by convert's fold
VERSIONS = ("ours", "autocast", "islands")
_HEADER = (
    f"{'case':<34} {'point':<14} {'dtype':<8} {'ours':<4} {'auto':<4} {'isl':<4} {'worst tensor':<40} {'error':>8} "
    f"{'bound':>8} {'ratio':>8} {'draws':>5} {'s':>5}"
)


@dataclass(frozen=True)
class Row:
    """A case in one dtype, with errors and bounds by tensor."""

    case: str
    point: str
    dtype: str
    fold: str
    held: dict[str, bool]
    faults: dict[str, str]
    worst: str
    ratio: float
    seconds: float
    errors: dict[str, dict[str, float]]
    bounds: dict[str, float]
    draws: int = 1


def _ratio(found: Sequence[tuple[Judgement, Judgement]], eps: float) -> float:
    """Return the largest ratio of our error, less an epsilon, to torch.autocast's, over all tensors.

    An error is the geometric mean over the draws of the inputs. NaN if one of the two did not run.
    """
    if not all(ours.errors and autocast.errors for ours, autocast in found):
        return math.nan
    names = found[0][0].errors
    errors = [typical([Distance(n, ours.errors[n], autocast.errors[n]) for ours, autocast in found]) for n in names]
    beyond = ((error.ours - eps, error.autocast) for error in errors if error.ours > eps)
    ratios = (0.0 if other == math.inf else error / other if other else math.inf for error, other in beyond)
    return max(ratios, default=0.0)


def _ratio_of_draws(case: Case, first: tuple[Judgement, Judgement], dtype: torch.dtype, fold: str) -> tuple[int, float]:
    """Return the number of draws of the inputs, and the ratio over them; draws more while it is above the limit."""
    eps, found = torch.finfo(dtype).eps, [first]
    for count in (1, *DRAWS):
        for number in range(len(found), count):
            reference = refer(replace(case, draw=number))
            ours = judge_ours(reference, dtype, fold=fold)
            found.append((ours, judge_model(reference, case.model(), dtype)))
        ratio = _ratio(found, eps)
        if not ratio > RATIOS[fold]:
            break
    return len(found), ratio


def measure(case: Case, dtypes: Iterable[str], fold: str) -> list[Row]:
    """Judge one case in each dtype."""
    rows: list[Row] = []
    reference = refer(case)
    for name in dtypes:
        dtype, started = DTYPES[name], time.perf_counter()
        found = {
            "ours": judge_ours(reference, dtype, fold=fold),
            "autocast": judge_model(reference, case.model(), dtype),
            "islands": judge_model(reference, case.with_islands(), dtype),
        }
        draws, ratio = _ratio_of_draws(case, (found["ours"], found["autocast"]), dtype, fold)
        rows.append(
            Row(
                case.name,
                case.point,
                name,
                fold,
                held={version: judgement.held for version, judgement in found.items()},
                faults={version: judgement.fault for version, judgement in found.items()},
                worst=found["ours"].worst,
                ratio=ratio,
                draws=draws,
                seconds=time.perf_counter() - started,
                errors={version: dict(judgement.errors) for version, judgement in found.items()},
                bounds=reference.bounds(dtype),
            )
        )
    return rows


def _line(row: Row) -> str:
    marks = " ".join(f"{'yes' if row.held[version] else 'NO':<4}" for version in VERSIONS)
    error = row.errors["ours"].get(row.worst, math.nan)
    bound = row.bounds.get(row.worst, math.nan)
    said = f"{row.worst or '-':<40} {error:>8.1e} {bound:>8.1e} {row.ratio:>8.2f} {row.draws:>5}"
    faults = "".join(f"\n      {version}: {fault}" for version, fault in row.faults.items() if fault)
    return f"{row.case:<34} {row.point:<14} {row.dtype:<8} {marks} {said} {row.seconds:>5.1f}{faults}"


def _totals(rows: Sequence[Row]) -> str:
    lines = [f"\n{'point':<16} {'cases':>5} {'ours':>6} {'autocast':>8} {'islands':>8}"]
    for point in [*dict.fromkeys(row.point for row in rows), "all"]:
        group = [row for row in rows if point in (row.point, "all")]
        counts = [sum(row.held[version] for row in group) for version in VERSIONS]
        lines.append(f"{point:<16} {len(group):>5} {counts[0]:>6} {counts[1]:>8} {counts[2]:>8}")
    lost = [row for row in rows if row.held["autocast"] and not row.held["ours"]]
    lines.append(f"\ntorch.autocast holds and ours does not: {len(lost)}")
    lines += [f"  {row.case} {row.dtype}" for row in lost]
    limit = RATIOS[rows[0].fold]
    above = [row for row in rows if row.ratio > limit]
    lines.append(f"\nabove {limit} times torch.autocast's error and an epsilon: {len(above)}")
    lines += [f"  {row.case} {row.dtype} {row.ratio:.2f}" for row in above]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge the cases asked for; the exit status is 1 if our error exceeds a bound."""
    command = Command("corpus", __doc__)
    command.names("--dtypes", DTYPES)
    command.add_argument("--fold", default="exact", choices=RATIOS, help="convert's fold")
    command.add_argument("--cases", default="*", help="patterns of names or of points, separated by commas")
    options = command.begin(arguments)
    patterns = options.cases.split(",")
    cases = {c.name: c for c in CASES if any(fnmatch.fnmatch(name, p) for p in patterns for name in (c.name, c.point))}
    if not cases:
        command.error(f"no case is called {options.cases}; cases: {', '.join(case.name for case in CASES)}")
    warnings.simplefilter("ignore")
    store = Store(options.json, Row, {"fold": options.fold, "dtypes": options.dtypes})
    store.fill(cases, "case", lambda name: measure(cases[name], options.dtypes, options.fold))
    print(_HEADER, *map(_line, store.rows), _totals(store.rows), sep="\n")
    return int(not all(row.held["ours"] for row in store.rows))


if __name__ == "__main__":
    sys.exit(main())
