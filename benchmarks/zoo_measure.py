"""Measure a model of the zoo against float32 and torch.autocast, on the CPU.

Each model is converted once for each dtype and level of folding, and the result is called in training and in evaluation
mode, so that every row also tests switching modes. A row passes if it meets the criterion of
:mod:`benchmarks.zoo_judge`, at the size of the conversion and at another one, and no gradient is missing or not finite.
"""

from __future__ import annotations

import copy
import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

import autocastfx
from autocastfx.errors import AutocastFXError
from benchmarks.zoo_case import ZooModel, draw
from benchmarks.zoo_judge import LEVELS, Distance, Forward, gradients_apart, outputs_apart, typical, worst

FIRST_SIZE = (2, 16)
OTHER_SIZE = (3, 24)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
MODES = ("train", "eval")
SEED = 1
_ROOT = Path(__file__).resolve().parents[1]
DRAWS = (8, 16, 32, 64)  # a row that is beyond its bound after so many is measured on more, and fails after the last
SCALES = {"bfloat16": 1.0, "float16": 2.0**12}
_LEAST_SCALE = 2.0**-12


@dataclass(frozen=True)
class Row:
    """The measurement of a model in one mode, dtype and level of folding.

    ``output`` and ``tensor`` name the output and the gradient that are nearest to their bounds, or farthest beyond;
    ``ours`` and ``tensor_ours`` are their distances to float32. ``other_*`` is the worst output at the other size, and
    ``grad_*`` all gradients as one vector. Distances are geometric means over ``draws`` draws of the inputs. ``scale``
    is the smallest loss scale that a draw needed. ``reason`` says why the verdict is not PASS.
    """

    model: str
    mode: str
    dtype: str
    capture: str = "-"
    nodes: int = 0
    casts: int = 0
    ours: float = math.nan
    autocast: float = math.nan
    other_ours: float = math.nan
    other_autocast: float = math.nan
    grad_ours: float = math.nan
    grad_autocast: float = math.nan
    backward: str = "-"
    variants: int = 0
    seconds: float = math.nan
    verdict: str = "PASS"
    reason: str = ""
    fold: str = "exact"
    output: str = "-"
    tensor: str = "-"
    tensor_ours: float = math.nan
    tensor_autocast: float = math.nan
    draws: int = 1
    scale: float = 1.0


# ---- runs -----------------------------------------------------------------------------------------------------------


def _inputs(model: ZooModel, size: tuple[int, int], number: int = 0) -> dict[str, Any]:
    with draw(number):
        return model.inputs(*size)


def _forward(call: nn.Module, owner: nn.Module, inputs: dict[str, Any]) -> tuple[Forward, object]:
    """Call from a fixed seed; `owner` is the caller's module, whose buffers are read (and shared with `call`)."""
    torch.manual_seed(SEED)
    result = call(**inputs)
    leaves, _ = tree_flatten_with_path(result)
    outputs = {f"output{keystr(path)}": leaf for path, leaf in leaves if isinstance(leaf, Tensor)}
    buffers = tuple(buffer.clone() for buffer in owner.buffers() if buffer.is_floating_point())
    given = (leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.is_floating_point())
    return Forward(outputs, buffers, tuple(given)), result


def _loss(result: object, outputs: Iterable[Tensor]) -> Tensor:
    """Return the model's loss, or the mean squares of its floating outputs if it computes none."""
    loss = result.get("loss") if isinstance(result, dict) else getattr(result, "loss", None)
    if isinstance(loss, Tensor):
        return loss.float()
    return torch.stack([out.float().square().mean() for out in outputs if out.requires_grad]).sum()


def _gradients(owner: nn.Module, result: object, outputs: Iterable[Tensor], scale: float) -> dict[str, Tensor]:
    """Run backward from the scaled loss, and return the unscaled gradients of the caller's parameters."""
    owner.zero_grad(set_to_none=True)
    (scale * _loss(result, outputs)).backward()
    return {name: p.grad / scale for name, p in owner.named_parameters() if p.grad is not None}


@dataclass(frozen=True)
class Run:
    """Forwards at both sizes and, in train mode, the gradients with their loss scale."""

    first: Forward
    other: Forward
    gradients: dict[str, Tensor]
    scale: float = 1.0


@dataclass(frozen=True)
class Draw:
    """The runs of one draw of the inputs: ours, torch.autocast's (None if it fails), and float32's."""

    ours: Run
    autocast: Run | None
    reference: Run


def run(
    call: nn.Module,
    owner: nn.Module,
    model: ZooModel,
    mode: str,
    dtype: torch.dtype | None = None,
    *,
    scale: float = 1.0,
    number: int = 0,
) -> Run:
    """Run `call`, under torch.autocast if a dtype is given; each forward starts from the owner's initial state.

    The inputs are those of draw ``number``. The loss is multiplied by ``scale``; unless it is 1, the scale is halved,
    as in training, until all gradients are finite or it reaches ``_LEAST_SCALE``.
    """
    least = scale if scale == 1 else _LEAST_SCALE
    initial = copy.deepcopy(owner.state_dict())
    call.train(mode == "train")
    autocast = nullcontext() if dtype is None else torch.autocast("cpu", dtype)
    while True:
        with autocast:
            first, result = _forward(call, owner, _inputs(model, FIRST_SIZE, number))
        gradients = _gradients(owner, result, first.outputs.values(), scale) if mode == "train" else {}
        owner.load_state_dict(initial)
        if scale <= least or all(gradient.isfinite().all() for gradient in gradients.values()):
            break
        scale /= 2
    with autocast, torch.no_grad():
        other, _ = _forward(call, owner, _inputs(model, OTHER_SIZE, number))
    owner.load_state_dict(initial)
    return Run(first, other, gradients, scale)


def gradient_faults(owner: nn.Module, gradients: dict[str, Tensor], reference: dict[str, Tensor]) -> list[str]:
    """Name the gradients that are missing, not finite, or not of their parameter's dtype."""
    parameters = dict(owner.named_parameters())
    faults = [f"no gradient: {name}" for name in reference if name not in gradients]
    faults += [f"unexpected gradient: {name}" for name in gradients if name not in reference]
    for name, gradient in gradients.items():
        if gradient.dtype != parameters[name].dtype:
            faults.append(f"gradient is {gradient.dtype}: {name}")
        elif not gradient.isfinite().all() and (name not in reference or reference[name].isfinite().all()):
            faults.append(f"gradient not finite: {name}")
    return faults


# ---- one model ------------------------------------------------------------------------------------------------------


def _summary(error: BaseException) -> str:
    """Return the error's first line, and the line of the model that torch.export names, if any.

    Paths are cut to begin at a package or this project, so that results do not depend on the machine.
    """
    said = re.sub(r'[^\s"]*/site-packages/', "", str(error)).replace(f"{_ROOT}/", "")
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    blamed = [number for number, line in enumerate(lines) if line.startswith("The following call raised this error")]
    where = f" at {' '.join(lines[blamed[0] + 1 : blamed[0] + 3])}" if blamed else ""
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}{where}"


def plain_export(model: ZooModel, mode: str) -> str:
    """Try plain torch.export on the model; return its error, or an empty text."""
    module = model.build().train(mode == "train")
    try:
        torch.export.export(module, (), _inputs(model, FIRST_SIZE), strict=False)
    except Exception as error:
        return _summary(error)
    return ""


def _graph_facts(amp: autocastfx.AmpModule) -> dict[str, Any]:
    """Return facts on the graph of the current mode (dynamic sizes, nodes, casts), and the number of variants."""
    shown = next(variant for variant in amp.variants if variant.plan is amp.plan)
    return {
        "capture": f"export/{shown.captured.sizes}" if shown.captured else "-",
        "nodes": len(amp.graph.nodes),
        "casts": len(amp.plan.casts),
        "variants": len(amp.variants),
    }


def judge(row: Row, draws: Sequence[Draw], owner: nn.Module, dtype: torch.dtype) -> Row:
    """Fill in the distances and the verdict of one row."""
    row = replace(row, draws=len(draws), scale=min(d.ours.scale for d in draws))
    for d in draws:
        for forward, expected in ((d.ours.first, d.reference.first), (d.ours.other, d.reference.other)):
            got, wanted = ([str(out.dtype) for out in f.outputs.values()] for f in (forward, expected))
            if got != wanted:
                return replace(row, verdict="FAIL", reason=f"outputs are {got}, float32 gives {wanted}")
    level, eps = LEVELS[row.fold], torch.finfo(dtype).eps
    faults = [fault for d in draws for fault in gradient_faults(owner, d.ours.gradients, d.reference.gradients)]
    first = [outputs_apart(d.ours.first, d.autocast and d.autocast.first, d.reference.first, eps) for d in draws]
    other = [outputs_apart(d.ours.other, d.autocast and d.autocast.other, d.reference.other, eps) for d in draws]
    judged = [
        (level.value, "", worst(map(typical, zip(*first, strict=True)), level.value, eps)),
        (level.value, "other size ", worst(map(typical, zip(*other, strict=True)), level.value, eps)),
    ]
    values = _named("", judged[0][2]) | _named("other_", judged[1][2]) | {"output": judged[0][2].name}
    has_gradients = any(d.reference.gradients for d in draws)
    if has_gradients and not faults:
        found = [
            gradients_apart(d.ours.gradients, d.autocast and d.autocast.gradients, d.reference.gradients, eps)
            for d in draws
        ]
        whole = typical([one for one, _ in found])
        tensor = worst(map(typical, zip(*(each for _, each in found), strict=True)), level.gradient, eps)
        judged += [(level.gradients, "", whole), (level.gradient, "gradient of ", tensor)]
        values |= _named("grad_", whole) | _named("tensor_", tensor) | {"tensor": tensor.name}
    reasons = list(dict.fromkeys(faults))[:3]
    reasons += [f"{where}{d.said(times, eps)}" for times, where, d in judged if d.fails(times, eps)]
    backward = "-" if not has_gradients else "bad" if faults else "ok"
    return replace(row, **values, backward=backward, verdict="FAIL" if reasons else "PASS", reason="; ".join(reasons))


def _named(prefix: str, found: Distance) -> dict[str, Any]:
    return {f"{prefix}ours": found.ours, f"{prefix}autocast": found.autocast}


class _Others:
    """The runs that a model is compared with, in float32 and under torch.autocast, each made on demand."""

    def __init__(self, model: ZooModel) -> None:
        self._model = model
        self._found: dict[tuple[str, str, int], Run | str] = {}

    def reference(self, mode: str, number: int) -> Run:
        """Return float32's run."""
        found = self._run(mode, "", number)
        assert isinstance(found, Run)
        return found

    def autocast(self, mode: str, dtype: str, number: int) -> Run | None:
        """Return torch.autocast's run; None if it fails."""
        found = self._run(mode, dtype, number)
        return found if isinstance(found, Run) else None

    def failure(self, mode: str, dtype: str) -> str:
        """Return torch.autocast's error; empty if it runs."""
        found = self._run(mode, dtype, 0)
        return found if isinstance(found, str) else ""

    def _run(self, mode: str, dtype: str, number: int) -> Run | str:
        key = mode, dtype, number
        if key not in self._found:
            module = self._model.build()
            try:
                self._found[key] = run(
                    *(module, module, self._model, mode, DTYPES.get(dtype)), scale=SCALES.get(dtype, 1.0), number=number
                )
            except Exception as error:
                if not dtype:
                    raise
                self._found[key] = f"torch.autocast fails: {_summary(error)}"
        return self._found[key]


def measure(model: ZooModel, cases: Sequence[tuple[str, str]], report: Callable[[Row], None]) -> None:
    """Measure one model in both modes for each case (dtype, level of folding), reporting each row once it is known."""
    others = _Others(model)
    for name, fold in cases:
        dtype = DTYPES[name]
        for mode in MODES:
            owner = model.build().train(mode == "train")
            row = Row(model.name, mode, name, fold=fold)
            started = time.perf_counter()
            try:
                amp = autocastfx.convert(owner, (), example_kwargs=_inputs(model, FIRST_SIZE), dtype=dtype, fold=fold)
            except AutocastFXError as error:
                report(_not_captured(row, model, error))
                continue  # where train mode cannot be captured, eval mode may
            except Exception as error:
                report(replace(row, verdict="FAIL", reason=_summary(error)))
                continue
            if model.refused and mode in model.refused_in:
                report(replace(row, verdict="FAIL", reason=f"is to be refused: {model.refused}"))
                continue
            seconds = time.perf_counter() - started
            for called in MODES[MODES.index(mode) :]:
                report(_run_and_judge(replace(row, mode=called, seconds=seconds), model, amp, owner, others))
            break


def _not_captured(row: Row, model: ZooModel, error: AutocastFXError) -> Row:
    """Make the row of a refused model: refused rightly, by torch.export too, or wrongly."""
    if model.refused and row.mode in model.refused_in:
        return _refused(row, model, error)
    plain = plain_export(model, row.mode)
    reason = f"{_summary(error)} (plain export: {plain or 'captures it'})"
    return replace(row, verdict="UNEXPORTABLE" if plain else "FAIL", reason=reason)


def _refused(row: Row, model: ZooModel, error: Exception) -> Row:
    refused = re.search(model.refused, str(error)) is not None
    reason = _summary(error) if refused else f"{_summary(error)}; is to be refused: {model.refused}"
    return replace(row, capture="refused", verdict="PASS" if refused else "FAIL", reason=reason)


def _run_and_judge(row: Row, model: ZooModel, amp: autocastfx.AmpModule, owner: nn.Module, others: _Others) -> Row:
    """Judge after a few draws, and again after more if the row fails, so that an unlucky draw does not decide."""
    drawn: list[Draw] = []
    for count in DRAWS:
        for number in range(len(drawn), count):
            try:
                ours = run(amp, owner, model, row.mode, scale=SCALES[row.dtype], number=number)
            except Exception as error:
                if model.refused and row.mode in model.refused_in:
                    return _refused(row, model, error)
                return replace(row, verdict="FAIL", reason=_summary(error))
            autocast = others.autocast(row.mode, row.dtype, number)
            drawn.append(Draw(ours, autocast, others.reference(row.mode, number)))
        judged = judge(replace(row, **_graph_facts(amp)), drawn, owner, DTYPES[row.dtype])
        if judged.verdict == "PASS" or judged.backward == "bad":
            break
    return replace(judged, reason="; ".join(filter(None, (judged.reason, others.failure(row.mode, row.dtype)))))
