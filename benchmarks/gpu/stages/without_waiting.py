"""Find out whether a training step makes the host wait for the device, and whether a CUDA graph can hold it whole."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.measure import failure
from benchmarks.gpu.sides import DTYPES, Source, source
from benchmarks.gpu.stage import Given, Row
from benchmarks.gpu.stages.steps import in_a_graph
from benchmarks.judge import distance
from benchmarks.training import Setting, Training

WARM_UP = 3  # steps


def synchronising(given: Given, models: Sequence[str], sides: Sequence[str]) -> Iterator[Row]:
    """Yield for each model, side and dtype whether one step waits for the device, and the first reason."""
    warnings.simplefilter("ignore")
    sources = {model: source(model, given.device) for model in models}
    given.wait()
    for model, found in sources.items():
        for name, dtype in DTYPES.items():
            for side in sides:
                if given.has(model, side, name):
                    continue
                row: Row = {"model": model, "side": side, "dtype": name}
                try:
                    one = found.side(side, Setting(given.device, dtype))
                    _steps(one, WARM_UP)
                    why = _waits(one)
                    yield {**row, "waits": bool(why), **({"why": why} if why else {})}
                except Exception as error:  # of this side; the others are tried
                    yield {**row, "error": failure(error)}


def _waits(one: Training) -> str:
    """Return the error of a step that waits; empty if it does not."""
    torch.cuda.synchronize()
    mode: Any = torch.cuda.set_sync_debug_mode
    mode("error")
    try:
        _steps(one, 1)
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return failure(error)
    finally:
        mode("default")
    return ""


def _steps(one: Training, count: int) -> None:
    for _ in range(count):
        one.prepare()
        one.forward_and_backward()
        one.step()


def graphed(given: Given, models: Sequence[str], sides: Sequence[str], steps: int = 5) -> Iterator[Row]:
    """Yield how far weights are apart after steps replayed from a CUDA graph and after the same eager steps.

    ``again`` is how far a second eager run is: above 0, kernels do not repeat their results to the bit.
    """
    warnings.simplefilter("ignore")
    sources = {model: source(model, given.device, dropout=False) for model in models}
    given.wait()
    for model, found in sources.items():
        for name, dtype in DTYPES.items():
            setting = Setting(given.device, dtype, is_capturable=True)
            for side in sides:
                if given.has(model, side, name):
                    continue
                row: Row = {"model": model, "side": side, "dtype": name}
                try:
                    eager, again, replayed = (_trained(found, side, setting, steps, how) for how in _HOW)
                    row |= {"equal": all(map(torch.equal, replayed, eager)), "apart": _apart(replayed, eager)}
                    row |= {"again": _apart(again, eager), "moved": _apart(eager, _weights(found.model))}
                except Exception as error:  # of this side; the others are tried
                    row["error"] = failure(error)
                yield row


def _eager(one: Training) -> Callable[[], None]:
    _steps(one, WARM_UP)

    def step() -> None:
        one.forward_and_backward()
        one.step()

    return step


_HOW: tuple[Callable[[Training], Callable[[], None]], ...] = (_eager, _eager, in_a_graph)


def _trained(
    found: Source, side: str, setting: Setting, steps: int, how: Callable[[Training], Callable[[], None]]
) -> list[Tensor]:
    """Return the weights after the steps, and leave those of the source as they were."""
    state = {name: tensor.clone() for name, tensor in found.model.state_dict().items()}
    try:
        one = found.side(side, setting)
        step = how(one)
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        return _weights(one.model)
    finally:
        found.model.load_state_dict(state)


def _weights(model: torch.nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def _apart(ours: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    return distance(torch.cat([one.flatten() for one in ours]), torch.cat([one.flatten() for one in others]))
