"""One model of the zoo measured against float32 and torch.autocast, on the CPU.

Each model is converted once for each dtype, and the one result is called in training and in evaluation mode, so that
every row also tests the switch of modes. A row passes when its distance to float32 is at most twice torch.autocast's
plus the dtype's eps, at the size it was converted with and at another one, and when the gradients are sound.
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
from torch.utils._pytree import tree_leaves

import autocastfx
from benchmarks.zoo_case import ZooModel

FIRST_SIZE = (2, 16)
OTHER_SIZE = (3, 24)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
MODES = ("train", "eval")
SEED = 1
# Where torch.autocast itself fails, its distance is taken to be this many eps: about the median of the zoo.
ASSUMED_EPS = 2


@dataclass(frozen=True)
class Row:
    """What was measured of one model in one mode and dtype; `reason` says why the verdict is not PASS."""

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


@dataclass(frozen=True)
class Forward:
    """One forward: its tensor outputs, and the floating buffers and inputs after it (what it wrote is a result)."""

    outputs: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]


# ---- distances ------------------------------------------------------------------------------------------------------


def distance(ours: Tensor, reference: Tensor) -> float:
    """Relative L2 distance; places where both hold the same infinity or both NaN do not count."""
    if ours.shape != reference.shape:
        return math.inf
    a, b = ours.detach().double(), reference.detach().double()
    same = (a == b) | (a.isnan() & b.isnan())
    difference = (a - b).masked_fill(same, 0.0).norm().item()
    norm = b.where(b.isfinite(), 0.0).norm().item()
    relative = difference / norm if norm > 0 else difference
    return math.inf if math.isnan(relative) else relative


def largest_distance(ours: Forward, reference: Forward) -> float:
    """The largest distance over all floating outputs, and over all buffers and all inputs, each taken as one vector.

    A running mean alone may be nothing but rounding errors, when what it averages is centred: no distance would hold.
    """
    pairs = [*zip(ours.outputs, reference.outputs, strict=True)]
    pairs += [(_vector(ours.buffers), _vector(reference.buffers)), (_vector(ours.inputs), _vector(reference.inputs))]
    return max(distance(a, b) for a, b in pairs if b.is_floating_point())


def _vector(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([torch.empty(0), *(tensor.flatten() for tensor in tensors)])


def gradient_distance(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """The distance of all gradients taken as one vector."""
    names = [name for name in reference if name in ours]
    return distance(*(_vector(grads[name] for name in names) for grads in (ours, reference)))


def within(ours: float, autocast: float, dtype: torch.dtype) -> bool:
    """The criterion: at most twice torch.autocast's distance, plus the dtype's eps."""
    return ours <= 2 * autocast + torch.finfo(dtype).eps


# ---- runs -----------------------------------------------------------------------------------------------------------


def _inputs(model: ZooModel, size: tuple[int, int]) -> dict[str, Any]:
    return model.inputs(*size)


def _forward(call: nn.Module, owner: nn.Module, inputs: dict[str, Any]) -> tuple[Forward, object]:
    """Call from a fixed seed; `owner` is the caller's module, whose buffers are read (and shared with `call`)."""
    torch.manual_seed(SEED)
    result = call(**inputs)
    outputs = tuple(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
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
    gradients = _gradients(owner, result, first.outputs) if mode == "train" else {}
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
        got, wanted = ([str(out.dtype) for out in f.outputs] for f in (forward, expected))
        if got != wanted:
            return replace(row, verdict="FAIL", reason=f"outputs are {got}, float32 gives {wanted}")
    faults = gradient_faults(owner, ours.gradients, reference.gradients)
    values: dict[str, float] = {
        "ours": largest_distance(ours.first, reference.first),
        "other_ours": largest_distance(ours.other, reference.other),
    }
    if baseline is not None:
        values["autocast"] = largest_distance(baseline.first, reference.first)
        values["other_autocast"] = largest_distance(baseline.other, reference.other)
    if reference.gradients and not faults:
        values["grad_ours"] = gradient_distance(ours.gradients, reference.gradients)
        if baseline is not None:
            values["grad_autocast"] = gradient_distance(baseline.gradients, reference.gradients)
    reasons = list(faults[:3])
    for label, name in (("", ""), ("other size ", "other_"), ("gradients ", "grad_")):
        measured = values.get(f"{name}ours")
        bound = values.get(f"{name}autocast", ASSUMED_EPS * torch.finfo(dtype).eps)
        if measured is not None and not (math.isfinite(measured) and within(measured, bound, dtype)):
            reasons.append(f"{label}distance {measured:.2e} against {bound:.2e}")
    backward = "-" if not reference.gradients else "bad" if faults else "ok"
    return replace(row, **values, backward=backward, verdict="FAIL" if reasons else "PASS", reason="; ".join(reasons))


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


def measure(model: ZooModel, dtype_names: Sequence[str], report: Callable[[Row], None]) -> None:
    """Measure one model in both modes for each dtype, reporting each row as soon as it is known."""
    references = _references(model) if not model.refused else {}
    for name in dtype_names:
        dtype = DTYPES[name]
        for mode in MODES:
            owner = model.build().train(mode == "train")
            started = time.perf_counter()
            try:
                amp = autocastfx.convert(owner, (), example_kwargs=_inputs(model, FIRST_SIZE), dtype=dtype)
            except autocastfx.AutocastFXError as error:
                report(_not_captured(Row(model.name, mode, name), model, error))
                continue  # where train mode cannot be captured, eval mode may
            except Exception as error:
                report(Row(model.name, mode, name, verdict="FAIL", reason=_summary(error)))
                continue
            if model.refused:
                report(Row(model.name, mode, name, verdict="FAIL", reason=f"is to be refused: {model.refused}"))
                continue
            seconds = time.perf_counter() - started
            for called in MODES[MODES.index(mode) :]:
                row = Row(model.name, called, name, seconds=seconds)
                report(_run_and_judge(row, model, amp, owner, references[called], dtype))
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
    row: Row, model: ZooModel, amp: autocastfx.AmpModule, owner: nn.Module, reference: Run, dtype: torch.dtype
) -> Row:
    try:
        ours = run(amp, owner, model, row.mode)
    except Exception as error:
        return replace(row, verdict="FAIL", reason=_summary(error))
    baseline, why = _baseline(model, row.mode, dtype)
    judged = judge(replace(row, **_graph_facts(amp)), ours, baseline, reference, owner, dtype)
    return replace(judged, reason="; ".join(filter(None, (judged.reason, why))))
