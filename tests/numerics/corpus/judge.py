"""Judge one case: the converted model, the model under torch.autocast, and the one with hand-written float32 islands.

Every tensor is judged on its own: outputs and gradients, and after the call buffers, frozen parameters and inputs; in
training and in evaluation, at two sizes. The reference is a float64 copy of the model, so that float32's own error is
known: a result may be off by its demand, and by four times what float32 itself is off by, as sums may be added up in
another order.

A gradient (or a buffer) may be zero in exact arithmetic, as that of a bias before a batch norm: only the roundings of
terms that cancel. It is known by float32's error: where that leaves no digit which 16 bits could hold, no relative
error of the result means anything. The terms are as large as those of the gradients that do not cancel, so the error is
then taken relative to the largest of them, by the root mean square of its elements.

In float16 the loss is scaled as a dynamic scaler would: by the largest of some powers of two that keeps gradients
finite.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import autocastfx
from benchmarks.judge import distance
from tests.numerics.corpus.case import Call, Case

__all__ = ["DTYPES", "Judgement", "Reference", "Run", "judge", "judge_model", "judge_ours", "modes_of", "refer"]

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
EPS16, EPS32 = torch.finfo(torch.float16).eps, torch.finfo(torch.float32).eps
MODES = ("train", "eval")
LOSS_SCALES = (65536.0, 4096.0, 256.0, 16.0, 1.0)


@dataclass(frozen=True)
class Run:
    """All that a model gave: tensors by name, other results by name, and the structure of each output."""

    tensors: Mapping[str, Tensor]
    others: Mapping[str, Any]


@dataclass(frozen=True)
class Reference:
    """What results are held against, and float32's own error, by tensor; errors are relative to `scales`."""

    case: Case
    modes: Sequence[str]
    run: Run
    dtypes: Mapping[str, torch.dtype]
    noise: Mapping[str, float]

    def scales(self, dtype: torch.dtype) -> dict[str, float]:
        """The norm of each tensor; for those that hold no digits, the norm that the largest of their kind gives."""
        largest = dict.fromkeys(("gradient", "buffer", "frozen"), 0.0)
        for name, tensor in self.run.tensors.items():
            if (kind := _kind(name)) in largest:
                largest[kind] = max(largest[kind], _norm(tensor) / math.sqrt(max(tensor.numel(), 1)))
        scales = {name: _norm(tensor) or 1.0 for name, tensor in self.run.tensors.items()}
        for name, tensor in self.run.tensors.items():
            without_digits = self.noise[name] * torch.finfo(dtype).eps >= EPS32 or not _norm(tensor)
            if _kind(name) in largest and without_digits:
                scales[name] = max(scales[name], largest[_kind(name)] * math.sqrt(tensor.numel()))
        return scales

    def errors(self, run: Run, dtype: torch.dtype) -> dict[str, float]:
        """The error of each tensor; infinite where it is missing, or wrong and no floating value."""
        scales, found = self.scales(dtype), dict[str, float]()
        for name, expected in self.run.tensors.items():
            tensor = run.tensors.get(name)
            if tensor is None or tensor.shape != expected.shape:
                found[name] = math.inf
            elif expected.is_floating_point():
                found[name] = distance(tensor, expected) * (_norm(expected) or 1.0) / scales[name]
            else:
                found[name] = 0.0 if torch.equal(tensor, expected) else math.inf
        return found

    def bounds(self, dtype: torch.dtype) -> dict[str, float]:
        """The error that each tensor may have."""
        scales = self.scales(dtype)
        bounds: dict[str, float] = {}
        for name, tensor in self.run.tensors.items():
            demand = self.case.demanded(name.split(": ")[1])
            own = self.noise[name] * (_norm(tensor) or 1.0) / scales[name]
            bounds[name] = demand.bound(dtype, backward=_kind(name) == "gradient") + 4 * own + 4 * EPS32
        return bounds


@dataclass(frozen=True)
class Judgement:
    """How one version of a model did: the error and the bound of every tensor, and what else was wrong."""

    fault: str = ""
    errors: Mapping[str, float] = field(default_factory=dict[str, float])
    bounds: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def worst(self) -> str:
        """The tensor whose error is the largest part of its bound; none where the model did not run."""
        return max(self.errors, key=lambda name: self.errors[name] / self.bounds[name], default="")

    @property
    def held(self) -> bool:
        return not self.fault and all(error <= self.bounds[name] for name, error in self.errors.items())


# ---- runs -----------------------------------------------------------------------------------------------------------


def _run(
    call: nn.Module, owner: nn.Module, case: Case, modes: Sequence[str], dtype: torch.dtype | None, autocast: bool
) -> Run:
    """All calls of a case; ``owner`` holds the parameters and the buffers, and each call starts from its state."""
    initial = copy.deepcopy(owner.state_dict())
    tensors: dict[str, Tensor] = {}
    others: dict[str, Any] = {}
    for mode in modes:
        call.train(mode == "train")
        for size in case.sizes:
            owner.load_state_dict(initial)
            given = _copied(case.call(size), dtype if dtype == torch.float64 else None)
            backward = mode == "train" and size == case.sizes[0]
            torch.default_generator.manual_seed(0)
            with _context(dtype, autocast), nullcontext() if backward else torch.no_grad():
                result = call(*given.args, **given.kwargs)
            found = dict(_leaves("output", result))
            found |= {f"buffer {name}": buffer.clone() for name, buffer in owner.named_buffers()}
            found |= {f"frozen {name}": p.clone() for name, p in owner.named_parameters() if not p.requires_grad}
            found |= dict(_leaves("input", (given.args, given.kwargs)))
            if backward:
                found |= _gradients(case, owner, result, given, dtype)
            others[f"{mode} {size}: structure"] = pytree.tree_structure(result)
            for name, leaf in found.items():
                (tensors if isinstance(leaf, Tensor) else others)[f"{mode} {size}: {name}"] = _read(leaf)
    owner.load_state_dict(initial)
    return Run(tensors, others)


@contextmanager
def _context(dtype: torch.dtype | None, autocast: bool) -> Iterator[None]:
    if dtype != torch.float64:
        with torch.autocast("cpu", dtype) if autocast else nullcontext():
            yield
        return
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Double():
            yield
    finally:
        torch.set_default_dtype(default)


class _Double(TorchFunctionMode):
    """Whatever asks for float32 gets float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = Tensor.double if func is Tensor.float else func
        args, kwargs = pytree.tree_map(lambda v: torch.float64 if v is torch.float32 else v, (args, kwargs or {}))
        return func(*args, **kwargs)


def _copied(call: Call, dtype: torch.dtype | None) -> Call:
    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        floating = dtype is not None and leaf.is_floating_point()
        return leaf.detach().clone().to(dtype if floating else leaf.dtype).requires_grad_(leaf.requires_grad)

    return Call(*pytree.tree_map(copied, (call.args, dict(call.kwargs))))


def _leaves(kind: str, tree: Any) -> Iterator[tuple[str, Any]]:
    return ((f"{kind} {i}", leaf) for i, leaf in enumerate(pytree.tree_leaves(tree)))


def _read(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _gradients(case: Case, owner: nn.Module, result: Any, given: Call, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Gradients of parameters and inputs, at the first of the loss scales that leaves them finite, unscaled."""
    inputs = [(name, leaf) for name, leaf in _leaves("input", (given.args, dict(given.kwargs)))]
    wanted = [(name, leaf) for name, leaf in [*owner.named_parameters(), *inputs] if _wants_gradient(leaf)]
    with _context(dtype, autocast=False):
        loss = case.loss(result, given.args)
    found: dict[str, Tensor] = {}
    if not loss.requires_grad:
        return found
    for scale in LOSS_SCALES if dtype == torch.float16 else (1.0,):
        for _, leaf in wanted:
            leaf.grad = None
        (loss * scale).backward(retain_graph=True)
        grads = ((name, leaf.grad) for name, leaf in wanted)
        found = {f"gradient {name}": grad / scale for name, grad in grads if grad is not None}
        if all(bool(grad.isfinite().all()) for grad in found.values()):
            break
    return found


def _wants_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_leaf


# ---- verdicts -------------------------------------------------------------------------------------------------------


def modes_of(model: nn.Module) -> Sequence[str]:
    """Both modes, or only training where no code of the model mentions it: there evaluation computes the same."""
    types = {kind for module in model.modules() for kind in type(module).__mro__ if issubclass(kind, nn.Module)}
    return MODES if any(map(_mentions_its_mode, types - {nn.Module})) else MODES[:1]


@functools.cache
def _mentions_its_mode(kind: type[nn.Module]) -> bool:
    held = (getattr(member, "fget", member) for member in vars(kind).values())
    return any("training" in inspect.getsource(member) for member in held if inspect.isfunction(member))


def refer(case: Case, modes: Sequence[str] = MODES) -> Reference:
    """Run the case in float64 and in float32."""
    model = case.model()
    narrow = _run(model, model, case, modes, None, autocast=False)
    run, noise = narrow, dict.fromkeys(narrow.tensors, 0.0)
    if case.exact:
        model = case.model().double()
        run = _run(model, model, case, modes, torch.float64, autocast=False)
        noise = {name: _own_error(narrow.tensors[name], tensor) for name, tensor in run.tensors.items()}
    dtypes = {name: tensor.dtype for name, tensor in narrow.tensors.items()}
    reference = Reference(case, modes, run, dtypes, noise)
    if ill := {name: e for name, e in reference.errors(narrow, torch.float16).items() if e > EPS16}:
        raise ValueError(f"{case}: float32 itself is off by {ill}: no 16-bit version can be judged")
    return reference


def judge(reference: Reference, run: Run, dtype: torch.dtype, *, dtypes: bool) -> Judgement:
    """Judge what a model gave; ``dtypes`` says whether results must have the dtypes that float32 gives."""
    errors, bounds = reference.errors(run, dtype), reference.bounds(dtype)
    wrong = [f"{name} is {run.others.get(name)}" for name, value in reference.run.others.items()
             if run.others.get(name) != value]  # fmt: skip
    wrong += [f"unexpected {name}" for name in [*run.tensors, *run.others]
              if name not in reference.run.tensors and name not in reference.run.others]  # fmt: skip
    if dtypes:
        wrong += [f"{name} is {run.tensors[name].dtype}" for name, expected in reference.dtypes.items()
                  if name in run.tensors and run.tensors[name].dtype != expected]  # fmt: skip
    return Judgement("; ".join(wrong[:3]), errors, bounds)


def judge_model(reference: Reference, model: nn.Module, dtype: torch.dtype) -> Judgement:
    """Judge a model under torch.autocast, whose results are 16-bit where their last op is."""
    try:
        run = _run(model, model, reference.case, reference.modes, dtype, autocast=True)
    except Exception as error:
        return Judgement(_summary(error))
    return judge(reference, run, dtype, dtypes=False)


def judge_ours(reference: Reference, dtype: torch.dtype, **options: Any) -> Judgement:
    """Judge the converted model; ``options`` are those of ``autocastfx.convert``."""
    case = reference.case
    owner = case.model()
    example = case.call(case.sizes[0])
    try:
        converted = autocastfx.convert(owner, example.args, example.kwargs, dtype=dtype, **options)
        run = _run(converted, owner, case, reference.modes, dtype, autocast=False)
    except Exception as error:
        return Judgement(_summary(error))
    return judge(reference, run, dtype, dtypes=True)


def _summary(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


def _kind(name: str) -> str:
    return name.split(": ")[1].split()[0]


def _norm(tensor: Tensor) -> float:
    return float(tensor.double().where(tensor.isfinite(), 0.0).norm()) if tensor.is_floating_point() else 0.0


def _own_error(narrow: Tensor, exact: Tensor) -> float:
    return distance(narrow, exact) if exact.is_floating_point() else 0.0
