"""The results of the tune benchmark, and their table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

DEFAULT = "default"


@dataclass(frozen=True)
class Row:
    """The results of one model in one dtype. Bytes and errors are shares of the default list's.

    Attributes:
        nodes: the number of single nodes that were judged.
        spearman: of predicted and true errors of those, both on the judged batches.
        plans: predicted over true errors of whole random plans, both on the judged batches.
        unseen: the same, predicted from the batches tuned on.
        error: the default list's, itself.
        bytes: the default list's, itself.
        lists: by list, bytes and error; bytes of 0 are not counted.
        fewer_bytes, fewer_error, nearer_bytes, nearer_error: of the two tuned plans.
        float32_left: of the bytes that float32 costs the default list.
        kernel: bytes and error of the plan tuned at no more bytes with ``fold="kernel"``.
        front: bytes and error of tuned plans from few bytes to little error.
        below: by list, the least error of a tuned plan at no more bytes over the list's, and its standard error over
            the judged batches.
        verdict: what tuning gains over the default list.
        seconds: the time that this row took.
        notes: what was not measured.
    """

    model: str
    dtype: str
    nodes: int
    spearman: float
    plans: list[float]
    unseen: list[float]
    error: float
    bytes: int
    lists: dict[str, list[float]]
    fewer_bytes: float
    fewer_error: float
    float32_left: float
    nearer_bytes: float
    nearer_error: float
    kernel: list[float]
    front: list[list[float]]
    below: dict[str, list[float]]
    verdict: str
    seconds: float
    notes: list[str] = field(default_factory=list[str])

    @property
    def said(self) -> str:
        """The verdict; ``float32`` where float32 itself moves no more bytes than the default list."""
        return "float32" if self.nearer_error == 0 else self.verdict

    @property
    def is_below(self) -> bool:
        """True if a tuned plan is on or below each list's point, within two standard errors."""
        return all(ratio <= 1 + 2 * noise for ratio, noise in self.below.values())


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a table, with what is above or below its mark."""
    lines = [
        f"{'model':12}{'dtype':>10}{'nodes':>7}{'plans':>12}{'unseen':>12}{'default':>9}{'kernel':>12}"
        f"{'conservative':>14}{'autocast':>10}{'fewer':>12}{'float32':>9}{'nearer':>12}{'below':>7}  verdict"
    ]
    for r in rows:
        pairs = {name: f"{b:.2f} {e:.2f}" if b else f"{e:.2f}" for name, (b, e) in r.lists.items()}
        below = max(ratio for ratio, _ in r.below.values())
        lines.append(
            f"{r.model:12}{r.dtype:>10}{r.spearman:>7.2f}{_range(r.plans):>12}{_range(r.unseen):>12}"
            f"{r.error:>9.1e}{pairs['fold=kernel']:>12}"
            f"{pairs['conservative']:>14}{pairs['torch_autocast_cuda']:>10}"
            f"{f'{r.fewer_bytes:.2f} {r.fewer_error:.2f}':>12}{r.float32_left:>9.2f}"
            f"{f'{r.nearer_bytes:.2f} {r.nearer_error:.2f}':>12}{below:>7.2f}  {r.said}"
        )
    return "\n".join([*lines, "", *_marks(rows)])


def _range(numbers: Sequence[float]) -> str:
    return f"{min(numbers):.2f}-{max(numbers):.2f}"


def _marks(rows: Sequence[Row]) -> Iterator[str]:
    ranks = sum(r.spearman >= 0.85 for r in rows)
    ratios, unseen = sum(_is_near(r.plans) for r in rows), sum(_is_near(r.unseen) for r in rows)
    below = sum(r.is_below for r in rows)
    gains = {r.model for r in rows if r.said == "gains"}
    of = f"of {len(rows)}"
    yield f"Spearman at least 0.85: {ranks} {of}."
    yield f"Plans predicted within 0.7 to 1.5: {ratios} {of}; from other batches: {unseen} {of}."
    yield f"On or below every list's point: {below} {of}{_above(rows)}."
    yield f"Gains on {len(gains)} of {len({r.model for r in rows})} models: {', '.join(sorted(gains)) or 'none'}."


def _is_near(ratios: Sequence[float]) -> bool:
    return min(ratios) >= 0.7 and max(ratios) <= 1.5


def _above(rows: Sequence[Row]) -> str:
    said = [
        f"{r.model} {r.dtype} is above {name} ({ratio:.2f} ± {noise:.2f})"
        for r in rows
        for name, (ratio, noise) in r.below.items()
        if ratio > 1 + 2 * noise
    ]
    return "; ".join(["", *said])
