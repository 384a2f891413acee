"""The benchmark of tuning: which plan stands below a list's, its table and its picture."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import report, tune
from benchmarks.tune_judge import Judged
from benchmarks.tune_table import Row, table


def test_below_is_the_best_plan_of_no_more_bytes() -> None:
    at, cheap, dear = Judged(10, (1.0, 3.0)), Judged(9, (0.5, 3.0)), Judged(11, (0.0, 0.0))
    ratio, noise = tune._below([dear, cheap], at, at)
    assert ratio == pytest.approx((9.25 / 10) ** 0.5)
    assert noise == pytest.approx(0.25)
    assert tune._below([dear], at, at)[0] == float("inf")
    assert tune._below([dear], replace(at, bytes=0), Judged(11, (1.0, 1.0)))[0] == 0, "bytes that are not counted"


ROW = Row(
    **{"model": "a", "dtype": "bfloat16", "nodes": 4, "spearman": 0.9, "plans": [0.8, 1.2], "unseen": [0.6, 1.2]},
    **{
        "error": 0.01,
        "bytes": 100,
        "fewer_bytes": 0.8,
        "fewer_error": 1.0,
    },
    lists={"fold=kernel": [0.9, 1.1], "conservative": [1.5, 1.0], "torch_autocast_cuda": [0.0, 1.0]},
    **{"float32_left": 0.1, "nearer_bytes": 1.0, "nearer_error": 0.5, "verdict": "gains", "seconds": 1.0},
    kernel=[0.7, 1.1],
    front=[[0.8, 1.0], [1.0, 0.5], [1.2, 0.0]],
    below={"default": [0.5, 0.1], "fold=kernel": [1.1, 0.06]},
)


def test_the_tables_count_what_meets_its_mark() -> None:
    misses = replace(ROW, model="b", spearman=0.8, plans=[0.6, 1.0], unseen=[1.0, 1.4], verdict="little")
    misses = replace(misses, below={"conservative": [1.3, 0.1]})
    said = table([ROW, misses])
    assert "Spearman at least 0.85: 1 of 2." in said
    assert "Plans predicted within 0.7 to 1.5: 1 of 2; from other batches: 1 of 2." in said
    assert "On or below every list's point: 1 of 2; b bfloat16 is above conservative (1.30 ± 0.10)" in said
    assert "Gains on 1 of 2 models: a." in said
    assert table([replace(ROW, nearer_error=0.0)]).endswith("Gains on 0 of 1 models: none.")
    assert "  float32" in table([replace(ROW, nearer_error=0.0)])


def test_the_picture_holds_the_front_and_all_lists() -> None:
    pytest.importorskip("matplotlib")
    beaten = replace(ROW, front=[*ROW.front, [0.9, 1.5]])
    (axis,) = report._tune_front([beaten]).axes
    lines = {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axis.get_lines()}
    assert lines["tuned"] == [(0.8, 1.0), (1.0, 0.5)]
    assert lines["tuned, fold=kernel"] == [(0.7, 1.1)]
    texts = {text.get_text() for text in axis.texts} | set(lines)
    assert {"default", "fold=kernel", "conservative", "torch_autocast_cuda, bytes not counted"} <= texts
