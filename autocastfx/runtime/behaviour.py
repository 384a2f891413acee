"""Watch what a model does in a call, and tell where another model that should do the same does otherwise."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autocastfx.capture.call import leaf_paths
from autocastfx.capture.kept_whole import ATTENTION_WRITTEN_OUT
from autocastfx.capture.leave_intact import equal, isolated, set_modes
from autocastfx.errors import CaptureError
from autocastfx.runtime.amp_module import AmpModule
from autocastfx.runtime.captures import copied_arguments

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_OUTPUT, _GRADIENT, _PARAMETER, _BUFFER = "output", "gradient of", "parameter", "buffer"
_ARGUMENT, _RANDOM = "argument", "next random number"
# Relative distances that a different order of sums may make. Gradients may be sums that cancel: theirs is allowed as a
# share of the largest gradient, too.
_NEAR: Mapping[torch.dtype, float] = {torch.float64: 1e-12, torch.float32: 1e-5}
_OF_LARGEST = 1e-5
_TRIES = 3  # comparisons of a call, if they find a difference
_OF_NUDGE = 8  # the share that other kernels' roundings may have of what a rounding of the arguments does


@dataclass(frozen=True)
class Behaviour:
    """What a model did in one call.

    Attributes:
        tensors: copies of the outputs, the buffers and the arguments afterwards, the next random number, and gradients
            of parameters and arguments, by name; None for a gradient that there is none of. They are dense.
        structure: the nesting of the output, and its members that are no tensors.
    """

    tensors: Mapping[str, torch.Tensor | None]
    structure: tuple[Any, ...]

    @property
    def is_comparable(self) -> bool:
        """True if no output holds NaN, not all floating-point outputs are infinite, and all gradients are finite."""
        floating = {name: t for name, t in self.tensors.items() if t is not None and t.is_floating_point()}
        outputs = [t for name, t in floating.items() if name.startswith(_OUTPUT)]
        gradients = [t for name, t in floating.items() if name.startswith(_GRADIENT)]
        has_numbers = not any(t.numel() for t in outputs) or any(bool(t.isfinite().any()) for t in outputs)
        has_nan = any(bool(t.isnan().any()) for t in outputs)
        return has_numbers and not has_nan and all(bool(t.isfinite().all()) for t in gradients)

    @property
    def all_learn(self) -> bool:
        """True if no gradient is zero."""
        return all(bool(t.any()) for name, t in self.tensors.items() if t is not None and name.startswith(_GRADIENT))


@dataclass(frozen=True)
class Difference:
    """Something that a model does otherwise.

    Attributes:
        what: an output, the gradient of a parameter, a buffer, an argument that is written into, or a mode.
        how: how far apart, or what is missing.
        call: the call, in words.
    """

    what: str
    how: str
    call: str

    def __str__(self) -> str:
        return f"{self.what} {self.how} ({self.call})"


@dataclass(frozen=True)
class Trial:
    """A call to watch.

    Attributes:
        name: the call in words.
        arguments: positional and keyword arguments.
        modes: of the modules, in the order of ``model.modules()``.
        learns: run backward: from all outputs, with fixed random gradients.
        times: how often to call; the last call is watched.
        loss: returns what backward begins with instead, one number, from the output.
        in_short: random sums of gradients are compared, which take next to no memory.
    """

    name: str
    arguments: Arguments
    modes: Sequence[bool]
    learns: bool = True
    times: int = 1
    loss: Callable[[Any], torch.Tensor] | None = None
    in_short: bool = False


class CallError(Exception):
    """A model's forward, its loss, or their backward has raised. A fault of the code that watches is no CallError."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.error = error


def behaviour_of(model: nn.Module, call: Callable[..., Any], trial: Trial) -> Behaviour:
    """Make a call with copies of its arguments, then run backward. All is as it was afterwards.

    Args:
        model: the original, whose parameters and buffers are watched; its attributes are restored.
        call: the model, or another one that shares its parameters and buffers.
        trial: the call.

    Raises:
        CallError: the call, the loss or their backward raise.
    """
    own, learns = list({id(m): m for m in (model, call) if isinstance(m, nn.Module)}.values()), trial.learns
    autocast_off = cast("Any", torch._C)._DisableAutocast()
    with isolated(*own) as changed_ids, autocast_off, ATTENTION_WRITTEN_OUT:
        _copy_iterators(own)
        # calls that come before the one that is compared
        for one in own:
            set_modes(_modules(one), trial.modes)
        torch.manual_seed(0)
        for _ in range(trial.times - 1):
            args, kwargs = _copied(trial)
            with torch.set_grad_enabled(learns), _theirs():
                call(*args, **kwargs)
        # the call, and all that a caller can see of it
        args, kwargs = _copied(trial)
        kinds = {name: (one.shape, one.dtype) for name, one in model.named_buffers()}
        given = pytree.tree_flatten((args, kwargs))[0]
        with torch.set_grad_enabled(learns), _theirs():
            result = call(*args, **kwargs)
        leaves, structure = pytree.tree_flatten(result)
        names = [_OUTPUT + "".join(f"[{step!r}]" for step in path) for path in leaf_paths(structure)]
        outputs = {name: one for name, one in zip(names, leaves, strict=True) if isinstance(one, torch.Tensor)}
        plain = [one for one in leaves if not isinstance(one, torch.Tensor)]
        tensors: dict[str, torch.Tensor | None] = {name: _copy(one) for name, one in outputs.items()}
        tensors |= {f"{_BUFFER} {name}": _copy(one) for name, one in _buffers(model, call, kinds)}
        written = changed_ids()
        tensors |= {f"{_PARAMETER} {n}": _copy(p) for n, p in model.named_parameters() if id(p) in written}
        arguments_now = [one for one in given if isinstance(one, torch.Tensor)]
        tensors |= {f"{_ARGUMENT} {n}": _copy(one) for n, one in enumerate(arguments_now)}
        tensors[_RANDOM] = torch.rand(1, device=next((one.device for one in outputs.values()), "cpu"))
        # backward from every output, or from the loss
        if learns:
            named = {**dict(model.named_parameters()), **{f"{_ARGUMENT} {n}": t for n, t in enumerate(arguments_now)}}
            found: dict[str, Any] = {f"{_GRADIENT} {name}": None for name in named}
            leaves = {name: one for name, one in named.items() if one.is_leaf and one.requires_grad}
            for name, leaf in leaves.items():
                leaf.register_post_accumulate_grad_hook(partial(_take, found, name, trial.in_short))
            with _theirs():
                starts = list(outputs.values()) if trial.loss is None else [trial.loss(result)]
                _run_backward(starts, list(leaves.values()))
            tensors |= {name: torch.FloatTensor(g) if isinstance(g, list) else g for name, g in found.items()}
    return Behaviour(tensors, (str(structure), *(_plain(one) for one in plain)))


def _copy_iterators(models: Sequence[nn.Module]) -> None:
    """Put copies in the place of Python's iterators that modules keep, as ``itertools.count``: they only go forward."""
    for values in [vars(module) for model in models for module in model.modules()]:
        for name, one in values.items():
            if isinstance(one, Iterator) and type(one).__module__ in ("builtins", "itertools"):
                with suppress(TypeError), warnings.catch_warnings():  # a generator has no copy
                    warnings.simplefilter("ignore", DeprecationWarning)  # nor, from Python 3.14 on, has itertools
                    values[name] = copy.copy(one)


@contextmanager
def _theirs() -> Generator[None]:
    try:
        yield
    except Exception as error:
        raise CallError(error) from error


def _buffers(
    model: nn.Module, call: Callable[..., Any], kinds: Mapping[str, tuple[torch.Size, torch.dtype]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the model's buffers as ``call`` left them: a forward may put other tensors in their places.

    One of another size is a table that a graph computes in each call.
    """
    own = dict((call if isinstance(call, nn.Module) else model).named_buffers())
    for name, kind in kinds.items():
        if name in own and (own[name].shape, own[name].dtype) == kind:
            yield name, own[name]


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    is_sparse = tensor.layout not in (torch.strided, torch.jagged)
    return tensor.detach().to_dense() if is_sparse else tensor.detach().clone()


def _run_backward(outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> None:
    learning = [one for one in outputs if one.requires_grad]
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(one.shape, generator=generator, device="cpu").to(one) for one in learning]
    if learning == outputs and len(outputs) == 1 and outputs[0].numel() == 1:
        gradients = [torch.ones_like(outputs[0])]
    if learning and leaves:
        torch.autograd.backward(learning, gradients, inputs=leaves)


def _take(found: dict[str, Any], name: str, in_short: bool, leaf: torch.Tensor) -> None:
    """Take the gradient of a leaf, which backward has just completed."""
    gradient, leaf.grad = cast("torch.Tensor", leaf.grad), None
    dense, kind = (gradient, "") if gradient.layout is torch.strided else (gradient.to_dense(), ", sparse")
    is_short = in_short and dense.dtype in _NEAR and dense.numel() > 0
    found[f"{_GRADIENT} {name}{kind}"] = _in_short(dense) if is_short else dense


_SUMS = 8


def _in_short(gradient: torch.Tensor) -> list[float]:
    """Return few sums of the numbers of a gradient with random weights, whose distance is about the gradients'."""
    table, drawn = gradient.reshape(gradient.shape[0] if gradient.ndim else 1, -1), torch.Generator().manual_seed(0)
    rows, columns = (torch.randn(_SUMS, size, generator=drawn, device="cpu").to(table) for size in table.shape)
    return ((rows @ table) * columns).sum(1).tolist()  # numbers of Python do not cut memory that is freed into pieces


def _copied(trial: Trial) -> Arguments:
    try:
        return copied_arguments(trial.arguments)
    except TypeError as error:
        raise CallError(error) from error


def _modules(model: nn.Module) -> Sequence[nn.Module]:
    """Return a model's modules, a converted one's without those of its variants."""
    return list(model._own_modules) if isinstance(model, AmpModule) else list(model.modules())


def differences(original: Behaviour, other: Behaviour, call: str, nudged: Behaviour | None = None) -> list[Difference]:
    """Return what ``other`` does otherwise, outputs first.

    Equal is: to the bit, or within what another order of sums makes, or, if that is more, within a few times what
    ``nudged`` is off: the original with arguments that are off by a rounding.
    """
    if original.structure != other.structure:
        return [Difference("the output's structure", f"is {other.structure}, not {original.structure}", call)]
    norms = [float(t.norm()) for n, t in original.tensors.items() if t is not None and n.startswith(_GRADIENT)]
    largest = max((norm for norm in norms if norm < float("inf")), default=0.0)
    mismatches: list[Difference] = []
    others = (name for name in other.tensors if not name.startswith(_BUFFER))
    for name in dict.fromkeys((*original.tensors, *others)):
        a, b = original.tensors.get(name), other.tensors.get(name)
        slack = _OF_LARGEST * largest if _GRADIENT in name else 0.0
        if nudged is not None and a is not None and (moved := nudged.tensors.get(name)) is not None:
            slack += _OF_NUDGE * relative_distance(a, moved) * _size(a)
        how = _how_apart(a, b, slack)
        if how:
            mismatches.append(Difference(name, how, call))
    return mismatches


def _size(tensor: torch.Tensor) -> float:
    return float(tensor.double().norm().nan_to_num(0.0, 0.0, 0.0)) or 1.0


def _how_apart(a: torch.Tensor | None, b: torch.Tensor | None, slack: float) -> str:
    """Say how ``b`` differs from ``a``; empty if it does not."""
    if a is None or b is None:
        return "" if a is b else "is there" if a is None else "is missing"
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"is {b.dtype} of {list(b.shape)}, not {a.dtype} of {list(a.shape)}"
    if equal(a, b):
        return ""
    if not a.is_floating_point():
        return f"differs in {int((a != b).sum())} of {a.numel()} elements"
    near = _NEAR.get(a.dtype, 2 * torch.finfo(a.dtype).eps)
    far = relative_distance(a, b) * (norm := _size(a))
    return f"differs by {far / norm:.2g} of its norm" if not far <= near * norm + slack else ""


def relative_distance(reference: torch.Tensor, other: torch.Tensor) -> float:
    """Return the relative L2 distance, without elements that are the same infinity, or NaN, in both."""
    if reference.shape != other.shape:
        return float("inf")
    a, b = reference.double(), other.double()
    same = (a == b) | (a.isnan() & b.isnan())
    norm = float(a.where(a.isfinite(), 0.0).norm()) or 1.0
    far = float((a - b).masked_fill(same, 0.0).norm()) / norm
    return far if far == far else float("inf")


def changed(arguments: Arguments) -> Arguments:
    """Return other arguments of the same sizes, each a tensor of its own.

    Floating-point numbers are drawn anew with the same mean and spread; whole numbers change rows, or, if there is one
    row, are reversed on a CPU. What masks stays: booleans, tensors of zeros and ones or with infinities, whole numbers
    in order.
    """
    generator = torch.Generator().manual_seed(0)

    def change(leaf: torch.Tensor) -> torch.Tensor:
        values = leaf.detach()
        if _is_kept(values):
            made = values.clone()
        elif values.is_floating_point() or values.is_complex():
            drawn = torch.randn(values.shape, generator=generator, dtype=torch.float32, device="cpu").to(values)
            made = values.mean() + drawn * (values.std() if values.numel() > 1 else 1.0)
        else:
            made = values.flip(0) if values.shape[0] > 1 or not values.is_cpu else values.flip(-1)
        return made.requires_grad_(leaf.requires_grad)

    return cast("Arguments", pytree.tree_map_only(torch.Tensor, change, arguments))


def _is_kept(tensor: torch.Tensor) -> bool:
    if tensor.dtype == torch.bool or not tensor.ndim or not tensor.numel():
        return True
    if tensor.is_complex():
        return not bool(tensor.isfinite().all())
    if bool(((tensor == 0) | (tensor == 1)).all()):
        return True
    if tensor.is_floating_point():
        return not bool(tensor.isfinite().all())
    return tensor.ndim == 1 and bool((tensor.diff() >= 0).all())


@dataclass(frozen=True)
class Compared:
    """What was compared.

    Attributes:
        differences: what the other model does otherwise.
        calls: the calls that both ran.
        dropped: the calls that were not compared, with why.
    """

    differences: tuple[Difference, ...]
    calls: tuple[str, ...]
    dropped: tuple[str, ...]


_FEW = (1, 2)  # rows of a batch that are tried for all of them


@dataclass(frozen=True)
class FewRows:
    """Runs calls with few rows of a batch, by graphs that may have to be captured for them.

    Attributes:
        other: gives what runs such a call; None where it cannot.
        seconds: that it takes before it runs.
    """

    other: Callable[[Trial], Callable[..., Any] | None]
    seconds: float


def compare_calls(
    model: nn.Module,
    other: Callable[..., Any],
    trials: Sequence[Trial],
    few_rows: FewRows | None = None,
) -> Compared:
    """Run calls with a model and with another one that should do the same.

    A call that the model itself refuses, that gives Inf or NaN, or of which no graph can be captured, is dropped; where
    it is the backward alone that does so, forward is compared. A model that does something else when it is called
    again, from the same state, differs from any graph that does not.

    Args:
        model: the original.
        other: shares its parameters and buffers.
        trials: the calls.
        few_rows: how few rows of a batch stand for all, where the model takes them, and no gradient is zero, as it is
            before the mean of all rows is subtracted from one.
    """
    mismatches: list[Difference] = []
    calls: list[str] = []
    dropped: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the model, which were or will be seen anyway
        for whole in trials:
            trial, runs, why, original = _that_tells(model, other, whole, few_rows)
            if original is None and trial.learns:
                trial = replace(trial, name=f"{trial.name}, forward alone", learns=False)  # it may be for inference
                _, original = _original(model, trial)
            if original is None:
                dropped.append(f"{trial.name.removesuffix(', forward alone')}: {why}")
                continue
            try:
                mismatches += _differences_in(trial, model, runs, original)
                calls.append(trial.name)
            except CallError as error:
                dropped.append(f"{trial.name}: {_said(error)}")
    return Compared(tuple(mismatches), tuple(calls), tuple(dropped))


def _that_tells(
    model: nn.Module, other: Callable[..., Any], whole: Trial, few_rows: FewRows | None
) -> tuple[Trial, Callable[..., Any], str, Behaviour | None]:
    """Return the call to compare, with few rows if that takes less time; what runs it; and what the model does."""
    for cut, share in _cut(whole) if few_rows is not None else ():
        began = time.perf_counter()
        why, original = _original(model, cut)
        took = time.perf_counter() - began
        if few_rows is None or original is None or not original.all_learn:
            continue
        is_shorter = took + few_rows.seconds < 2 * took / share
        if is_shorter and (runs := few_rows.other(cut)) is not None:
            return cut, runs, why, original
    return whole, other, *_original(model, whole)


def _cut(trial: Trial) -> Iterator[tuple[Trial, float]]:
    """Yield the call with few rows of its batch, and their share of all.

    They are those of the arguments that begin with as many as the first tensor.
    """
    sizes = [len(one) for one in pytree.tree_leaves(trial.arguments) if isinstance(one, torch.Tensor) and one.ndim]
    for rows in (rows for rows in _FEW if sizes and rows < sizes[0]):

        def cut(leaf: torch.Tensor, rows: int = rows) -> torch.Tensor:
            is_batch = leaf.ndim and len(leaf) == sizes[0]
            return leaf.detach()[:rows].requires_grad_(leaf.requires_grad) if is_batch else leaf

        args, kwargs = pytree.tree_map_only(torch.Tensor, cut, trial.arguments)
        yield replace(trial, arguments=(args, kwargs), in_short=True), rows / sizes[0]


def _original(model: nn.Module, trial: Trial) -> tuple[str, Behaviour | None]:
    """Return what the model does; or None, and why nothing can be compared with it."""
    try:
        original = behaviour_of(model, model, trial)
    except CallError as error:
        return f"the model raises {_said(error)}", None
    return ("", original) if original.is_comparable else ("the model gives Inf or NaN", None)


def _differences_in(trial: Trial, model: nn.Module, other: Callable[..., Any], original: Behaviour) -> list[Difference]:
    """Return what the other model does otherwise in a call in which the model has behaved like ``original``.

    Threads of a process draw from the same random numbers. So a difference counts if it is there in each of a few
    tries.
    """
    found = _differences_once(trial, model, other, original)
    for _ in range(_TRIES - 1):
        if not found or (now := _original(model, trial)[1]) is None:
            break
        found = _differences_once(trial, model, other, now)
    return found


def _differences_once(
    trial: Trial, model: nn.Module, other: Callable[..., Any], original: Behaviour
) -> list[Difference]:
    try:
        ours = behaviour_of(model, other, trial)
    except CallError as error:  # what the original did without
        if isinstance(error.error, CaptureError):  # there is no graph to compare, and such a call will say so
            raise
        return [Difference("the call", f"raises {_said(error)}", trial.name)]
    if not (found := differences(original, ours, trial.name)):
        return []
    try:
        again = differences(original, behaviour_of(model, model, trial), trial.name)
    except CallError as error:
        again = [Difference("the call", f"raises {_said(error)}", trial.name)]
    if {one.what for one in (*found, *again)} == {_RANDOM} and again:  # another thread has drawn; the model draws none
        return []
    if again:  # a nudge would tell nothing
        return [replace(again[0], how=f"{again[0].how} when the model itself is called again")]
    return differences(original, ours, trial.name, _nudged_behaviour(model, trial))


def _nudged_behaviour(model: nn.Module, trial: Trial) -> Behaviour | None:
    try:
        return behaviour_of(model, model, _nudged(trial))
    except CallError:  # the model refuses what is off by a rounding
        return None


def _nudged(trial: Trial) -> Trial:
    """Return the call with each floating-point argument off by an epsilon, up or down."""
    generator = torch.Generator().manual_seed(1)

    def nudge(leaf: torch.Tensor) -> torch.Tensor:
        if not leaf.is_floating_point():
            return leaf
        signs = torch.randint(0, 2, leaf.shape, generator=generator, device="cpu").to(leaf) * 2 - 1
        moved = leaf.detach() * (1 + signs * torch.finfo(leaf.dtype).eps)
        return moved.requires_grad_(leaf.requires_grad)

    return replace(trial, arguments=cast("Arguments", pytree.tree_map_only(torch.Tensor, nudge, trial.arguments)))


def _said(error: CallError) -> str:
    return str(error).splitlines()[0][:200]


def trials_of(arguments: Arguments, variants: Sequence[tuple[bool, ...]]) -> list[Trial]:
    """Return the calls by which a capture is checked: changed arguments and those given, in training and evaluation."""
    values = {"other values": changed(arguments), "the values given": arguments}
    return [
        Trial(f"{which}, {_word(modes)}", given, modes, learns=n == 0)
        for which, given in values.items()
        for n, modes in enumerate(sorted(variants, key=lambda modes: -sum(modes)))
    ]


def _word(modes: Sequence[bool]) -> str:
    return "in training" if all(modes) else "in evaluation" if not any(modes) else "in mixed modes"
