"""What an overflow says, and when it is true."""

from __future__ import annotations

from dataclasses import replace

from autocastfx.numerics.find_overflow import InputRange, Overflow

FOUND = Overflow(
    *("exp_1", "exp", "", "float16", "low", 2, 1),
    (InputRange("matmul", "float16", -1.0, 54.06),),
    "model.py:3: return exp(x)",
    "its category is allow",
    in_float32=False,
    fix="deny: [exp]\n",
    advice="add this to your op list:",
)


def test_a_fault_says_where_why_and_what_helps() -> None:
    assert FOUND
    assert str(FOUND).splitlines() == [
        "exp_1 (exp) in module (root) gives 2 Inf and 1 NaN in float16.",
        "  line: model.py:3: return exp(x)",
        "  reads matmul: float16, -1 to 54.06",
        "  runs in 16 bits: its category is allow",
        "  what to do: add this to your op list:",
        "    deny: [exp]",
    ]


def test_a_note_is_false_and_says_so() -> None:
    note = replace(FOUND, is_fault=False, precision="", fix="", line="")
    assert not note
    assert str(note).splitlines()[0] == "no fault: exp_1 (exp) in module (root) gives 2 Inf and 1 NaN in float16."
    assert "  why: its category is allow" in str(note)
