"""Which listed ops have no 16-bit kernel on this CPU, forward or backward: ``no_kernel`` in op_lists/kernel_facts.yaml.

torch's own test samples (``op_db``; needs the package expecttest) are traced as capture traces a model. Every call of a
listed op in these graphs is made in float32 and again with 16-bit tensors: what only float32 can has no 16-bit kernel.

    python -m benchmarks.kernel_facts
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from autocastfx.op_list import Category, load_op_list
from autocastfx.op_name import base_name, of_function

SAMPLES = 12  # calls tried of one overload, and test samples of one op
LIST = load_op_list("float16")
LISTED = {op for op, rule in LIST.rules.items() if rule.category is not Category.KEEP}


def samples() -> Iterator[tuple[Callable[..., Any], Any]]:
    """Float32 calls and their (args, kwargs); first what op_db lacks."""
    layers = (nn.LSTM(8, 16, 2, bidirectional=True), nn.GRU(8, 16), nn.RNN(8, 16), nn.RNN(8, 16, nonlinearity="relu"))
    cells = (nn.LSTMCell(8, 16), nn.GRUCell(8, 16), nn.RNNCell(8, 16), nn.RNNCell(8, 16, nonlinearity="relu"))
    yield from ((layer, ((torch.randn(5, 3, 8),), {})) for layer in layers)
    yield from ((cell, ((torch.randn(3, 8),), {})) for cell in cells)
    image = torch.randn(1, 2, 6, 6)
    for mode in ("bilinear", "bicubic"):
        yield nn.functional.interpolate, ((image, (3, 3)), {"mode": mode, "antialias": True})
    yield torch.ops.aten.native_dropout, ((image, 0.5, True), {})
    yield torch.ops.aten.col2im, ((torch.randn(1, 8, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]), {})
    for op in op_db:
        if torch.float32 in op.supported_dtypes("cpu"):
            for sample in list(op.sample_inputs("cpu", torch.float32))[:SAMPLES]:
                yield op, ((sample.input, *sample.args), sample.kwargs)


def attempt(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> str:
    """Why a call fails in ``dtype``, forward or backward; empty if it does not."""
    kept, names = LIST.kept(of_function(func)), [a.name for a in func._schema.arguments]

    def prepared(leaf: Any, name: str) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dtype != torch.float32:
            return leaf
        runs = leaf.detach().clone().to(torch.float32 if name in kept else dtype)
        return runs.requires_grad_(not func._schema.is_mutable)

    named = {**dict(zip(names, args, strict=False)), **kwargs}
    named = {name: pytree.tree_map(functools.partial(prepared, name=name), arg) for name, arg in named.items()}
    try:
        made = pytree.tree_leaves(func(*(named[n] for n in names[: len(args)]), **{n: named[n] for n in kwargs}))
        made = [t.abs().sum() for t in made if isinstance(t, torch.Tensor) and t.requires_grad]
        if made:
            sum(made).backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


class Trial(fx.Interpreter):
    """Runs a graph, and tries the listed ops in it in both 16-bit dtypes."""

    tried: ClassVar[Counter[Any]] = Counter()
    failed: ClassVar[dict[torch.dtype, dict[str, str]]] = {torch.float16: {}, torch.bfloat16: {}}

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        name = base_name(of_function(target))
        if name in LISTED and hasattr(target, "_schema") and self.tried[target] < SAMPLES:
            self.tried[target] += 1
            for dtype in self.failed if not attempt(target, args, kwargs, torch.float32) else ():
                if why := attempt(target, args, kwargs, dtype):
                    self.failed[dtype].setdefault(name, why)
        return super().call_function(target, args, kwargs)


def main() -> None:
    warnings.simplefilter("ignore")
    for call, arguments in samples():
        flat, spec = pytree.tree_flatten(arguments)
        tensors = [leaf.detach() for leaf in flat if isinstance(leaf, torch.Tensor)]

        def run(*given: torch.Tensor, call: Any = call, flat: Any = flat, spec: Any = spec) -> Any:
            rest = iter(given)
            args, kwargs = pytree.tree_unflatten([next(rest) if isinstance(x, torch.Tensor) else x for x in flat], spec)
            return call(*args, **kwargs)

        try:
            Trial(make_fx(run, pre_dispatch=True)(*tensors)).run(*tensors)
        except Exception as error:  # a sample that cannot be traced says nothing
            print(f"# no graph of {getattr(call, 'name', call)}: {str(error).splitlines()[0][:100]}")
    print("# not tried:", *sorted(LISTED - {base_name(of_function(func)) for func in Trial.tried}))
    for dtype, found in Trial.failed.items():
        print(
            f"{dtype}: [{', '.join(sorted(found))}]", *(f"# {op}: {why}" for op, why in sorted(found.items())), sep="\n"
        )


if __name__ == "__main__":
    main()
