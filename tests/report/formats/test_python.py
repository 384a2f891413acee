from __future__ import annotations

import ast
import re

import pytest

import autocastfx
from tests.golden.models import CASES, converted

COMMENT = re.compile(r"  # .*$", re.MULTILINE)


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_generated_code_with_comments(name: str) -> None:
    amp_model = converted(name)
    shown = autocastfx.dump(amp_model, format="python")
    plain = [line.rstrip() for line in amp_model.code.strip().splitlines()]
    functions = COMMENT.sub("", shown).split("\n\n\n")
    assert functions[1].splitlines() == plain
    assert len(ast.parse(shown).body) == len(functions) - 1


@pytest.mark.parametrize("name", CASES)
def test_each_assignment_has_a_comment(name: str) -> None:
    shown = autocastfx.dump(converted(name), format="python")
    assigned = [line for line in shown.splitlines() if re.match(r"    \w+ = ", line)]
    assert len(assigned) > 5
    assert all(COMMENT.search(line) for line in assigned)


def test_comments_say_precision_and_dtypes() -> None:
    shown = autocastfx.dump(converted("no_grad"), format="python").partition("# sub-graph ")[0]
    comments = {line.split()[0]: line.rpartition("  # ")[2] for line in shown.splitlines() if "  # " in line}
    assert comments["linear_1"] == "low: float32 → bfloat16 (allow)"
    assert comments["log_softmax"] == "float32: float32 (deny)"
    assert comments["x_bfloat16"] == "+ cast of x: float32 → bfloat16"
    assert comments["to"] == "* float32: float32 (deny)"
    assert comments["clone"] == "captured: int64"
    assert comments["student_weight"] == "parameter float32"
    assert comments["weights"] == "buffer float32"


def test_saturating_casts_say_so() -> None:
    shown = autocastfx.dump(converted("encoder_layer"), format="python")
    assert "# + cast of x: float32 → float16, saturating" in shown


def test_sub_graphs_follow() -> None:
    shown = autocastfx.dump(converted("no_grad"), format="python")
    inside = shown.partition("# sub-graph submod_1\n")[2]
    assert inside.startswith("def forward(self, ")
    assert "# low: float32 → bfloat16 (allow)" in inside
