"""Use the installed wheel once; `make wheel` runs this with the wheel's own interpreter, outside the repository.

It is no pytest module: pytest would find the working tree's package, in an environment that has more than the wheel
asks for.
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points, version
from pathlib import Path

import torch
from torch import nn

import autocastfx

REPOSITORY = Path(__file__).resolve().parent.parent


def require(condition: bool, message: str) -> None:
    """End the run with `message` unless `condition` holds (an assert would vanish under -O)."""
    if not condition:
        sys.exit(f"wheel_smoke: {message}")


def check_where_it_comes_from() -> Path:
    """The package is the wheel's, and nothing of the repository can be imported. Returns the package's folder."""
    package = Path(autocastfx.__file__).resolve().parent
    environment = Path(sys.prefix).resolve()
    require(package.is_relative_to(environment), f"autocastfx comes from {package}, not from {environment}")
    on_path = [entry for entry in sys.path if Path(entry).resolve() in (REPOSITORY, REPOSITORY / "tests")]
    require(not on_path, f"the repository is on sys.path: {on_path}")
    require(not Path.cwd().resolve().is_relative_to(REPOSITORY), f"run this outside {REPOSITORY}, not in {Path.cwd()}")
    return package


def check_what_it_carries(package: Path) -> None:
    """The type marker, the table of GPUs and every op list of the repository are inside the package."""
    require((package / "py.typed").is_file(), "the wheel lacks py.typed")
    require((package / "report" / "lint" / "gpus.yaml").is_file(), "the wheel lacks the table of GPUs")
    expected = {path.name: path.read_bytes() for path in (REPOSITORY / "op_lists").glob("*.yaml")}
    shipped = {path.name: path.read_bytes() for path in (package / "op_lists").glob("*.yaml")}
    require(bool(expected), "the repository has no op lists to compare with")
    require(shipped == expected, f"the wheel's op lists {sorted(shipped)} are not the repository's {sorted(expected)}")


def check_what_it_does() -> float:
    """A small model converts, runs in 16 bits, and stays near the original. Returns the largest difference."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)).eval()
    inputs = torch.randn(8, 16)
    converted = autocastfx.convert(model, (inputs,), dtype="float16")
    with torch.no_grad():
        expected, actual = model(inputs), converted(inputs)
    require(actual.dtype == expected.dtype, f"the output is {actual.dtype}, the original's is {expected.dtype}")
    difference = (actual - expected).abs().max().item()
    require(0 < difference < 0.05, f"the outputs differ by {difference}: none means that nothing ran in 16 bits")
    return difference


def check_the_page() -> None:
    """The page's scripts, styles and the notices of what it carries are inside the package."""
    text = autocastfx.dump(autocastfx.convert(nn.Linear(4, 4), (torch.randn(2, 4),), dtype="float16"), format="html")
    for words in ("Viz.instance", "Eclipse Public License", "color-scheme: light dark", '"variants":['):
        require(words in text, f"the HTML dump lacks {words!r}")


def check_the_command() -> None:
    """The command line is installed as ``autocastfx``, and finds the op lists."""
    (command,) = entry_points(group="console_scripts", name="autocastfx")
    code = command.load()(["lists", "check", "default"])
    require(code == 0, f"`autocastfx lists check default` exits with {code}")


def main() -> None:
    """Run the checks and print one line."""
    package = check_where_it_comes_from()
    check_what_it_carries(package)
    check_the_command()
    check_the_page()
    difference = check_what_it_does()
    print(f"wheel_smoke: autocastfx {version('autocastfx')} from its wheel: ok, largest difference {difference:.1e}")


if __name__ == "__main__":
    main()
