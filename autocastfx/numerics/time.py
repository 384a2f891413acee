"""``time``: a model in float32, under torch.autocast and converted, timed in turns, and where the time goes."""

from __future__ import annotations

import time as clock
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from statistics import quantiles
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autocastfx.capture.call import arguments_of, batches_of, device_of
from autocastfx.capture.leave_intact import equal, intact
from autocastfx.capture.progress import Progress, counted
from autocastfx.conversion import convert
from autocastfx.dtypes import chosen_dtype, dtype_name
from autocastfx.errors import ArgumentError, AutocastFXError, CalibrationError, UnsupportedError
from autocastfx.numerics.logprob_gap import Inputs, LossFunction, loss_of
from autocastfx.numerics.sensitivity import check_fits
from autocastfx.options import DType
from autocastfx.policy.op_list import OpListLike
from autocastfx.report.timing import AUTOCAST, CACHED, COMPILED, COMPILED_AUTOCAST, DEFAULT, FLOAT32, TimedSide, Timing
from autocastfx.runtime.amp_module import AmpModule

_OPTIONS: Mapping[str, Mapping[str, Any]] = {DEFAULT: {}, CACHED: {"weights": "cached", "fold": "kernel"}}


def time(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFunction | None = None,
    *,
    dtype: DType | None = None,
    op_list: OpListLike = "default",
    inputs: Inputs | None = None,
    rounds: int = 15,
    compiled: bool = False,
    progress: Progress = None,
    **options: Any,
) -> Timing:
    """Time a model in float32, under torch.autocast, and converted, on this machine; say where the time goes.

    The sides are converted and compiled first, and then take turns, each round starting with another, so that other
    load affects all alike. A call in training mode is forward, loss and gradients of the parameters, without an
    optimizer; in evaluation, forward without gradients. Attributes, buffers, gradients and the random states are as
    before.

    Args:
        model: a float32 model, where it should run.
        batches: as for :func:`calibrate`; the first is the call that is timed.
        loss_fn: of the output and the batch, one number; by default the loss that the output holds, or else the mean of
            its tensors.
        dtype: as for :func:`convert`.
        op_list: as for :func:`convert`.
        inputs: gives the part of a batch that the model takes, where a batch holds targets too.
        rounds: how often each side is timed, at least 2.
        compiled: also time torch.autocast and the conversion under ``torch.compile``, which takes a minute or more.
        progress: as for :func:`calibrate`.
        **options: further arguments of :func:`convert`, for each conversion.

    Raises:
        CalibrationError: there are no batches.
        CaptureError: the model cannot be captured.
        SensitivityError: a batch does not fit the model, or its loss is no single number.
        UnsupportedError: the model is converted already; or a side fails, which it names.
        ValueError: ``rounds`` is below 2.
    """
    if isinstance(model, AmpModule):
        raise UnsupportedError("the model is converted already: time the original, which is then converted.")
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 2:
        raise ArgumentError(f"rounds is a whole number from 2 on, not {rounds!r}")
    batch = next(batches_of(batches), None)
    if batch is None:
        raise CalibrationError("there are no batches to time. An iterator can be read only once.")
    args, kwargs = arguments_of(batch if inputs is None else inputs(batch))
    check_fits(model, args, kwargs)
    device = device_of(model, args, kwargs)
    low = chosen_dtype(dtype, device)
    # convert and compile all sides, then let them take turns
    with _left_as_it_is(model):
        is_trained = model.training and any(p.requires_grad for p in model.parameters())
        calls: dict[str, Callable[..., Any]] = {FLOAT32: model, AUTOCAST: in_autocast(model, device.type, low)}
        for name, given in _OPTIONS.items():
            how: dict[str, Any] = {"op_list": op_list, "check": False, **options, **given}
            calls[name] = convert(model, args, kwargs or None, dtype=low, **how)
        if compiled:
            calls[COMPILED_AUTOCAST] = in_autocast(torch.compile(model), device.type, low)
            calls[COMPILED] = torch.compile(calls[DEFAULT])
        steps = {
            name: partial(_step, model, call, args, kwargs, partial(_loss, batch, loss_fn) if is_trained else None)
            for name, call in calls.items()
        }
        spent = _in_turns(steps, rounds, device, progress)
        ops = {name: _ops(step, device) for name, step in steps.items()}
    step = "a training step without optimizer" if is_trained else "a forward"
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"a {device.type}"
    return Timing(
        f"{type(model).__name__} in {dtype_name(low)} on {where}: {step}, {rounds} rounds in turns",
        device.type,
        tuple(TimedSide(name, tuple(ms), _ratios(ms, spent[AUTOCAST]), ops[name]) for name, ms in spent.items()),
    )


@contextmanager
def _left_as_it_is(model: nn.Module) -> Generator[None]:
    """Give buffers back their values and the model its attributes, without a dispatch mode, which would take time."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with intact(model):
            yield
    finally:
        with torch.no_grad():
            for buffer, values in before:
                if not equal(buffer, values):  # batch norm does not count up the version of what it writes
                    buffer.copy_(values)


def in_autocast(model: Callable[..., Any], device: str, low: torch.dtype) -> Callable[..., Any]:
    """Return calls of a model in a region of torch.autocast, which may fail at a call alone."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, low):
            return model(*args, **kwargs)

    return call


def _step(
    model: nn.Module,
    call: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    loss: Callable[[Any], torch.Tensor] | None,
) -> None:
    """Run one call; with a ``loss`` also backward, whose gradients are dropped."""
    with nullcontext() if loss is not None else torch.no_grad():
        output = call(*args, **kwargs)
    if loss is not None:
        learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
        torch.autograd.grad(loss(output), learning, allow_unused=True)


def _loss(batch: Any, loss_fn: LossFunction | None, output: Any) -> torch.Tensor:
    if loss_fn is not None or (isinstance(output, Mapping) and "loss" in output):
        return loss_of(output, batch, loss_fn)
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    means = [leaf.float().mean() for leaf in leaves if leaf.requires_grad]
    return loss_of(torch.stack(means).sum() if means else output, batch, None)


def _in_turns(
    steps: Mapping[str, Callable[[], None]], rounds: int, device: torch.device, progress: Progress
) -> dict[str, list[float]]:
    names = list(steps)
    spent: dict[str, list[float]] = {name: [] for name in names}
    with counted(progress, "timing") as show:
        for turn in range(rounds + 1):
            for place in range(len(names)):
                name = names[(turn + place) % len(names)]
                if turn:
                    spent[name].append(_milliseconds(steps[name], device))
                else:
                    _warm_up(name, steps[name])
            show(turn)
    return spent


def _warm_up(name: str, step: Callable[[], None]) -> None:
    try:
        step()
    except AutocastFXError:
        raise
    except Exception as error:  # whatever a kernel or the model's code raises
        raise UnsupportedError(f"the call fails in {name}: {type(error).__name__}: {error}") from error


def _milliseconds(step: Callable[[], None], device: torch.device) -> float:
    _wait_for(device)
    started = clock.perf_counter()
    step()
    _wait_for(device)
    return 1e3 * (clock.perf_counter() - started)


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _ratios(mine: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = quantiles([a / b for a, b in zip(mine, theirs, strict=True)], n=4)
    return low, middle, high


def _ops(step: Callable[[], None], device: torch.device) -> dict[str, float]:
    """Milliseconds of each op, or of each kernel of a GPU, in one call, the largest first."""
    is_gpu = device.type == "cuda"
    seen = torch.profiler.ProfilerActivity.CUDA if is_gpu else torch.profiler.ProfilerActivity.CPU
    profiles: list[Any] = []
    for _ in range(2):  # the first call sets the profiler up
        with torch.profiler.profile(activities=[seen], acc_events=True) as profile:
            step()
            _wait_for(device)
        profiles.append(profile)
    taken = "self_device_time_total" if is_gpu else "self_cpu_time_total"
    spent = {event.key: getattr(event, taken) / 1e3 for event in profiles[-1].key_averages()}
    named = {op.removeprefix("aten::"): ms for op, ms in spent.items() if ms > 0 and (is_gpu or "::" in op)}
    return dict(sorted(named.items(), key=lambda entry: -entry[1]))
