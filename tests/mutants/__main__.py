"""``python -m tests.mutants`` plants small defects into a copy of the package, one at a time, and says which tests see.

Each mutant is drawn by the seed, and run with the tests that concern its module until one fails. It prints a line for
each, and at the end how many were killed, once the tests that killed have passed without a mutant. Those of
``equivalent.txt`` are not run.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

from tests.mutants.mutation import Mutation, mutations
from tests.mutants.table import concerned, modules
from tests.mutants.workplace import Workplace

PROJECT = Path(__file__).resolve().parents[2]
PACKAGE, TESTS = PROJECT / "autocastfx", PROJECT / "tests"
EQUIVALENT = Path(__file__).with_name("equivalent.txt")

Drawn = list[tuple[str, Mutation]]


def drawn(names: Sequence[str], count: int, seed: int) -> Drawn:
    """``count`` mutants, spread evenly over the modules, and in each over the kinds of change."""
    piles = [(name, _shuffled(name, seed)) for name in names]
    found: Drawn = []
    while piles and len(found) < count:
        for pile in list(piles):
            name, rest = pile
            one = next(rest, None)
            if one is None:
                piles.remove(pile)
            elif len(found) < count:
                found.append((name, one))
    return found


def _shuffled(name: str, seed: int) -> Iterator[Mutation]:
    random = Random(f"{seed} {name}")
    kinds: dict[str, list[Mutation]] = {}
    for one in mutations((PACKAGE / name).read_bytes()):
        kinds.setdefault(one.kind, []).append(one)
    piles = [random.sample(kind, len(kind)) for kind in random.sample(list(kinds.values()), len(kinds))]
    while piles:
        yield from (pile.pop() for pile in piles)
        piles = [pile for pile in piles if pile]


def key(name: str, one: Mutation) -> str:
    """What a mutant is known by, wherever its line stands."""
    return f"{name}: {one.text}\n    {one.before} -> {one.after}"


def equivalents() -> dict[str, str]:
    """Why each of the equivalent ones is one, by its key."""
    _, *entries = EQUIVALENT.read_text(encoding="utf-8").rstrip("\n").split("\n\n")
    found = (entry.rpartition("\n    ") for entry in entries)
    return {known: why for known, _, why in found}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=150, help="how many are drawn")
    parser.add_argument("--skip", type=int, default=0, help="how many of the first that are drawn are left out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--module", action="append", help="as passes/place.py; may be given several times")
    parser.add_argument("--only", default="", help="of those drawn, the ones whose printed line holds this text")
    parser.add_argument("--list", action="store_true", help="print what is drawn, and run nothing")
    args = parser.parse_args()
    chosen = drawn(args.module or modules(PACKAGE), args.count, args.seed)
    chosen = [(name, one) for name, one in chosen[args.skip :] if args.only in _line(name, one)]
    if args.list:
        print("\n".join(_line(name, one) for name, one in chosen))
        return
    known, ends, killers = equivalents(), Counter[str](), dict[str, None]()
    with tempfile.TemporaryDirectory() as folder:
        workplace = Workplace.of(PROJECT, Path(folder).resolve() / "copy")
        for name, one in chosen:
            why = known.get(key(name, one))
            killer = workplace.killer(name, one, concerned(name, TESTS)) if why is None else None
            end = "equivalent" if why is not None else "killed" if killer is not None else "SURVIVED"
            ends[end] += 1
            killers.update({killer: None} if killer is not None else {})
            said = f": {why}" if why is not None else f" by {killer}" if killer is not None else ""
            print(f"{_line(name, one)}: {end}{said}", flush=True)
        if broken := workplace.ending([test for test in killers if "::" in test] or ["tests/mutants"]):
            raise SystemExit(f"of the tests that killed, one does not pass without a mutant: {broken}")
    ran = ends["killed"] + ends["SURVIVED"]
    share = f", {ends['killed'] / ran:.1%} of those that are not equivalent" if ran else ""
    print(
        f"{len(chosen)} mutants: {ends['killed']} killed{share}; {ends['equivalent']} equivalent, "
        f"{ends['SURVIVED']} survived"
    )


def _line(name: str, one: Mutation) -> str:
    return f"{name}:{one.line}: {one.before}  ->  {one.after}"


if __name__ == "__main__":
    main()
