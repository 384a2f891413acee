"""Before torch is imported the command tells its version, and Ctrl-C ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from autocastfx.cli import before_import
from autocastfx.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
SLOW = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
COMMAND = "import sys\nfrom autocastfx.cli.main import main\nsys.exit(main())\n"


def interrupted(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run Python where ``import torch`` is interrupted.

    Python ignores the signal where its parent does, as a shell without job control does for what ends in ``&``.
    """
    (folder / "slow").mkdir()
    (folder / "slow" / "torch.py").write_text(SLOW)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder / "slow"), str(ROOT)])}
    return subprocess.run(
        [sys.executable, *argv],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_while_torch_is_imported_the_module_ends_in_one_line(tmp_path: Path) -> None:
    done = interrupted(tmp_path, "-m", "autocastfx", "doctor")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "autocastfx: interrupted\n")


def test_so_does_the_installed_command(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "autocastfx").write_text(COMMAND)
    done = interrupted(tmp_path, str(tmp_path / "bin" / "autocastfx"), "doctor")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "autocastfx: interrupted\n")


def test_other_programs_see_the_exception(tmp_path: Path) -> None:
    done = interrupted(tmp_path, "-c", "import autocastfx")
    assert done.returncode == -signal.SIGINT
    assert done.stderr.endswith("KeyboardInterrupt\n")


def test_the_version_is_told_before_torch_is_imported(tmp_path: Path) -> None:
    done = interrupted(tmp_path, "-m", "autocastfx", "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"autocastfx {version('autocastfx')}\n", "")


@pytest.mark.parametrize(
    ("argv", "given", "expected"),
    [
        (["-m", "x"], ["python", "-m", "autocastfx", "x"], True),
        (["-m"], ["python", "-X", "dev", "-mautocastfx"], True),
        (["-m"], ["python", "-m", "pytest", "-m", "autocastfx"], False),
        (["/usr/bin/autocastfx"], ["python", "/usr/bin/autocastfx"], True),
        (["train.py"], ["python", "train.py", "-m", "autocastfx"], False),
        ([""], ["python"], False),
    ],
)
def test_which_processes_are_the_command(
    argv: list[str], given: list[str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", given)
    before = signal.getsignal(signal.SIGINT)
    try:
        before_import.begin_command("1.0")
        assert (signal.getsignal(signal.SIGINT) is not before) == expected
        before_import.raise_when_interrupted()
        assert signal.getsignal(signal.SIGINT) is (signal.default_int_handler if expected else before)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_command_can_be_interrupted_and_clean_up(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, before_import._end)
        assert main(["lists"]) == 0
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == ""
