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
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.mutants.mutation import Mutation

_LEFT = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "_build")
_ENDED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", re.MULTILINE)
_SETTINGS = "_hypothesis_internal_use_settings"  # where hypothesis keeps those of a test
_LIMIT = 600.0  # seconds: longer than the tests of any file take
_QUIET = ("-q", "-x", "-p", "no:cacheprovider", "--tb=no", "--show-capture=no", "--no-header", "-rfE")
# What every run imports is imported once, and runs are forks: of the package and its tests nothing is.
_ONCE = ("torch.export", "torch._dynamo", "torch.fx.experimental.symbolic_shapes", "networkx")


@dataclass
class Workplace:
    """A copy of the project.

    Attributes:
        project: that was copied.
        folder: where the copy is.
    """

    project: Path
    folder: Path

    @classmethod
    def of(cls, project: Path, folder: Path) -> Workplace:
        """A fresh copy of ``project`` at ``folder``, with its package compiled."""
        for name in _ONCE:
            importlib.import_module(name)
        torch.export.export(torch.nn.Identity(), (torch.ones(2),))  # imports the rest
        shutil.copytree(project, folder, ignore=_LEFT)
        compileall.compile_dir(folder / "autocastfx", quiet=2)
        return cls(project, folder)

    def killer(self, module: str, mutation: Mutation, tests: Sequence[Path]) -> str | None:
        """The test that ``mutation`` of ``module`` does not pass, or what else ended the run; None: it survives all."""
        file = self.folder / "autocastfx" / module
        original, times = file.read_bytes(), (file.stat().st_atime, file.stat().st_mtime)
        file.write_bytes(mutation.applied(original))
        os.utime(file, (time.time(), time.time()))  # newer than what is compiled
        try:
            endings = (self.ending([path.relative_to(self.project).as_posix()]) for path in tests)
            return next((found for found in endings if found is not None), None)
        finally:
            file.write_bytes(original)
            os.utime(file, times)

    def ending(self, tests: Sequence[str]) -> str | None:
        """The first of these tests that fails in the copy as it is, or what else ended the run; None: none failed."""
        said = self.folder / "said.txt"
        child = os.fork()
        if child == 0:
            self._run(tests, said)
        ends = time.monotonic() + _LIMIT
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
            if time.monotonic() > ends:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return f"the time limit of {_LIMIT:.0f} s"
            time.sleep(0.05)
        if (rc := os.waitstatus_to_exitcode(ended[1])) in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return None
        first = _ENDED.search(said.read_text(errors="replace"))
        return first[1] if first is not None else f"pytest's exit with {rc}"

    def _run(self, tests: Sequence[str], said: Path) -> None:
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
            for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
                del sys.modules[name]
            sys.modules["__main__"] = ModuleType("__main__")  # processes that tests start would run the real one again
            rc = self._pytest(tests)
        finally:
            sys.stdout.flush()
            os._exit(rc)

    def _pytest(self, tests: Sequence[str]) -> int:
        import autocastfx

        torch.set_num_threads(1)
        if not Path(autocastfx.__file__).is_relative_to(self.folder):
            raise ImportError(f"the copy imports {autocastfx.__file__}, not its own package")
        return int(pytest.main([*_QUIET, *tests], plugins=[_Hasty()]))


class _Hasty:
    """Of hypothesis, few examples, the same in every run; the first that fails will do, be it large."""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        from hypothesis import Phase, settings

        for item in items:
            test = getattr(item, "obj", None)
            known = getattr(test, _SETTINGS, None)
            if known is not None:
                few = {"max_examples": min(known.max_examples, 60), "phases": (Phase.explicit, Phase.generate)}
                setattr(test, _SETTINGS, settings(known, derandomize=True, database=None, **few))
