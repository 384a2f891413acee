"""Decide by training runs whether tuned plans reach the float32 loss as closely as the default list.

How it is decided, fixed before anything was run. With e = tuned distance - default distance, for each seed:

- A model is ``as close`` if the mean of e is at most its standard error, over the seeds. Two plans that are equally
  close miss this in one case out of five, by chance.
- A dtype is as close if the same holds for all e of its models, each divided by the default list's mean distance of
  the model. The line is reached if both dtypes are, with at least three models each.

A step that float16 skips changes the loss more than rounding does, by chance on either side. The seeds in which neither
side skipped one are told beside, as are the first five seeds where there are more. Both were added after the first runs
and are not judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

__all__ = ["DEFAULT", "DTYPES", "FLOAT32", "ROUNDED", "SEEDS", "TUNED", "Run", "reached", "rows", "table"]

SEEDS = 5
DTYPES = ("bfloat16", "float16")
FLOAT32, ROUNDED, DEFAULT, TUNED = "float32", "rounded", "default", "tuned"
MODELS_NEEDED = 3  # of each dtype


@dataclass(frozen=True)
class Run:
    """A training run: the loss that it reaches, the bytes that its plan moves in a step, and the steps skipped."""

    model: str
    dtype: str
    side: str
    seed: int
    loss: float
    bytes: int = 0
    skipped: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Row:
    """A model in one dtype. Distances are in nats, and skipped steps are of both sides, of each seed in turn; ``bytes``
    is the tuned plan's share.
    """

    model: str
    dtype: str
    losses: Sequence[float]
    rounded: Sequence[float]
    default: Sequence[float]
    tuned: Sequence[float]
    bytes: float
    skipped: Sequence[int]

    @property
    def differences(self) -> list[float]:
        """Each seed's tuned distance minus the default's."""
        return [t - d for t, d in zip(self.tuned, self.default, strict=True)]

    @property
    def unskipped(self) -> Row:
        """The seeds in which neither side skipped a step."""
        return self.of([i for i, count in enumerate(self.skipped) if not count])

    def of(self, seeds: Sequence[int]) -> Row:
        """These seeds alone, by their position."""
        sides = ("losses", "rounded", "default", "tuned", "skipped")
        return replace(self, **{side: [getattr(self, side)[i] for i in seeds] for side in sides})


def rows(runs: Sequence[Run]) -> list[Row]:
    """Return a row for each model and dtype, over the seeds that have all sides."""
    held: dict[tuple[str, str, str], dict[int, Run]] = {}
    for run in runs:
        held.setdefault((run.model, run.dtype, run.side), {})[run.seed] = run
    found = list[Row]()
    for model, dtype in dict.fromkeys((run.model, run.dtype) for run in runs if run.dtype != FLOAT32):
        exact = held.get((model, FLOAT32, FLOAT32), {})
        sides = [held.get((model, dtype, side), {}) for side in (ROUNDED, DEFAULT, TUNED)]
        seeds = [seed for seed in exact if all(seed in side for side in sides)]
        if len(seeds) > 1:
            rounded, default, tuned = ([abs(side[s].loss - exact[s].loss) for s in seeds] for side in sides)
            share = sides[2][seeds[0]].bytes / sides[1][seeds[0]].bytes
            skipped = [sum(side[s].skipped for side in sides) for s in seeds]
            found.append(Row(model, dtype, [exact[s].loss for s in seeds], rounded, default, tuned, share, skipped))
    return found


def standard_error(numbers: Sequence[float]) -> float:
    """Return the standard error of the mean; NaN if a number is not finite."""
    return stdev(numbers) / math.sqrt(len(numbers)) if all(map(math.isfinite, numbers)) else math.nan


def is_close(differences: Sequence[float]) -> bool:
    """Return true if the mean is at most its standard error; what is not finite is not close."""
    return fmean(differences) <= standard_error(differences)


def pooled(found: Sequence[Row], dtype: str) -> list[float]:
    """Return the differences of all judged models in a dtype, each in the default list's mean distance."""
    judged = (row for row in found if row.dtype == dtype and row.bytes < 1 and row.differences)
    return [e / fmean(row.default) for row in judged for e in row.differences]


def verdicts(found: Sequence[Row]) -> Iterator[tuple[str, bool]]:
    """Yield for each dtype what is claimed, with its figures, and true if it holds."""
    for dtype in dict.fromkeys(row.dtype for row in found):
        judged, each = [row for row in found if row.dtype == dtype and row.bytes < 1], pooled(found, dtype)
        if not each:
            yield f"{dtype}: tuning moves fewer bytes for no model", False
            continue
        mean, error = fmean(each), standard_error(each)
        shares = f"{min(row.bytes for row in judged):.2f} to {max(row.bytes for row in judged):.2f} of the bytes"
        yield (
            f"{dtype}, {len(judged[0].losses)} seeds: {len(judged)} models with {shares}; tuned distance minus "
            f"default's, over the default's: {mean:+.2f}, standard error {error:.2f}",
            is_close(each) and len(judged) >= MODELS_NEEDED,
        )


def table(runs: Sequence[Run]) -> str:
    """Write the table to print, and what holds."""
    found = rows(runs)
    head = f"{'model':12}{'dtype':>10}{'float32':>9}{'spread':>8}{'rounded':>9}{'default':>9}{'tuned':>9}"
    lines = [f"{head}{'tuned - default':>21}{'bytes':>7}{'skipped':>9}  verdict"]
    for row in found:
        difference = f"{fmean(row.differences):+.1e} ± {standard_error(row.differences):.1e}"
        means = "".join(f"{fmean(side):>9.1e}" for side in (row.rounded, row.default, row.tuned))
        verdict = "nothing to gain" if row.bytes >= 1 else "as close" if is_close(row.differences) else "LESS CLOSE"
        lines.append(
            f"{row.model:12}{row.dtype:>10}{fmean(row.losses):>9.4f}{stdev(row.losses):>8.4f}{means}"
            f"{difference:>21}{row.bytes:>7.2f}{sum(row.skipped):>9}  {verdict}"
        )
    lines += ["", *(f"{'reached' if holds else 'MISSED '}  {what}" for what, holds in verdicts(found))]
    lines += beside(found)
    told = [dtype for dtype in DTYPES if any(row.dtype == dtype for row in found)]
    holds = bool(told) and all(holds for _, holds in verdicts(found))
    lines.append(
        'Trained, tuned "default" plans reach the float32 loss as closely as the default list with fewer bytes, in '
        f"{' and '.join(told)}: {'reached' if holds else 'MISSED'}."
    )
    lines += [f"Not run: {dtype}. Both dtypes are needed." for dtype in DTYPES if dtype not in told]
    return "\n".join(lines)


def beside(found: Sequence[Row]) -> Iterator[str]:
    """Yield the same of a part of the seeds: of the first ones, where there are more, and of those without a skip."""
    for dtype in dict.fromkeys(row.dtype for row in found):
        of_dtype = [row for row in found if row.dtype == dtype]
        parts = dict[str, list[Row]]()
        if any(len(row.losses) > SEEDS for row in of_dtype):
            parts[f"the first {SEEDS} seeds"] = [row.of(range(min(SEEDS, len(row.losses)))) for row in of_dtype]
        if any(sum(row.skipped) for row in of_dtype):
            parts["the {} seeds in which neither side skipped a step"] = [row.unskipped for row in of_dtype]
        for what, part in parts.items():
            if len(each := pooled(part, dtype)) > 1:
                verdict, error = "would be reached" if is_close(each) else "WOULD BE MISSED", standard_error(each)
                said = f"{what.format(len(each))} alone: {fmean(each):+.2f}, standard error {error:.2f}"
                yield f"not judged  {dtype}, {said}: {verdict}"


def reached(found: Sequence[Row]) -> bool:
    """Return true if the line that this benchmark checks holds in both dtypes."""
    told = dict(zip(dict.fromkeys(row.dtype for row in found), (holds for _, holds in verdicts(found)), strict=True))
    return all(told.get(dtype, False) for dtype in DTYPES)
