"""A copy of the project, in which one mutant after the other is planted and tested; the project stays as it is."""

from __future__ import annotations

import compileall
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from tests.mutants.mutation import Mutation

_LEFT = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "_build")
_ENDED = re.compile(r"^(?:FAILED|ERROR) (?:tests/)?(\S+)", re.MULTILINE)
_START = 60.0  # seconds that no run takes to begin


class BrokenBeforeError(Exception):
    """Tests fail without a mutant."""


@dataclass
class Workplace:
    """A copy of the project.

    Attributes:
        project: that was copied.
        folder: where the copy is.
        seconds: that each test file takes without a mutant.
    """

    project: Path
    folder: Path
    seconds: dict[Path, float] = field(default_factory=dict)

    @classmethod
    def of(cls, project: Path, folder: Path) -> Workplace:
        """A fresh copy of ``project`` at ``folder``, with its package compiled."""
        shutil.copytree(project, folder, ignore=_LEFT)
        compileall.compile_dir(folder / "autocastfx", quiet=2)
        made = cls(project, folder)
        imported = made._python(["-c", "import autocastfx; print(autocastfx.__file__)"], _START)
        if imported is None or not Path(imported[1].strip()).is_relative_to(folder):
            raise BrokenBeforeError(f"the copy does not import its own package, but {imported}")
        return made

    def check(self, tests: Sequence[Path]) -> None:
        """Run those of these test files that did not run yet without a mutant, and note how long each takes.

        Raises:
            BrokenBeforeError: one fails.
        """
        report, new = self.folder / "durations.xml", [path for path in tests if path not in self.seconds]
        if not new:
            return
        rc, said = self._pytest(new, 3600, f"--junitxml={report}") or (-1, "")
        if rc != 0:
            raise BrokenBeforeError(f"without a mutant the tests end with {rc}:\n{said[-2000:]}")
        found: dict[Path, float] = defaultdict(float, dict.fromkeys(new, 0.0))
        for case in ElementTree.parse(report).iter("testcase"):
            names = case.attrib["classname"].split(".")
            ends = (self.project.joinpath(*names[:n]).with_suffix(".py") for n in range(len(names), 0, -1))
            found[next(path for path in ends if path.is_file())] += float(case.attrib["time"])
        self.seconds.update(found)

    def killer(self, module: str, mutation: Mutation, tests: Sequence[Path]) -> str | None:
        """The test that ``mutation`` of ``module`` does not pass, or what else ended the run; None: it survives all."""
        file = self.folder / "autocastfx" / module
        original, times = file.read_bytes(), (file.stat().st_atime, file.stat().st_mtime)
        limit = _START + 4 * sum(self.seconds.get(path, _START) for path in tests)
        file.write_bytes(mutation.applied(original))
        os.utime(file, (time.time(), time.time()))  # newer than what is compiled
        try:
            ended = self._pytest(tests, limit)
        finally:
            file.write_bytes(original)
            os.utime(file, times)
        if ended is None:
            return f"the time limit of {limit:.0f} s"
        rc, said = ended
        if rc == 0:
            return None
        first = _ENDED.search(said)
        return first[1] if first is not None else f"pytest's exit with {rc}"

    def _pytest(self, tests: Sequence[Path], limit: float, *options: str) -> tuple[int, str] | None:
        files = [path.relative_to(self.project).as_posix() for path in tests]
        quiet = ["-q", "-x", "-p", "no:cacheprovider", "--tb=no", "--show-capture=no", "--no-header", "-rfE"]
        return self._python(["-m", "pytest", *quiet, *options, *files], limit)

    def _python(self, args: Sequence[str], limit: float) -> tuple[int, str] | None:
        """Exit status and output of a Python in the copy; None if it was ended at the time limit."""
        one = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"), "1")
        env = {**os.environ, **one, "PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, *args]
        process = subprocess.Popen(
            command, cwd=self.folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            said, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return None
        return process.returncode, said.decode(errors="replace")
