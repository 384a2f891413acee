"""Measure autocastfx on the model zoo against float32 and torch.autocast, on the CPU.

    python -m benchmarks.zoo [--models bert,gpt2] [--dtypes bfloat16,float16] [--json PATH]

Each model is converted once for each dtype, and the one result is called in training and in evaluation mode, so that
every row also tests the switch of modes. A row passes when its distance to float32 is at most twice torch.autocast's
plus the dtype's eps, at the size it was converted with and at another one, and when the gradients are sound.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import autocastfx
from benchmarks.zoo_models import ZOO, ZooModel

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
    """One forward: its tensor outputs and, after it, the floating buffers (running statistics are results too)."""

    outputs: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...]


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
    """The largest distance over all floating outputs, and all buffers taken as one vector.

    A running mean alone may be nothing but rounding errors, when what it averages is centred: no distance would hold.
    """
    pairs = [*zip(ours.outputs, reference.outputs, strict=True), (_vector(ours.buffers), _vector(reference.buffers))]
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


def _inputs(model: ZooModel, size: tuple[int, int]) -> dict[str, Tensor]:
    return model.inputs(*size)


def _forward(call: nn.Module, owner: nn.Module, inputs: dict[str, Tensor]) -> tuple[Forward, object]:
    """Call from a fixed seed; `owner` is the caller's module, whose buffers are read (and shared with `call`)."""
    torch.manual_seed(SEED)
    result = call(**inputs)
    outputs = tuple(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
    buffers = tuple(buffer.clone() for buffer in owner.buffers() if buffer.is_floating_point())
    return Forward(outputs, buffers), result


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


def _graph_facts(amp: autocastfx.AmpModule) -> dict[str, object]:
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
            return _with(row, verdict="FAIL", reason=f"outputs are {got}, float32 gives {wanted}")
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
    return _with(row, **values, backward=backward, verdict="FAIL" if reasons else "PASS", reason="; ".join(reasons))


def _with(row: Row, **changes: object) -> Row:
    return Row(**{**asdict(row), **changes})  # type: ignore[arg-type]


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
    references = _references(model)
    for dtype_name in dtype_names:
        dtype = DTYPES[dtype_name]
        owner = model.build().train()
        started = time.perf_counter()
        modes = MODES
        try:
            amp = autocastfx.convert(owner, (), example_kwargs=_inputs(model, FIRST_SIZE), dtype=dtype)
        except autocastfx.CaptureError as error:
            plain = plain_export(model, "train")
            verdict = "UNEXPORTABLE" if plain else "FAIL"
            reason = f"{_summary(error)} (plain export: {plain or 'captures it'})"
            report(Row(model.name, "train", dtype_name, verdict=verdict, reason=reason))
            owner, modes = model.build().eval(), ("eval",)
            try:
                amp = autocastfx.convert(owner, (), example_kwargs=_inputs(model, FIRST_SIZE), dtype=dtype)
            except autocastfx.CaptureError as error:
                plain = plain_export(model, "eval")
                verdict = "UNEXPORTABLE" if plain else "FAIL"
                reason = f"{_summary(error)} (plain export: {plain or 'captures it'})"
                report(Row(model.name, "eval", dtype_name, verdict=verdict, reason=reason))
                continue
        except Exception as error:
            report(Row(model.name, "both", dtype_name, verdict="FAIL", reason=_summary(error)))
            continue
        seconds = time.perf_counter() - started
        for mode in modes:
            row = Row(model.name, mode, dtype_name, seconds=seconds)
            try:
                ours = run(amp, owner, model, mode)
            except Exception as error:
                report(_with(row, verdict="FAIL", reason=_summary(error)))
                continue
            row = _with(row, **_graph_facts(amp))
            baseline, why = _baseline(model, mode, dtype)
            judged = judge(row, ours, baseline, references[mode], owner, dtype)
            report(_with(judged, reason="; ".join(filter(None, (judged.reason, why)))))


# ---- the report -----------------------------------------------------------------------------------------------------

_HEADER = (
    f"{'model':<18} {'mode':<5} {'dtype':<8} {'capture':<12} {'nodes':>5} {'casts':>5} {'ours':>8} {'autocast':>8} "
    f"{'grad':>8} {'autocast':>8} {'back':<4} {'other':>8} {'autocast':>8} {'var':>3} {'s':>5}  verdict"
)


def _line(row: Row) -> str:
    ours, autocast, grad, grad_autocast, other, other_autocast = (
        "-" if math.isnan(value) else f"{value:.1e}"
        for value in (row.ours, row.autocast, row.grad_ours, row.grad_autocast, row.other_ours, row.other_autocast)
    )
    return (
        f"{row.model:<18} {row.mode:<5} {row.dtype:<8} {row.capture:<12} {row.nodes:>5} {row.casts:>5} {ours:>8} "
        f"{autocast:>8} {grad:>8} {grad_autocast:>8} {row.backward:<4} {other:>8} {other_autocast:>8} "
        f"{row.variants:>3} {row.seconds:>5.1f}  {row.verdict}"
    )


def _totals(rows: Sequence[Row]) -> str:
    unexportable = [row for row in rows if row.verdict == "UNEXPORTABLE"]
    failed = [row for row in rows if row.verdict == "FAIL"]
    lines = [
        f"\n{len({row.model for row in rows})} models, {len(rows)} rows: "
        f"{sum(row.verdict == 'PASS' for row in rows)} pass, {len(failed)} fail, {len(unexportable)} not exportable"
    ]
    for title, group in (("not captured by torch.export either", unexportable), ("failed", failed)):
        lines += [f"\n{title}:"] * bool(group)
        lines += [f"  {row.model} {row.mode} {row.dtype}: {row.reason}" for row in group]
    noted = [row for row in rows if row.verdict == "PASS" and row.reason]
    lines += ["\npassed where torch.autocast fails:"] * bool(noted)
    lines += [f"  {row.model} {row.mode} {row.dtype}: {row.reason}" for row in noted]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the models asked for; the exit status is 1 where one fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(model.name for model in ZOO), help="names, separated by commas")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="bfloat16, float16 or both, separated by a comma")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args(arguments)
    names, dtype_names = options.models.split(","), options.dtypes.split(",")
    by_name = {model.name: model for model in ZOO}
    unknown = [name for name in names if name not in by_name] + [name for name in dtype_names if name not in DTYPES]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; models: {', '.join(by_name)}; dtypes: {', '.join(DTYPES)}")

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    rows: list[Row] = []

    def report(row: Row) -> None:
        rows.append(row)
        print(_line(row), flush=True)

    print(_HEADER)
    for name in names:
        measure(by_name[name], dtype_names, report)
    print(_totals(rows))
    if options.json:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__, "device": "cpu"}
        options.json.write_text(json.dumps({**versions, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    return int(any(row.verdict == "FAIL" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
