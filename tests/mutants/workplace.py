"""A copy of the project, in which one mutant after the other is planted and tested; the project stays as it is."""

from __future__ import annotations

import compileall
import importlib
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.mutants.mutation import Mutation

_LEFT = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "_build")
_ENDED = re.compile(r"^(?:FAILED|ERROR) (?:tests/)?(.+?)(?: - |$)", re.MULTILINE)
_START = 60.0  # seconds that no run takes to begin
_QUIET = ("-q", "-x", "-p", "no:cacheprovider", "--tb=no", "--show-capture=no", "--no-header", "-rfE")
# What every run imports is imported once, and runs are forks: of the package and its tests nothing is.
_ONCE = ("torch", "torch.export", "torch._dynamo", "torch.fx.experimental.symbolic_shapes", "networkx", "pytest")


class BrokenBeforeError(Exception):
    """Tests fail without a mutant."""


@dataclass
class Workplace:
    """A copy of the project.

    Attributes:
        project: that was copied.
        folder: where the copy is.
        seconds: that each test file takes without a mutant, of those that ran so.
    """

    project: Path
    folder: Path
    seconds: dict[Path, float] = field(default_factory=dict)

    @classmethod
    def of(cls, project: Path, folder: Path) -> Workplace:
        """A fresh copy of ``project`` at ``folder``, with its package compiled."""
        for name in _ONCE:
            importlib.import_module(name)
        shutil.copytree(project, folder, ignore=_LEFT)
        compileall.compile_dir(folder / "autocastfx", quiet=2)
        return cls(project, folder)

    def killer(self, module: str, mutation: Mutation, tests: Sequence[Path]) -> str | None:
        """The test that ``mutation`` of ``module`` does not pass, or what else ended the run; None: it survives all.

        Raises:
            BrokenBeforeError: a test fails without it.
        """
        file = self.folder / "autocastfx" / module
        original, times = file.read_bytes(), (file.stat().st_atime, file.stat().st_mtime)
        for path in tests:
            self._check(path)
            file.write_bytes(mutation.applied(original))
            os.utime(file, (time.time(), time.time()))  # newer than what is compiled
            try:
                found = self._ending(path, _START + 4 * self.seconds[path])
            finally:
                file.write_bytes(original)
                os.utime(file, times)
            if found is not None:
                return found
        return None

    def _check(self, path: Path) -> None:
        """Run a test file without a mutant, if it did not run so yet, and note how long it takes."""
        if path not in self.seconds:
            began = time.monotonic()
            found = self._ending(path, 3600)
            if found is not None:
                raise BrokenBeforeError(f"without a mutant {path.name} ends with {found}")
            self.seconds[path] = time.monotonic() - began

    def _ending(self, path: Path, limit: float) -> str | None:
        """The first test that fails in a file of the copy, or what else ended the run; None: all pass."""
        said = self.folder / "said.txt"
        child = os.fork()
        if child == 0:
            self._run(path.relative_to(self.project).as_posix(), said)
        ends = time.monotonic() + limit
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
            if time.monotonic() > ends:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return f"the time limit of {limit:.0f} s"
            time.sleep(0.05)
        if (rc := os.waitstatus_to_exitcode(ended[1])) == 0:
            return None
        first = _ENDED.search(said.read_text(errors="replace"))
        return first[1] if first is not None else f"pytest's exit with {rc}"

    def _run(self, file: str, said: Path) -> None:
        """In a fork: become a pytest in the copy, and end."""
        rc = -1
        try:
            os.setsid()
            out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1)
            os.dup2(out, 2)
            os.chdir(self.folder)
            os.environ.update(PYTHONPATH=str(self.folder), PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")
            sys.dont_write_bytecode = True
            sys.path[:] = [str(self.folder), *(p for p in sys.path if p and Path(p).resolve() != self.project)]
            for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "__main__")]:
                del sys.modules[name]
            rc = self._pytest(file)
        finally:
            sys.stdout.flush()
            os._exit(rc)

    def _pytest(self, file: str) -> int:
        import pytest
        import torch

        import autocastfx

        torch.set_num_threads(1)
        if not Path(autocastfx.__file__).is_relative_to(self.folder):
            raise BrokenBeforeError(f"the copy imports {autocastfx.__file__}, not its own package")
        return int(pytest.main([*_QUIET, file], plugins=[_Hasty()]))


class _Hasty:
    """Of hypothesis, the same examples in every run; the first that fails will do, be it large."""

    def pytest_configure(self) -> None:
        from hypothesis import Phase, settings

        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutants", settings(), derandomize=True, database=None, phases=phases)
        settings.load_profile("mutants")
