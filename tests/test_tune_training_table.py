"""What training runs decide about tuned plans, on runs made up for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from benchmarks.tune_training_table import DEFAULT, FLOAT32, ROUNDED, TUNED, Run, reached, rows, table


def _runs(model: str, dtype: str, default: list[float], tuned: list[float], share: float = 0.5) -> Iterator[Run]:
    """Runs at these distances from float32, whose losses are those of the seeds."""
    for seed, (d, t) in enumerate(zip(default, tuned, strict=True)):
        exact = 1.0 + seed
        yield Run(model, FLOAT32, FLOAT32, seed, exact)
        yield Run(model, dtype, ROUNDED, seed, exact)
        yield Run(model, dtype, DEFAULT, seed, exact + d, bytes=1000)
        yield Run(model, dtype, TUNED, seed, exact - t, bytes=round(1000 * share))


CLOSE = ([0.01, 0.02, 0.03], [0.02, 0.01, 0.03])
FAR = ([0.01, 0.02, 0.03], [0.03, 0.04, 0.06])


def _all(bfloat16: list[tuple[list[float], list[float]]], share: float = 0.5) -> list[Run]:
    kinds = {"float16": [CLOSE] * 3, "bfloat16": bfloat16}
    each = [(str(i), dtype, *one) for dtype, sides in kinds.items() for i, one in enumerate(sides)]
    return [run for model, dtype, d, t in each for run in _runs(model, dtype, d, t, share)]


def test_distances_on_either_side_of_float32_are_alike() -> None:
    (row,) = rows(list(_runs("a", "float16", *FAR)))
    assert row.default == pytest.approx(FAR[0])
    assert row.tuned == pytest.approx(FAR[1])
    assert row.bytes == 0.5


def test_the_line_is_reached_if_both_dtypes_are_as_close_with_fewer_bytes() -> None:
    assert reached(rows(_all([CLOSE] * 3)))
    assert "fewer bytes, in bfloat16 and float16: reached." in table(_all([CLOSE] * 3))
    assert not reached(rows(_all([CLOSE] * 2))), "three models"
    assert not reached(rows([run for run in _all([CLOSE] * 3) if run.dtype != "bfloat16"])), "both dtypes"
    assert not reached(rows(_all([CLOSE] * 3, share=1.0)))
    assert "nothing to gain" in table(_all([CLOSE] * 3, share=1.0))
    assert not reached([])


def test_seeds_without_a_skipped_step_are_told_beside() -> None:
    runs = list(_runs("a", "float16", [0.01, 0.02, 0.5], [0.02, 0.03, 0.01]))
    skipped = [replace(run, skipped=int(run.side == DEFAULT and run.seed == 2)) for run in runs]
    assert "not judged" not in table(runs)
    mean = (0.01 / 0.015 + 0.01 / 0.015) / 2
    assert f"the 2 seeds in which neither side skipped a step alone: {mean:+.2f}, standard error 0.00" in table(skipped)
    assert rows(skipped)[0].differences == rows(runs)[0].differences


def test_the_first_seeds_are_told_where_there_are_more() -> None:
    runs = list(_runs("a", "bfloat16", [0.01] * 6, [0.02] * 5 + [0.0]))
    assert "bfloat16, the first 5 seeds alone: +1.00, standard error 0.00: WOULD BE MISSED" in table(runs)
    assert "bfloat16, 6 seeds: 1 models" in table(runs)
    assert "first" not in table([run for run in runs if run.seed < 5])


def test_a_dtype_that_was_not_run_is_told() -> None:
    shown = table([run for run in _all([CLOSE] * 3) if run.dtype != "float16"])
    assert "fewer bytes, in bfloat16: reached.\nNot run: float16. Both dtypes are needed." in shown
    assert not reached(rows([run for run in _all([CLOSE] * 3) if run.dtype != "float16"]))


def test_what_is_less_close_is_told() -> None:
    shown = table(_all([FAR] * 3))
    assert shown.count("LESS CLOSE") == 3
    assert "MISSED   bfloat16" in shown
    assert "reached  float16" in shown
    assert shown.endswith("in bfloat16 and float16: MISSED.")
    assert not reached(rows(_all([FAR, FAR, CLOSE])))
    nan = ([0.01, 0.02, 0.03], [0.01, float("nan"), 0.01])
    assert not reached(rows(_all([CLOSE, CLOSE, nan])))
    assert table(_all([CLOSE, CLOSE, nan])).count("LESS CLOSE") == 1
