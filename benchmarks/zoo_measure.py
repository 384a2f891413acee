"""One model of the zoo measured against float32 and torch.autocast, on the CPU.

Each model is converted once for each dtype and level of folding, and the one result is called in training and in
evaluation mode, so that every row also tests the switch of modes. A row passes by the criterion of
:mod:`benchmarks.zoo_judge`, at the size that the model was converted with and at another one, and when no gradient is
missing or not finite.
"""

from __future__ import annotations

import copy
import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

import autocastfx
from benchmarks.zoo_case import ZooModel
from benchmarks.zoo_judge import LEVELS, Distance, Forward, gradients_apart, outputs_apart, worst

FIRST_SIZE = (2, 16)
OTHER_SIZE = (3, 24)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
MODES = ("train", "eval")
SEED = 1


@dataclass(frozen=True)
class Row:
    """What was measured of one model in one mode, dtype and level of folding.

    ``output`` and ``tensor`` are the output and the gradient that are nearest to what is allowed, or farthest beyond;
    ``ours`` and ``tensor_ours`` are their distances to float32, beside torch.autocast's. ``other_*`` is the worst
    output at the other size, and ``grad_*`` are all gradients as one vector. ``reason`` says why the verdict is not
    PASS.
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


# ---- runs -----------------------------------------------------------------------------------------------------------


def _inputs(model: ZooModel, size: tuple[int, int]) -> dict[str, Any]:
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
    """The model's loss, or the mean squares of its floating outputs where it computes none."""
    loss = result.get("loss") if isinstance(result, dict) else getattr(result, "loss", None)
    if isinstance(loss, Tensor):
        return loss.float()
    return torch.stack([out.float().square().mean() for out in outputs if out.requires_grad]).sum()


def _gradients(owner: nn.Module, result: object, outputs: Iterable[Tensor]) -> dict[str, Tensor]:
    """Backward from the loss, and the gradients that it leaves on the caller's parameters."""
    owner.zero_grad(set_to_none=True)
    _loss(result, outputs).backward()
    return {name: p.grad for name, p in owner.named_parameters() if p.grad is not None}


@dataclass(frozen=True)
class Run:
    """Forwards at both sizes, and the gradients where the mode is train."""

    first: Forward
    other: Forward
    gradients: dict[str, Tensor]


def run(call: nn.Module, owner: nn.Module, model: ZooModel, mode: str, dtype: torch.dtype | None = None) -> Run:
    """Run `call`, under torch.autocast where a dtype is given; each forward starts from the owner's initial state."""
    initial = copy.deepcopy(owner.state_dict())
    call.train(mode == "train")
    autocast = nullcontext() if dtype is None else torch.autocast("cpu", dtype)
    with autocast:
        first, result = _forward(call, owner, _inputs(model, FIRST_SIZE))
    gradients = _gradients(owner, result, first.outputs.values()) if mode == "train" else {}
    owner.load_state_dict(initial)
    with autocast, torch.no_grad():
        other, _ = _forward(call, owner, _inputs(model, OTHER_SIZE))
    owner.load_state_dict(initial)
    return Run(first, other, gradients)


def gradient_faults(owner: nn.Module, gradients: dict[str, Tensor], reference: dict[str, Tensor]) -> list[str]:
    """What is wrong with the gradients: missing, not finite, or not of their parameter's dtype."""
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
    """The error's first line, and the line of the model that torch.export blames where it names one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    blamed = [number for number, line in enumerate(lines) if line.startswith("The following call raised this error")]
    where = f" at {' '.join(lines[blamed[0] + 1 : blamed[0] + 3])}" if blamed else ""
    where = re.sub(r'"[^"]*/site-packages/', '"', where)  # whose machine it was is no result
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}{where}"


def plain_export(model: ZooModel, mode: str) -> str:
    """What plain torch.export says of the model: an empty text, or the error."""
    module = model.build().train(mode == "train")
    try:
        torch.export.export(module, (), _inputs(model, FIRST_SIZE), strict=False)
    except Exception as error:
        return _summary(error)
    return ""


def _graph_facts(amp: autocastfx.AmpModule) -> dict[str, Any]:
    """Of the graph that the current mode shows: which sizes it leaves free, its nodes and casts; and all variants."""
    shown = next(variant for variant in amp.variants if variant.plan is amp.plan)
    return {
        "capture": f"export/{shown.captured.sizes}" if shown.captured else "-",
        "nodes": len(amp.graph.nodes),
        "casts": len(amp.plan.casts),
        "variants": len(amp.variants),
    }


def judge(row: Row, ours: Run, baseline: Run | None, reference: Run, owner: nn.Module, dtype: torch.dtype) -> Row:
    """Fill in the distances and the verdict of one row."""
    for forward, expected in ((ours.first, reference.first), (ours.other, reference.other)):
        got, wanted = ([str(out.dtype) for out in f.outputs.values()] for f in (forward, expected))
        if got != wanted:
            return replace(row, verdict="FAIL", reason=f"outputs are {got}, float32 gives {wanted}")
    level, eps = LEVELS[row.fold], torch.finfo(dtype).eps
    faults = gradient_faults(owner, ours.gradients, reference.gradients)
    first = outputs_apart(ours.first, baseline and baseline.first, reference.first, eps)
    other = outputs_apart(ours.other, baseline and baseline.other, reference.other, eps)
    judged = [
        (level.value, "", worst(first, level.value, eps)),
        (level.value, "other size ", worst(other, level.value, eps)),
    ]
    values = _named("", judged[0][2]) | _named("other_", judged[1][2]) | {"output": judged[0][2].name}
    if reference.gradients and not faults:
        whole, each = gradients_apart(ours.gradients, baseline and baseline.gradients, reference.gradients, eps)
        tensor = worst(each, level.gradient, eps)
        judged += [(level.gradients, "", whole), (level.gradient, "gradient of ", tensor)]
        values |= _named("grad_", whole) | _named("tensor_", tensor) | {"tensor": tensor.name}
    reasons = faults[:3] + [f"{where}{d.said(times, eps)}" for times, where, d in judged if d.fails(times, eps)]
    backward = "-" if not reference.gradients else "bad" if faults else "ok"
    return replace(row, **values, backward=backward, verdict="FAIL" if reasons else "PASS", reason="; ".join(reasons))


def _named(prefix: str, found: Distance) -> dict[str, Any]:
    return {f"{prefix}ours": found.ours, f"{prefix}autocast": found.autocast}


def _baseline(model: ZooModel, mode: str, dtype: torch.dtype) -> tuple[Run | None, str]:
    """torch.autocast's run, or why it failed."""
    module = model.build()
    try:
        return run(module, module, model, mode, dtype), ""
    except Exception as error:
        return None, f"torch.autocast fails: {_summary(error)}"


def _references(model: ZooModel) -> dict[str, Run]:
    module = model.build()
    return {mode: run(module, module, model, mode) for mode in MODES}


def measure(model: ZooModel, cases: Sequence[tuple[str, str]], report: Callable[[Row], None]) -> None:
    """Measure one model in both modes for each case (dtype, level of folding), reporting each row once it is known."""
    references = _references(model) if not model.refused else {}
    baselines: dict[tuple[str, str], tuple[Run | None, str]] = {}
    for name, fold in cases:
        dtype = DTYPES[name]
        for mode in MODES:
            owner = model.build().train(mode == "train")
            row = Row(model.name, mode, name, fold=fold)
            started = time.perf_counter()
            try:
                amp = autocastfx.convert(owner, (), example_kwargs=_inputs(model, FIRST_SIZE), dtype=dtype, fold=fold)
            except autocastfx.AutocastFXError as error:
                report(_not_captured(row, model, error))
                continue  # where train mode cannot be captured, eval mode may
            except Exception as error:
                report(replace(row, verdict="FAIL", reason=_summary(error)))
                continue
            if model.refused:
                report(replace(row, verdict="FAIL", reason=f"is to be refused: {model.refused}"))
                continue
            seconds = time.perf_counter() - started
            for called in MODES[MODES.index(mode) :]:
                if (called, name) not in baselines:
                    baselines[called, name] = _baseline(model, called, dtype)
                row = replace(row, mode=called, seconds=seconds)
                report(_run_and_judge(row, model, amp, owner, references[called], baselines[called, name]))
            break


def _not_captured(row: Row, model: ZooModel, error: autocastfx.AutocastFXError) -> Row:
    """The row of a model that was refused: as it should be, as torch.export does too, or wrongly."""
    if model.refused:
        refused = re.search(model.refused, str(error)) is not None
        reason = _summary(error) if refused else f"{_summary(error)}; is to be refused: {model.refused}"
        return replace(row, capture="refused", verdict="PASS" if refused else "FAIL", reason=reason)
    plain = plain_export(model, row.mode)
    reason = f"{_summary(error)} (plain export: {plain or 'captures it'})"
    return replace(row, verdict="UNEXPORTABLE" if plain else "FAIL", reason=reason)


def _run_and_judge(
    row: Row,
    model: ZooModel,
    amp: autocastfx.AmpModule,
    owner: nn.Module,
    reference: Run,
    baseline: tuple[Run | None, str],
) -> Row:
    try:
        ours = run(amp, owner, model, row.mode)
    except Exception as error:
        return replace(row, verdict="FAIL", reason=_summary(error))
    judged = judge(replace(row, **_graph_facts(amp)), ours, baseline[0], reference, owner, DTYPES[row.dtype])
    return replace(judged, reason="; ".join(filter(None, (judged.reason, baseline[1]))))
