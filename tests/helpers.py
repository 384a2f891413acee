"""Small tools that several test files share."""

from __future__ import annotations

import inspect
import logging
import re
import textwrap
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import fx, nn

import autocastfx
from autocastfx.graph.names import op_name
from autocastfx.graph.node import dtypes, origin
from benchmarks.judge import distance

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
_CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
PINNED = tuple(map(int, re.findall(r"^torch==(\d+)\.(\d+)\.", _CONSTRAINTS.read_text(), re.MULTILINE)[0]))
is_pinned_torch = TORCH == PINNED
with_pinned_torch = pytest.mark.skipif(not is_pinned_torch, reason="of the torch of constraints.txt; this is another")


def _runs_low_lstm() -> bool:
    """True if torch itself runs an LSTM in bfloat16 on this CPU. Without AVX-512, oneDNN has no kernel for it."""
    try:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            nn.LSTM(6, 5)(torch.zeros(2, 3, 6))
    except RuntimeError as error:
        if "primitive descriptor for the LSTM" not in str(error):
            raise
        return False
    return True


with_low_lstm = pytest.mark.skipif(not _runs_low_lstm(), reason="torch has no bfloat16 LSTM for this CPU")

# For a model that gives Inf or NaN, or does not run, on purpose: nothing can be compared.
unchecked = pytest.mark.filterwarnings("ignore::autocastfx.errors.UncheckedWarning")

SHORT = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.float64: "f64", torch.bool: "bool"}


def examples(few: int, many: int) -> settings:
    """How many examples hypothesis draws: ``few`` in `make test`, ``many`` in `make test-all`."""
    return settings(max_examples=few if settings.get_current_profile_name() == "same" else many)


def sampled(cases: Iterable[Any], kept: Callable[[int, Any], bool]) -> list[Any]:
    """The cases for a parametrized test: those not ``kept``, by number or by name, run in `make test-all` alone."""
    return [
        case if kept(number, case) else pytest.param(case, marks=pytest.mark.slow) for number, case in enumerate(cases)
    ]


class Function(nn.Module):
    """A plain function as a module without parameters."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.signature = inspect.signature(function)

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


class Net(nn.Module):
    """A function of (itself, inputs) as a model, with the modules, parameters and buffers that it uses."""

    def __init__(self, function: Callable[..., Any], **held: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in held.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


class Straight(torch.autograd.Function):
    """Rounds; its derivative is 0 almost everywhere, and its gradient is none that a trace through it would give."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * 3


def op_list(tmp_path: Path, text: str) -> autocastfx.OpList:
    """An op list from YAML text."""
    path = tmp_path / "test.yaml"
    path.write_text(textwrap.dedent(text))
    return autocastfx.load_op_list(path)


def listing(graph: fx.Graph) -> str:
    """One line a computing node: ``name: dtype = op(inputs)``; inserted casts start with ``+``."""
    lines = []
    for node in graph.nodes:
        if node.op == "call_function":
            mark = "+ " if origin(node) is not None else "  "
            dtype = ",".join(SHORT.get(d, str(d)) for d in dtypes(node))
            reads = ", ".join(n.name for n in node.all_input_nodes)
            lines.append(f"{mark}{node.name}: {dtype} = {op_name(node)}({reads})")
        elif node.op == "output":
            lines.append("  return " + ", ".join(n.name for n in node.all_input_nodes))
    return textwrap.dedent("\n".join(lines))


def text(block: str) -> str:
    """An expected listing, written indented."""
    return textwrap.dedent(block).strip("\n")


def relative_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    """Distance of ``result`` from ``reference`` in the 2-norm, relative to the norm of ``reference``."""
    return distance(result, reference)


def saved_bytes(run: Callable[[], Any]) -> int:
    """Bytes of the storages that autograd keeps for the backward of what ``run`` computes."""
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run()
    del result
    return sum(storage.nbytes() for storage in kept.values())


@contextmanager
def heard(name: str = "autocastfx", level: int = logging.INFO) -> Generator[list[str]]:
    """Collect the messages of a logger while it is open."""
    lines: list[str] = []
    handler, log = logging.Handler(), logging.getLogger(name)
    handler.emit = lambda record: lines.append(record.getMessage())
    before = log.level
    log.addHandler(handler)
    log.setLevel(level)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
