"""Run the project's tests that need a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.gpu.stage import Given, Row
from benchmarks.gpu.stages.samples import stand_in

ROOT = Path(__file__).resolve().parents[3]
MARK = "mark.gpu"
# None of the options in pyproject.toml, which a plugin may have to know that is not there.
OPTIONS = (
    *("-q", "-ra", "--tb=short", "--import-mode=importlib", "--continue-on-collection-errors", "-o", "addopts="),
    *("-W", "ignore::pytest.PytestConfigWarning", "-p", "no:cacheprovider", "-m", "gpu"),
)


def suite(given: Given, paths: Sequence[str], without: Sequence[str] = ()) -> Iterator[Row]:
    """Yield a row for each file: pytest's summary line, and the lines on tests that did not pass.

    Args:
        given: what every stage is given.
        paths: folders of tests, in this order.
        without: folders in them that are left out.
    """
    files = [file for folder in paths for file in sorted((ROOT / folder).rglob("test_*.py"))]
    for file in dict.fromkeys(file.relative_to(ROOT) for file in files):
        name = file.as_posix()
        if name.startswith(tuple(f"{folder}/" for folder in without)) or given.has(name):
            continue
        if MARK in (ROOT / file).read_text(encoding="utf-8"):
            yield {"model": name, **_tested(name)}


def _tested(file: str) -> Row:
    lines: list[str] = []
    with stand_in() as folder:
        path = os.pathsep.join(part for part in (str(ROOT), folder, os.environ.get("PYTHONPATH", "")) if part)
        environment = {**os.environ, "PYTHONPATH": path}
        command = [sys.executable, "-m", "pytest", *OPTIONS, file]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environment
        ) as ran:
            for line in ran.stdout or ():
                print(line, end="", flush=True)
                lines.append(line.rstrip())
    failed = [line[:300] for line in lines if line.startswith(("FAILED", "ERROR"))]
    skipped = [line[:300] for line in lines if line.startswith("SKIPPED")]
    summary = next((line for line in reversed(lines) if line), "")
    # A run that collected no test has status 5, an import error 2: only status 0 with a test passed counts.
    return {"status": ran.returncode, "summary": summary, "failed": failed, "skipped_tests": skipped}
