"""What is planted, and what never is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants.__main__ import PACKAGE, drawn, equivalents
from tests.mutants.mutation import mutations
from tests.mutants.table import MODULES, concerned, modules

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a < b", ["a <= b"]),
        ("a in b", ["a not in b"]),
        ("a and b", ["a or b"]),
        ("not a", ["a"]),
        ("x = 0, 1, 2.5, True", ["1", "0", "3.5", "False", *["member"] * 4]),
        ("a + b", ["a - b"]),
        ("'text' + b", []),
        ("min(a, b)", ["max", "pass"]),
        ("f(a)", ["pass"]),
        ("f(a, b, c=d)", ["f(b, a, c=d)", "f(a, b)", "pass"]),
        ("a += b", ["pass"]),
        ("{a, b}", ["{b}", "{a}"]),
        ("if a: b", ["True", "False"]),
        ("if (a := b): a", []),
        ("x = [a for a in b if a]", ["True"]),
        ("def f(x: int = 1) -> dict[int, 2]:\n    'Two: 2.'\n    return x", ["0", "return None"]),
    ],
)
def test_each_change(source: str, expected: list[str]) -> None:
    found = mutations(source.encode())
    for one in found:
        assert ast.dump(ast.parse(one.applied(source.encode()))) != ast.dump(ast.parse(source))
    said = [one.kind if one.kind == "member" and source.startswith("x") else one.after.strip("()") for one in found]
    assert sorted(said) == sorted(text.strip("()") for text in expected)


@pytest.mark.parametrize(
    "source",
    [
        '"""Less than 3."""',
        '__all__ = ["a", "b"]',
        "Number = int | None",
        "x: list[1]",
        "raise ValueError(f'{a + 1} of 2')",
        "x = f'{a + 1} of 2'",
        "def __repr__(self): return 'a' if b else 2",
        "if TYPE_CHECKING: f(1)",
        "from a import b",
        "@f(1)\nclass A: pass",
    ],
)
def test_what_no_test_need_see_stays(source: str) -> None:
    assert mutations(source.encode()) == []


def test_a_line_beyond_ascii_is_changed_in_its_place() -> None:
    source = "x = 'ü', (a or 'ß')\n".encode()
    (one,) = [one for one in mutations(source) if one.kind == "boolean"]
    assert one.applied(source).decode() == "x = 'ü', ((a and 'ß'))\n"


def test_a_seed_draws_the_same_and_spreads_it_over_the_modules() -> None:
    names = modules(PACKAGE)[:5]
    found = drawn(names, 12, seed=3)
    assert found == drawn(names, 12, seed=3) != drawn(names, 12, seed=4)
    assert {sum(name == known for name, _ in found) for known in names} == {2, 3}


def test_the_mirror_of_a_module_is_its_first_test() -> None:
    assert all(list(PACKAGE.glob(pattern)) for pattern in MODULES)
    assert concerned("passes/decide/checks.py", TESTS)[0] == TESTS / "passes" / "decide" / "test_checks.py"
    assert all(path.is_file() for name in modules(PACKAGE) for path in concerned(name, TESTS))


def test_the_line_of_each_equivalent_mutant_is_there() -> None:
    for key in equivalents():
        module, line = key.partition("\n")[0].split(": ", 1)
        assert line in map(str.strip, (PACKAGE / module).read_text(encoding="utf-8").splitlines()), key


def test_each_equivalent_mutant_has_its_reason() -> None:
    assert all("->" in known and why for known, why in equivalents().items())
