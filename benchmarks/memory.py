"""Count bytes: those that a training forward saves for backward, at full size, or those of each parameter in training.

    python -m benchmarks.memory [--models "GPT-2 b8 s1024"] [--policies "float32;float16 half"] [--json PATH]
    python -m benchmarks.memory --saved [--twins "GPT-2 eager"] [--rounds 6] [--json PATH]
    python -m benchmarks.memory --per-parameter [--modes "float32;float16 cached"] [--width 1024] [--json PATH]

By default nothing is allocated or computed: tensors are abstract, on the meta device, and placements are for a CUDA
device in float16. The storages that autograd holds after one forward with loss are counted, each once, without inputs.
Parameters and their casts are counted separately, because they do not grow with the batch. BERT and GPT-2 write
attention out. For the others' scaled_dot_product_attention the unfused kernel of products and softmax is assumed,
because abstract tensors use it. Dropout saves a boolean mask, as its CUDA kernel does. ``torch_autocast_cuda`` is this
package's preset of torch.autocast's dispatch on a CUDA device; without such a device torch.autocast itself ignores
abstract tensors. ``half`` is ``model.half()``. ``float8``: all linear layers but the last compute in float8, the rest
is as with fold="exact". Every call quantises the weights, so their float8 numbers are among the activations, and this
policy is compared by all bytes. The exit status is 1 if fold="kernel" is above a limit.

With ``--per-parameter`` a perceptron of ten square layers, with few activations compared to weights, is trained with
fused AdamW. After the last of three steps, before gradients are dropped, the storages of all live tensors are counted,
each once. Peaks are the most bytes that the optimizer's part of a step, and the whole step, allocate at one time, by
the allocator's events.

With ``--saved`` narrower models compute, with values kept for backward in several ways (``benchmarks/saved.py``). The
exit status is 1 if too few models keep its limits.

With ``--json`` each row is written at once; rows of the same commit are not measured again.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from statistics import geometric_mean
from typing import Any
from unittest import mock

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.profiler import ProfilerActivity, profile, record_function

import autocastfx
from autocastfx import OpList
from autocastfx.errors import UnsupportedError
from benchmarks import saved, training
from benchmarks.command import Command, verdict
from benchmarks.models.families import FullModel
from benchmarks.models.full import TRAINED
from benchmarks.step_counts import Saved, count
from benchmarks.store import Store

FLOAT32, AUTOCAST, EXACT, KERNEL, HALF = "float32", "torch_autocast_cuda", "fold=exact", "fold=kernel", "half"
FLOAT8 = "float8"
_PRODUCTS = OpList.of({"extends": "bfloat16", "float8": [{"ops": ["linear", "addmm"], "last": False}]})
# By policy: the arguments of convert; None is the model itself.
POLICIES: dict[str, dict[str, Any] | None] = {
    FLOAT32: None,
    AUTOCAST: {"op_list": AUTOCAST},
    "fold=none": {"fold": "none"},
    EXACT: {"fold": "exact"},
    KERNEL: {"fold": "kernel"},
    HALF: None,
    FLOAT8: {"op_list": _PRODUCTS, "dtype": torch.bfloat16},
}
# fold="kernel" may save this many times what the other policy does: in the geometric mean, and of single models.
MEAN_LIMIT, LIMIT = 0.82, 1.02
LIMITS = {"GPT-2 b8 s1024": 0.92, "T5-small b8 s512": 0.95, "Llama 12x768 b8 s1024": 0.96}


@dataclass(frozen=True)
class Row:
    """The bytes that a model saves under a policy, or a note why they are missing."""

    model: str
    policy: str
    activations: int = 0
    weights: int = 0
    note: str = ""


def measure(name: str, model: FullModel, policy: str) -> Row:
    """Count the bytes that one forward in training mode saves."""
    with torch.device("meta"):
        module, inputs = model.build().train(), model.inputs()
    options = POLICIES[policy]
    if options is not None:
        try:
            fixed = {"dtype": torch.float16, "device": "cuda", "keep_output_dtype": False}
            module = autocastfx.convert(module, (), inputs, **{**fixed, **options})
        except UnsupportedError as error:
            return Row(name, policy, note=f"not there yet: {str(error).splitlines()[0]}")
        saved = _saved(module, inputs)
    else:
        if policy == HALF:
            module.half()
            inputs = {key: held.half() if held.is_floating_point() else held for key, held in inputs.items()}
        mode = make_fake(module, inputs)
        with mode:
            saved = _saved(module, inputs)
    return Row(name, policy, saved.activations, saved.weights)


def _saved(module: nn.Module, inputs: dict[str, Tensor]) -> Saved:
    with cuda_dropout(), torch.device("meta"):
        return count(module, inputs.values(), lambda: module(**inputs)).saved()


def make_fake(module: nn.Module, inputs: dict[str, Tensor]) -> FakeTensorMode:
    """Replace tensors on the meta device by fake tensors, which transformers does not try to read."""
    fakes: dict[int, tuple[Tensor, Tensor]] = {}  # with the original, so that no other has its address

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in fakes:  # ties are kept
            made: Tensor = mode.from_tensor(tensor.detach())
            is_parameter = isinstance(tensor, nn.Parameter)
            fakes[id(tensor)] = tensor, nn.Parameter(made, tensor.requires_grad) if is_parameter else made
        return fakes[id(tensor)][1]

    with torch._functorch.config.patch(fake_tensor_allow_meta=True):
        mode = FakeTensorMode()
        for held in (inputs, *(held for owner in module.modules() for held in (owner._parameters, owner._buffers))):
            held.update({name: fake(tensor) for name, tensor in held.items() if tensor is not None})  # type: ignore[misc]
    return mode


@contextmanager
def cuda_dropout() -> Iterator[None]:
    """Run dropout on the meta device with the operator used on a CUDA device."""

    def dropout(x: Tensor, p: float, train: bool) -> Tensor:
        return torch.native_dropout(x, p, train)[0] if p and train else x

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("dropout", dropout, "AutogradMeta")
        yield


def ratios(rows: Sequence[Row], policy: str, other: str) -> dict[str, float]:
    """Return, by model, the bytes that ``policy`` saves divided by those of ``other``, if both were measured.

    They are those of activations, and beside float8 those of weights too.
    """
    with_weights = FLOAT8 in (policy, other)
    held = {(r.model, r.policy): r.activations + with_weights * r.weights for r in rows if not r.note}
    models = dict.fromkeys(row.model for row in rows)
    return {m: held[m, policy] / held[m, other] for m in models if {(m, policy), (m, other)} <= held.keys()}


def failures(rows: Sequence[Row]) -> list[str]:
    """Return a line for each model where fold="kernel" is above a limit."""
    found = []
    to_autocast = ratios(rows, KERNEL, AUTOCAST)
    if to_autocast and (mean := geometric_mean(to_autocast.values())) > MEAN_LIMIT:
        found.append(f"{KERNEL}: {mean:.3f} times {AUTOCAST} in the geometric mean, the limit is {MEAN_LIMIT}")
    for model, ratio in ratios(rows, KERNEL, HALF).items():
        if ratio > (limit := LIMITS.get(model, LIMIT)):
            found.append(f"{KERNEL}: {model}: {ratio:.3f} times {HALF}, the limit is {limit}")
    return found


_COMPARED = ((EXACT, AUTOCAST), (KERNEL, AUTOCAST), (KERNEL, HALF), (FLOAT8, EXACT))


def table(rows: Sequence[Row]) -> str:
    """Write the table to print: gigabytes of activations and of weights, and ratios of the activations."""
    models = list(dict.fromkeys(row.model for row in rows))
    held = {(row.model, row.policy): row for row in rows}
    policies = [policy for policy in POLICIES if any(row.policy == policy for row in rows)]
    head = "".join(f"{policy:>{_width(policy)}}" for policy in policies)

    def gigabytes(model: str, kind: str) -> str:
        found = (held.get((model, policy)) for policy in policies)
        texts = (f"{getattr(row, kind) / 1e9:.2f}" if row and not row.note else "-" for row in found)
        return "".join(f"{text:>{_width(policy)}}" for text, policy in zip(texts, policies, strict=True))

    lines = [f"{'activations, GB':<22}{head}", *(f"{model:<22}{gigabytes(model, 'activations')}" for model in models)]
    lines += ["", f"{'weights, GB':<22}{head}", *(f"{model:<22}{gigabytes(model, 'weights')}" for model in models)]
    lines.append("")
    for policy, other in _COMPARED:
        found = ratios(rows, policy, other)
        if found:
            single = ", ".join(f"{model.split()[0]} {ratio:.2f}" for model, ratio in found.items())
            lines.append(f"{policy} to {other}: {geometric_mean(found.values()):.3f} in the geometric mean ({single})")
    lines += dict.fromkeys(f"{row.policy}: {row.note}" for row in rows if row.note)
    return "\n".join(lines)


def _width(policy: str) -> int:
    return max(9, len(policy)) + 2


# ---- bytes of a parameter -------------------------------------------------------------------------------------------

WIDTH, DEPTH, BATCH = 1024, 10, 4
_WORK = "what is measured"
# By mode: the side of benchmarks.training; none for inference.
MODES: dict[str, str] = {
    "float32": training.FLOAT32,
    "torch.autocast float16, GradScaler": training.AUTOCAST,
    "float16 cast": "cast, fold=exact",
    "float16 cached": "cached, fold=exact",
    "float16 model.half(), masters": training.HALF,
    "bfloat16 model.bfloat16(), masters": training.HALF,
    "bfloat16 model.bfloat16(), split": training.HALF,
    "float16 low, inference": "",
}


@dataclass(frozen=True)
class ParameterRow:
    """Bytes per parameter; ``working`` counts live tensors that are none of the others: 16-bit working copies.

    ``optimizer_peak`` and ``step_peak`` are None if nothing is trained. A note says why numbers are missing.
    """

    mode: str
    parameters: int = 0
    weights: float = 0.0
    gradients: float = 0.0
    masters: float = 0.0
    state: float = 0.0
    working: float = 0.0
    total: float = 0.0
    optimizer_peak: float | None = None
    step_peak: float | None = None
    note: str = ""


class Perceptron(nn.Module):
    """Square layers, and the mean square of what they give."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = (layer for _ in range(DEPTH) for layer in (nn.Linear(width, width), nn.ReLU()))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.layers(x).float().square().mean(),)


def live() -> dict[int, int]:
    """Return the bytes of the storage of each live tensor on the CPU, by address."""
    gc.collect()
    held: list[Tensor] = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `.grad` of what is no leaf
        held += [grad for tensor in held if (grad := tensor.grad) is not None]
    return _storages(held)


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    found = [tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided]
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.device.type == "cpu"}


def peak(work: Callable[[], object], before: Callable[[], object]) -> int:
    """Return the most bytes that ``work`` holds at one time beyond those at its start.

    ``before`` runs first, because the profiler knows the size of a freed block only if it saw its allocation.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        before()
        with record_function(_WORK):
            work()
    events: Any = found.profiler
    everything = sorted(events.kineto_results.events(), key=lambda event: event.start_ns())
    most = now = 0
    for event in everything[next(i for i, event in enumerate(everything) if event.name() == _WORK) :]:
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def per_parameter(mode: str, width: int) -> ParameterRow:
    """Count the bytes of a mode; returns a note if ``convert`` refuses it."""
    before = live()
    full = FullModel(lambda: Perceptron(width), lambda: {"x": torch.ones(BATCH, width)})
    try:
        return _trained(mode, full, before) if MODES[mode] else _inferring(mode, full, before)
    except UnsupportedError as error:
        return ParameterRow(mode, note=f"not there yet: {str(error).splitlines()[0]}")


def _inferring(mode: str, full: FullModel, before: dict[int, int]) -> ParameterRow:
    inputs = full.inputs()
    model = autocastfx.convert(full.build().eval(), (), inputs, dtype=torch.float16, weights="low").eval()
    with torch.inference_mode():
        model(**inputs)
    return _counted(mode, before, {"weights": list(model.parameters())})


def _trained(mode: str, full: FullModel, before: dict[int, int]) -> ParameterRow:
    dtype = torch.bfloat16 if mode.startswith("bfloat16") else torch.float16
    kind = "split" if mode.endswith("split") else "float32"
    made = training.training(MODES[mode], full, training.Setting("cpu", dtype), masters=kind)
    drop_gradients = made.optimizer.zero_grad
    with mock.patch.object(made.optimizer, "zero_grad"):  # gradients are counted after the step

        def step(*, forgets: bool = False) -> None:
            made.forward_and_backward()
            made.step()
            if forgets:
                drop_gradients()

        step(forgets=True)
        step_peak = peak(step, lambda: step(forgets=True))
        drop_gradients()
        optimizer_peak = peak(made.step, made.forward_and_backward)
    weights = list(made.model.parameters())
    masters = [p for group in made.optimizer.param_groups for p in group["params"]]
    states = [held for state in made.optimizer.state.values() for held in state.values()]
    rests: list[Tensor] = getattr(getattr(made.optimizer, "masters", None), "rests", [])
    kinds = {
        "weights": weights,
        "gradients": [p.grad for p in (*weights, *masters) if p.grad is not None],
        "masters": [*rests, *(p for p in masters if not any(p is weight for weight in weights))],
        "state": [held for held in states if isinstance(held, Tensor)],
    }
    return _counted(mode, before, kinds, optimizer_peak, step_peak)


def _counted(mode: str, before: dict[int, int], kinds: dict[str, list[Tensor]], *peaks: int) -> ParameterRow:
    total = sum(size for address, size in live().items() if before.get(address) != size)
    count = sum(weight.numel() for weight in kinds["weights"])
    bytes_of = {kind: sum(_storages(tensors).values()) for kind, tensors in kinds.items()}
    return ParameterRow(
        mode,
        count,
        **{kind: size / count for kind, size in bytes_of.items()},
        **dict(zip(("optimizer_peak", "step_peak"), (peak / count for peak in peaks), strict=False)),
        working=(total - sum(bytes_of.values())) / count,
        total=total / count,
    )


_KINDS = ("weights", "gradients", "masters", "state", "working", "total")


def parameter_table(rows: Sequence[ParameterRow]) -> str:
    """Write the table to print."""
    head = f"{'mode':<36}" + "".join(f"{kind:>11}" for kind in (*_KINDS, "optimizer+", "step+"))
    return "\n".join([head, *map(_line, rows)])


def _line(row: ParameterRow) -> str:
    if row.note:
        return f"{row.mode:<36} {row.note}"
    peaks = "".join(f"{'-' if found is None else f'{found:.2f}':>11}" for found in (row.optimizer_peak, row.step_peak))
    return f"{row.mode:<36}" + "".join(f"{getattr(row, kind):>11.2f}" for kind in _KINDS) + peaks


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the models and policies, or the modes, asked for."""
    command = Command("memory", __doc__)
    command.names("--models", TRAINED, separator=";")
    command.names("--policies", POLICIES, separator=";")
    command.add_argument("--per-parameter", action="store_true", help="count the bytes of each parameter instead")
    command.names("--modes", MODES, separator=";")
    command.number("--width", WIDTH)
    command.add_argument("--saved", action="store_true", help="keep values for backward in several ways instead")
    command.names("--twins", saved.TWINS, separator=";")
    command.rounds(6)
    options = command.begin(arguments, is_timed=True)
    if options.saved:
        kept = Store(options.json, saved.SavedRow, {"rounds": options.rounds})
        kept.fill(options.twins, "model", lambda name: saved.measure(name, saved.TWINS[name], options.rounds, peak))
        return verdict(saved.table(kept.rows), saved.failures(kept.rows))
    if options.per_parameter:
        parameters = Store(options.json, ParameterRow, {})
        parameters.rows.clear()  # they do not name the width
        print(f"bytes for each of {DEPTH * options.width * (options.width + 1):,} parameters")
        parameters.fill(options.modes, "mode", lambda mode: [per_parameter(mode, options.width)])
        return verdict(parameter_table(parameters.rows))
    store = Store(options.json, Row, {"dtype": "float16", "placed for": "cuda"})
    asked = product(options.models, options.policies)
    store.fill(asked, "model policy", lambda pair: [measure(pair[0], TRAINED[pair[0]], pair[1])])
    return verdict(table(store.rows), failures(store.rows))


if __name__ == "__main__":
    sys.exit(main())
