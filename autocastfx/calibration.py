"""``calibrate``: run a float32 model on batches and record how large each of its values gets."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from autocastfx.capture.call import INPUTS_ALONE, CallSignature, arguments_of, batches_of, refuse_scripted
from autocastfx.capture.kept_whole import functions_at
from autocastfx.capture.leave_intact import isolated, set_modes
from autocastfx.capture.measure import measured_run
from autocastfx.capture.progress import Progress, counted
from autocastfx.errors import ArgumentError, CalibrationError, UnsupportedError
from autocastfx.graph.walk import Key, mode_of
from autocastfx.plan.ranges import Range, Ranges
from autocastfx.policy.op_list import OpListLike, load_op_list
from autocastfx.runtime.amp_module import AmpModule
from autocastfx.runtime.captures import CapturedGraph, Captures


def calibrate(
    model: nn.Module | ExportedProgram,
    batches: Iterable[Any],
    *,
    op_list: OpListLike = "default",
    training: bool | None = None,
    progress: Progress = None,
) -> Ranges:
    """Run ``model`` on ``batches`` in float32 and record the largest and the typical magnitude of each of its values.

    Batches run one after the other; no activation outlives its batch. The model is unchanged: it updates copies of its
    buffers, and modes and the state of torch's random numbers are restored.

    Args:
        model: a float32 model, not a converted one.
        batches: each is the input of one call: a tensor; a tuple or list of positional arguments; a mapping of keyword
            arguments; or a pair of a tuple and a mapping, for both. They must be on the model's device. The iterable
            is read once.
        op_list: the op list of the conversion; Python functions that it names stay single nodes.
        training: run in training (True) or evaluation (False) mode; by default in the model's own modes.
        progress: True writes a line to stderr, False none; by default there is one on a terminal. A callable is
            called with the number of batches done, after each.

    Returns:
        The ranges, for :func:`convert`'s argument ``calibrate``. Sub-graphs that a conversion goes into are measured
        inside.

    Raises:
        CalibrationError: there are no batches, or one does not fit the model's forward.
        CaptureError: the model cannot be captured.
        UnsupportedError: the model is converted already, or came out of torch.export and ``training`` is given.
    """
    if isinstance(model, AmpModule):
        raise UnsupportedError("the model is converted already: calibrate the original, and convert it again.")
    module = cast("nn.Module", model.module()) if isinstance(model, ExportedProgram) else model
    refuse_scripted(module)
    if not isinstance(training, (bool, type(None))):
        raise ArgumentError(f"training is True, False or None, not {training!r}")
    baked = isinstance(module, fx.GraphModule) and hasattr(module, "_in_spec")  # torch.export made it
    if baked and training is not None:
        raise UnsupportedError("the model came out of torch.export, which bakes its mode in: leave training=None.")
    modes = [m.training if training is None else training for m in module.modules()]
    measuring, leaves = Measuring(mode_of(modes)), load_op_list(op_list).functions()
    captures = Captures(module, CallSignature.of(module.forward), functions_at(leaves))

    def call(*args: Any, **kwargs: Any) -> None:
        set_modes(list(module.modules()), modes)  # isolated gives back those before
        captures.call(measuring, args, kwargs)

    return measuring.measure(module, call, batches, progress)


class Measuring:
    """Runs captured graphs as they are, in float32, and notes how large their values get, in one mode."""

    def __init__(self, mode: str) -> None:
        self.mode, self.found = mode, dict[Key, Range]()

    def _prepare(self, graph: CapturedGraph) -> None:
        """Do nothing: it settles no sizes."""

    def _run_graph(self, graph: CapturedGraph, inputs: Sequence[Any]) -> Any:
        """Run a graph with Dynamo's inputs."""
        with torch.no_grad(), torch._C._DisableAutocast():
            outputs, seen = measured_run(graph.captured, dict(zip(graph.places, inputs, strict=True)))
        for key, magnitude, count in seen:
            now = Range(self.mode, *key, magnitude.largest, magnitude.rms, count)
            self.found[key] = now if (before := self.found.get(key)) is None else before.merged(now)
        return outputs

    def measure(
        self, model: nn.Module, call: Callable[..., Any], batches: Iterable[Any], progress: Progress = None
    ) -> Ranges:
        """Call ``call``, which runs graphs of ``model`` through this, with each batch; the model stays as it is.

        Raises:
            CalibrationError: there are no batches, or one does not fit.
        """
        signature, done = CallSignature.of(model.forward), 0
        with isolated(model), counted(progress, "calibrating") as show:
            for done, batch in enumerate(batches_of(batches), 1):
                given = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, arguments_of(batch))
                args, kwargs = copy.deepcopy(given)
                try:
                    signature.bind(args, kwargs)
                except TypeError as error:
                    name = type(model).__name__
                    told = f"batch {done} does not fit {name}.forward: {error}. {INPUTS_ALONE}"
                    raise CalibrationError(told) from None
                call(*args, **kwargs)
                show(done)
        if not done:
            raise CalibrationError(_NO_BATCHES)
        return Ranges(tuple(self.found.values()), done)


def ranges_of(given: Any, measure: Callable[[Any, OpListLike], Ranges], op_list: OpListLike) -> Ranges:
    """Turn ``calibrate=given`` into ranges: given are ranges, a path to saved ones, or batches to ``measure``."""
    if isinstance(given, Ranges):
        return given
    if isinstance(given, (str, os.PathLike)):
        return Ranges.load(cast("str | os.PathLike[str]", given))
    return measure(given, op_list)


def first_call(batches: Iterable[Any]) -> tuple[tuple[Any, ...], dict[str, Any], Iterable[Any]]:
    """Return the first batch's positional and keyword arguments, and an iterable of all batches.

    Raises:
        CalibrationError: there are no batches.
    """
    rest = batches_of(batches)
    for batch in rest:
        return *arguments_of(batch), itertools.chain([batch], rest)
    raise CalibrationError(_NO_BATCHES)


_NO_BATCHES = "there are no batches to calibrate on. An iterator can be read only once."
