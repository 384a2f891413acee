"""Measure autocastfx on the model zoo against float32 and torch.autocast, on the CPU.

    python -m benchmarks.zoo [--models bert,gpt2] [--dtypes bfloat16,float16] [--fold exact,kernel]
                             [--as-cuda] [--fuse inductor] [--json PATH [--again]]
    python -m benchmarks.zoo --ops [--models bert,gpt2] [--json PATH]

The zoo is transformers models and hand-written hard cases; ``--models transformers`` and ``--models hand`` select all
of either kind. Each model is converted once for each dtype and level of folding, and the result is called in training
and in evaluation mode, so that every case also tests switching modes. A case passes if it meets the criterion of
:mod:`benchmarks.judge`, at the size of the conversion and at another one, and no gradient is missing or not finite.

A ratio is our distance to float32 divided by torch.autocast's: for the output and the gradient closest to their bounds,
and for all gradients as one vector; each is the geometric mean over some draws of the inputs. With ``--json`` the file
is written after each model, a row each, with the mean and the worst of all its cases; models in it are not measured
again without ``--again``. ``--as-cuda`` decides as for CUDA, for models of any size, where products are padded, masks
laid out, heads shared and weights given float32 gradients. With ``--fuse`` nothing is dropped out. ``--ops`` instead
counts the models in which each ATen operator meets floating values.
"""

from __future__ import annotations

import copy
import json
import math
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import geometric_mean
from typing import Any, cast
from unittest import mock

import torch
import transformers
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

import autocastfx
from autocastfx.errors import AutocastFXError
from autocastfx.graph.names import base_name, op_name
from autocastfx.graph.node import tensors, uses
from autocastfx.policy.kernel_facts import load_kernel_facts
from benchmarks.command import DTYPES, Command
from benchmarks.judge import LEVELS, Distance, Forward, gradients_apart, outputs_apart, typical, worst
from benchmarks.machine import moment
from benchmarks.models.hand import HAND
from benchmarks.models.zoo import ZOO, ZooModel, draw

MODELS = {model.name: model for model in (*ZOO, *HAND)}
FIRST_SIZE = (2, 16)
OTHER_SIZE = (3, 24)
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

    def ratios(self) -> dict[str, float]:
        """Return our distances divided by torch.autocast's, NaN where there are none."""
        kinds = {"output": "", "other size": "other_", "gradients": "grad_", "gradient": "tensor_"}
        sides = {kind: (getattr(self, f"{key}ours"), getattr(self, f"{key}autocast")) for kind, key in kinds.items()}
        return {kind: Distance(kind, *pair).ratio for kind, pair in sides.items()}


@dataclass(frozen=True)
class Kept:
    """A row of the stored file: the verdicts and ratios of one model, over all its cases.

    Attributes:
        cases: the dtypes and levels of folding that were measured.
        verdicts: the number of modes of these with each verdict; REFUSED are those that must be, and are.
        ratios: by level of folding and kind of distance, the mean and the largest ratio to torch.autocast's.
        reasons: why a verdict is not PASS, or how torch.autocast fails, with the cases.
    """

    model: str
    cases: list[list[str]]
    verdicts: dict[str, int]
    ratios: dict[str, dict[str, list[float]]]
    reasons: dict[str, list[str]]


def kept(rows: Sequence[Row]) -> Kept:
    """Summarize the rows of a model."""
    verdicts, reasons = dict[str, int](), dict[str, list[str]]()
    found = dict[str, dict[str, list[float]]]()
    for row in rows:
        verdict = "REFUSED" if (row.capture, row.verdict) == ("refused", "PASS") else row.verdict
        verdicts[verdict] = verdicts.get(verdict, 0) + 1
        if row.reason:
            reasons.setdefault(row.reason, []).append(f"{row.mode} {row.dtype} {row.fold}")
        for kind, ratio in row.ratios().items():
            if not math.isnan(ratio):
                found.setdefault(row.fold, {}).setdefault(kind, []).append(ratio)
    ratios = {
        fold: {kind: [round(_mean(all_), 4), round(max(all_), 4)] for kind, all_ in kinds.items()}
        for fold, kinds in found.items()
    }
    cases = list(dict.fromkeys((row.dtype, row.fold) for row in rows))
    return Kept(rows[0].model, [list(case) for case in cases], verdicts, ratios, reasons)


def _mean(ratios: Sequence[float]) -> float:
    """Return the geometric mean; 0 if one is 0."""
    return geometric_mean(ratios) if min(ratios) > 0 else 0.0


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
    return {
        "capture": "Dynamo",
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

    def __call__(self, mode: str, dtype: str, number: int) -> Run | str:
        """Return the run of a draw under torch.autocast, or its error; of float32 without a dtype."""
        key = mode, dtype, number
        if key not in self._found:
            module = self._model.build()
            given = module, module, self._model, mode, DTYPES.get(dtype)
            try:
                self._found[key] = run(*given, scale=SCALES.get(dtype, 1.0), number=number)
            except Exception as error:
                if not dtype:
                    raise
                self._found[key] = f"torch.autocast fails: {_summary(error)}"
        return self._found[key]


def measure(
    model: ZooModel, cases: Sequence[tuple[str, str]], report: Callable[[Row], None], fuse: str = "none"
) -> None:
    """Measure one model in both modes for each case (dtype, level of folding), reporting each row once it is known."""
    if fuse != "none":  # compiled regions draw in another order than eager code
        build = model.build
        model = replace(model, build=lambda: without_dropout(build()))
    others = _Others(model)
    for name, fold in cases:
        dtype = DTYPES[name]
        for mode in MODES:
            owner = model.build().train(mode == "train")
            row = Row(model.name, mode, name, fold=fold)
            started = time.perf_counter()
            try:
                given: Any = {"example_kwargs": _inputs(model, FIRST_SIZE), "dtype": dtype, "fold": fold, "fuse": fuse}
                amp = autocastfx.convert(owner, (), **given)
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


def without_dropout(model: nn.Module) -> nn.Module:
    """Return ``model``, in which no module drops anything: probabilities of 0, as modules and as their numbers."""
    for module in model.modules():
        own = vars(module)
        zeros = [name for name, number in own.items() if "drop" in name and isinstance(number, float)]
        zeros += ["p"] if isinstance(module, nn.modules.dropout._DropoutNd) else []
        own.update(dict.fromkeys(zeros, 0.0))
    return model


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Let a conversion for a CPU change graphs as one for CUDA does, models of any size."""
    facts = load_kernel_facts()
    parameters = {"cpu": facts.float32_parameters["cpu"] | facts.float32_parameters["cuda"]}
    numbers = {
        "fast_multiples": {"cpu": 8},
        "float32_gradients": {"cpu": 1},
        "groups_heads": {"cpu": facts.groups_heads["cuda"]},
    }
    changed: Any = replace(facts, float32_parameters=parameters, **cast("Any", numbers))
    any_size = mock.patch.multiple("autocastfx.passes.align", _LEAST_ROWS=1, _LEAST_FLOPS=0)
    with mock.patch("autocastfx.options.load_kernel_facts", return_value=changed), any_size:
        yield


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
            autocast, reference = (others(row.mode, dtype, number) for dtype in (row.dtype, ""))
            drawn.append(Draw(ours, autocast if isinstance(autocast, Run) else None, cast("Run", reference)))
        judged = judge(replace(row, **_graph_facts(amp)), drawn, owner, DTYPES[row.dtype])
        if judged.verdict == "PASS" or judged.backward == "bad":
            break
    autocast = others(row.mode, row.dtype, 0)
    failure = autocast if isinstance(autocast, str) else ""
    return replace(judged, reason="; ".join(filter(None, (judged.reason, failure))))


# ---- operators ------------------------------------------------------------------------------------------------------


def floating_ops(model: ZooModel) -> set[str]:
    """Return the base names of the ATen operators of ``model``, in both modes, that read or make floating tensors.

    Complex tensors count too. A model that cannot be captured has none.
    """
    try:
        amp = autocastfx.convert(model.build(), (), example_kwargs=model.inputs(*FIRST_SIZE), dtype=torch.bfloat16)
    except AutocastFXError:
        return set()
    captured = [graph.captured for graph in amp._captures.graphs]  # the check captures the other mode, too
    graphs = [graph for c in captured for graph in (c.graph, *_inside(c.attributes.values()))]
    return {base_name(op_name(node)) for graph in graphs for node in graph.nodes if _is_floating(node)}


def _inside(attributes: Iterable[object]) -> Iterator[fx.Graph]:
    """Return the graphs that higher-order operators run, at any depth."""
    for held in attributes:
        if isinstance(held, fx.GraphModule):
            yield held.graph
            yield from _inside(held.children())


def _is_floating(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return False
    seen = (*tensors(node), *(t for use in uses(node) for t in tensors(use.node)))
    return any(t.is_floating_point() or t.is_complex() for t in seen)


# ---- the command ----------------------------------------------------------------------------------------------------

_HEADER = (
    f"{'model':<22} {'mode':<5} {'dtype':<8} {'fold':<6} {'capture':<12} {'nodes':>5} {'casts':>5} "
    f"{'ours':>8} {'ratio':>6} {'other':>8} {'ratio':>6} {'grad':>8} {'ratio':>6} {'tensor':>8} {'ratio':>6} "
    f"{'back':<4} {'draws':>5} {'scale':>5} {'var':>3} {'s':>5}  verdict       worst output, worst gradient"
)


def _line(row: Row) -> str:
    ours = (row.ours, row.other_ours, row.grad_ours, row.tensor_ours)
    pairs = zip(ours, row.ratios().values(), strict=True)
    found = " ".join(f"{_shown(distance, '.1e'):>8} {_shown(ratio, '.2f'):>6}" for distance, ratio in pairs)
    return (
        f"{row.model:<22} {row.mode:<5} {row.dtype:<8} {row.fold:<6} {row.capture:<12} {row.nodes:>5} {row.casts:>5} "
        f"{found} {row.backward:<4} {row.draws:>5} {row.scale:>5g} {row.variants:>3} {row.seconds:>5.1f}  "
        f"{row.verdict:<12}  {row.output}, {row.tensor}"
    )


def _shown(number: float, form: str) -> str:
    return "-" if math.isnan(number) else f"{number:{form}}"


def counts(rows: Iterable[Kept]) -> Counter[str]:
    """Return the number of cases with each verdict."""
    return sum((Counter(row.verdicts) for row in rows), Counter[str]())


def _totals(rows: Sequence[Kept]) -> str:
    found = counts(rows)
    head = (
        f"\n{len(rows)} models, {found.total()} cases: {found['PASS']} pass, {found['REFUSED']} are refused, as "
        f"they must be, {found['FAIL']} fail, {found['UNEXPORTABLE']} cannot be captured as one graph"
    )
    said = (f"  {row.model}, {', '.join(at)}: {reason}" for row in rows for reason, at in row.reasons.items())
    return "\n".join([head, *said])


def _read(path: Path | None, versions: dict[str, str]) -> dict[str, Kept]:
    """Read the rows in ``path`` that were measured with the same versions, by model."""
    if path is None or not path.exists():
        return {}
    held: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return {row["model"]: Kept(**row) for row in held["rows"]} if {**held, **versions} == held else {}


def _write(path: Path, versions: dict[str, str], rows: Iterable[Kept]) -> None:
    lines = ",\n".join(f"  {json.dumps(asdict(row))}" for row in rows)
    text = json.dumps({**versions, **moment(), "rows": []}, indent=1).replace("[]", f"[\n{lines}\n ]")
    path.write_text(text + "\n", encoding="utf-8")


def _measure_all(
    names: Sequence[str],
    cases: Sequence[tuple[str, str]],
    path: Path | None,
    again: bool,
    versions: dict[str, str],
    fuse: str = "none",
) -> int:
    held = _read(path, versions)
    print(_HEADER)
    for name in names:
        known = {(dtype, fold) for dtype, fold in held[name].cases} if name in held else set[tuple[str, str]]()
        if again or not known >= set(cases):
            rows: list[Row] = []
            measure(MODELS[name], list(dict.fromkeys((*sorted(known), *cases))), rows.append, fuse)
            print(*map(_line, rows), sep="\n", flush=True)
            held[name] = kept(rows)
            if path:
                _write(path, versions, (held[one] for one in MODELS if one in held))
    asked = [held[name] for name in names]
    print(_totals(asked))
    return int(counts(asked)["FAIL"] > 0)


def _count_ops(names: Sequence[str], path: Path | None, versions: dict[str, str]) -> int:
    found: dict[str, int] = {}
    for name in names:
        ops = floating_ops(MODELS[name])
        print(f"{name}: {len(ops)}", file=sys.stderr, flush=True)
        for op in ops:
            found[op] = found.get(op, 0) + 1
    found = dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))
    print(*(f"{count:>5} {op}" for op, count in found.items()), sep="\n")
    if path:
        path.write_text(json.dumps({**versions, **moment(), "ops": found}, indent=1) + "\n", encoding="utf-8")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the models asked for; the exit status is 1 if one fails."""
    groups = {"all": list(MODELS), "transformers": [m.name for m in ZOO], "hand": [m.name for m in HAND]}
    command = Command("zoo", __doc__)
    command.names("--models", (*groups, *MODELS), chosen=("all",))
    command.names("--dtypes", DTYPES)
    command.names("--fold", LEVELS)
    command.add_argument("--ops", action="store_true", help="count the operators instead")
    command.add_argument("--again", action="store_true", help="also measure what stands in the file already")
    command.add_argument("--as-cuda", action="store_true", help="decide as for CUDA")
    command.add_argument("--fuse", default="none", help="of convert")
    options = command.begin(arguments)
    names = list(dict.fromkeys(one for name in options.models for one in groups.get(name, [name])))
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "device": "cpu"}
    if options.ops:
        return _count_ops(names, options.json, versions)
    cases = list(product(options.dtypes, options.fold))
    import torch._inductor.config as inductor  # which compiles nothing without --fuse

    # Dropout draws the numbers that it draws without a compiler: masks are not to differ.
    with as_on_cuda() if options.as_cuda else nullcontext(), inductor.patch(fallback_random=True):
        return _measure_all(names, cases, options.json, options.again, versions, options.fuse)


if __name__ == "__main__":
    sys.exit(main())
