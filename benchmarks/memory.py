"""Count the bytes that a training forward saves for backward, by policy, for models at full size.

    python -m benchmarks.memory [--models "GPT-2 b8 s1024"] [--policies "float32;float16 half"] [--json PATH]

Nothing is allocated or computed: tensors are abstract, on the meta device, and placements are for a CUDA device in
float16. The storages that autograd holds after one forward with loss are counted, each once, without inputs. Parameters
and their casts are counted separately, because they do not grow with the batch. BERT and GPT-2 write attention out. For
the others' scaled_dot_product_attention the unfused kernel of products and softmax is assumed, because abstract tensors
use it. Dropout saves a boolean mask, as its CUDA kernel does.

``torch_autocast_cuda`` is this package's preset of torch.autocast's dispatch on a CUDA device; without such a device
torch.autocast itself ignores abstract tensors. ``half`` is ``model.half()``.

With ``--json`` each row is written at once; rows of the same commit are not measured again. The exit status is 1 if
fold="kernel" is above a limit.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import autocastfx
from autocastfx.errors import UnsupportedError
from benchmarks.models import TRAINED, FullModel
from benchmarks.step_counts import Saved, count
from benchmarks.store import Store

FLOAT32, AUTOCAST, KERNEL, HALF = "float32", "torch_autocast_cuda", "fold=kernel", "half"
# By policy: the arguments of convert; None is the model itself.
POLICIES: dict[str, dict[str, Any] | None] = {
    FLOAT32: None,
    AUTOCAST: {"op_list": AUTOCAST},
    "fold=none": {"fold": "none"},
    "fold=exact": {"fold": "exact"},
    KERNEL: {"fold": "kernel"},
    HALF: None,
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
    """Return, by model, the bytes that ``policy`` saves divided by those of ``other``, if both were measured."""
    held = {(row.model, row.policy): row.activations for row in rows if not row.note}
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


_COMPARED = (("fold=exact", AUTOCAST), (KERNEL, AUTOCAST), (KERNEL, HALF))


def table(rows: Sequence[Row]) -> str:
    """Write the table to print: gigabytes of activations and of weights, and ratios of the activations."""
    models = list(dict.fromkeys(row.model for row in rows))
    held = {(row.model, row.policy): row for row in rows}
    head = "".join(f"{policy:>{_width(policy)}}" for policy in POLICIES)

    def gigabytes(model: str, kind: str) -> str:
        found = (held.get((model, policy)) for policy in POLICIES)
        texts = (f"{getattr(row, kind) / 1e9:.2f}" if row and not row.note else "-" for row in found)
        return "".join(f"{text:>{_width(policy)}}" for text, policy in zip(texts, POLICIES, strict=True))

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


def measure_all(names: Sequence[str], policies: Sequence[str], store: Store[Row], say: Callable[[str], None]) -> None:
    """Measure the rows that are not in ``store``."""
    held = {(row.model, row.policy) for row in store.rows}
    for name in names:
        for policy in policies:
            if (name, policy) in held:
                continue
            started = time.perf_counter()
            row = measure(name, TRAINED[name], policy)
            store.extend([row])
            said = row.note or f"{row.activations / 1e9:.2f} GB, {row.weights / 1e9:.2f} GB of weights"
            say(f"{name}, {policy}: {said} ({time.perf_counter() - started:.0f} s)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the models and policies asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", default=";".join(TRAINED), help="separated by semicolons")
    parser.add_argument("--policies", default=";".join(POLICIES), help="separated by semicolons")
    parser.add_argument("--json", type=Path, help="the store of rows")
    options = parser.parse_args(arguments)
    names, policies = options.models.split(";"), options.policies.split(";")
    for asked, known in ((names, TRAINED), (policies, POLICIES)):
        if unknown := [one for one in asked if one not in known]:
            parser.error(f"unknown: {'; '.join(unknown)}; there are {'; '.join(known)}")

    store = Store(options.json, Row, {"dtype": "float16", "placed for": "cuda"})
    measure_all(names, policies, store, lambda text: print(text, file=sys.stderr, flush=True))
    print(table(store.rows))
    failed = failures(store.rows)
    for line in failed:
        print(line)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
