"""torch's own lists of operators and arguments for its tests of autocast: the same dtype and bits, one by one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists
from torch.utils import _pytree as pytree

import autocastfx
from autocastfx.errors import BannedOpError
from autocastfx.policy.rule import Category
from tests.helpers import with_pinned_torch

LOW = [torch.float16, torch.bfloat16]
MODULES = {"nn": torch._C._nn, "linalg": torch._C._linalg, "torch": torch, "methods": torch.Tensor}


@dataclass(frozen=True, eq=False)
class Entry:
    """One line of a list: which function, with what, and the category that the list stands for."""

    list: str
    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def function(self) -> Callable[..., Any]:
        own = MODULES["nn" if self.op == "binary_cross_entropy" else self.list.partition("_")[0]]
        return getattr(own, self.op) if hasattr(own, self.op) else getattr(torch.Tensor, self.op)

    def __str__(self) -> str:
        return f"{self.list}-{self.op}"

    def arguments(self, low: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with the 16-bit ones in ``low``."""
        return cast_args((self.args, self.kwargs), low, only=(torch.float16, torch.bfloat16))


def cast_args(arguments: Any, dtype: torch.dtype, only: tuple[torch.dtype, ...] | None = None) -> Any:
    def cast(leaf: Any) -> Any:
        is_floating = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if is_floating and (only is None or leaf.dtype in only) else leaf

    return pytree.tree_map(cast, arguments)


def entries(lists: Any) -> Iterator[Entry]:
    for name in vars(lists):
        for op, args, *rest in getattr(lists, name):
            kwargs = rest[-1] if rest and isinstance(rest[-1], dict) else {}
            if op == "einsum":  # the line upstream is no call: a string stands where the operands should
                args = ("bkhd,bqhd->bqkh", torch.randn(2, 3, 4, 5), torch.randn(2, 6, 4, 5))
            yield Entry(name, op, args, kwargs)


torch.manual_seed(0)
CPU = list(entries(AutocastCPUTestLists("cpu")))
CUDA = list(entries(AutocastTestLists("cpu")))
CUDNN = [e for e in CUDA if e.op.startswith("cudnn")]
BANNED = [e for e in CUDA if e.list == "banned"]
RUN = [e for e in CUDA if e not in (*CUDNN, *BANNED)]
NOTHING = torch.zeros(1)  # torch.export wants an input
MIXED = "torch_need_autocast_promote"


def lowered(x: torch.Tensor) -> torch.Tensor:
    """``x`` as a value that autocast made 16-bit: its product with 1. The float32 model cannot mix dtypes itself."""
    return torch.mm(x.reshape(-1, 1), x.new_ones(1, 1)).reshape(x.shape)


class Calls(nn.Module):
    """A call of each entry's function. The tensors are buffers, whose sizes are fixed: so capture is fast."""

    def __init__(self, calls: list[Entry], low: torch.dtype) -> None:
        super().__init__()
        self.functions = [entry.function for entry in calls]
        leaves, self.spec = pytree.tree_flatten([entry.arguments(low) for entry in calls])
        inside = pytree.tree_leaves([pytree.tree_map(lambda _, e=e: e.list == MIXED, e.arguments(low)) for e in calls])
        self.is_low = [is_mixed and is_tensor(leaf, low) for leaf, is_mixed in zip(leaves, inside, strict=True)]
        self.constants = [None if is_tensor(leaf) else leaf for leaf in leaves]
        self.names = [f"leaf{i}" if is_tensor(leaf) else None for i, leaf in enumerate(leaves)]
        for name, leaf, lower in zip(self.names, leaves, self.is_low, strict=True):
            if name is not None:
                self.register_buffer(name, leaf.float() if lower else leaf)

    def forward(self, nothing: torch.Tensor) -> Any:
        held = zip(self.names, self.constants, strict=True)
        leaves = [constant if name is None else getattr(self, name) for name, constant in held]
        leaves = [lowered(leaf) if lower else leaf for leaf, lower in zip(leaves, self.is_low, strict=True)]
        calls = zip(self.functions, pytree.tree_unflatten(leaves, self.spec), strict=True)
        return [function(*args, **kwargs) for function, (args, kwargs) in calls]


def is_tensor(leaf: Any, dtype: torch.dtype | None = None) -> bool:
    return isinstance(leaf, torch.Tensor) and dtype in (None, leaf.dtype)


def wrong(device: str, low: torch.dtype, expected: Callable[[Entry], Any]) -> list[str]:
    """The entries whose result in one converted graph of all is another than expected."""
    calls = CPU if device == "cpu" else RUN
    model = Calls(calls, low)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "float16 convolutions on a CPU")
        warnings.filterwarnings("ignore", "(?s).*deprecated")  # of functions that the lists of torch.autocast name
        preset = f"torch_autocast_{device}"
        converted = autocastfx.convert(model, NOTHING, dtype=low, op_list=preset, keep_output_dtype=False, check=False)
    found = zip(calls, converted(NOTHING), strict=True)
    return [str(entry) for entry, result in found if not same(result, expected(entry))]


def same(result: Any, expected: Any) -> bool:
    found, wanted = pytree.tree_leaves(result), pytree.tree_leaves(expected)
    return len(found) == len(wanted) and all(
        one.dtype == other.dtype and torch.equal(one, other) if isinstance(other, torch.Tensor) else one == other
        for one, other in zip(found, wanted, strict=True)
    )


@with_pinned_torch
def test_every_entry_is_here() -> None:
    assert (len(CPU), len(CUDA), len(CUDNN), len(BANNED), len(RUN)) == (55, 121, 2, 1, 118)


@pytest.mark.parametrize("low", LOW, ids=str)
def test_cpu(low: torch.dtype) -> None:
    def expected(entry: Entry) -> Any:
        args, kwargs = entry.arguments(low)
        with torch.autocast("cpu", dtype=low):
            return entry.function(*args, **kwargs)

    assert wrong("cpu", low, expected) == []


@pytest.mark.parametrize("low", LOW[::-1], ids=str)
def test_cuda(low: torch.dtype) -> None:
    """What the list stands for, on the CPU: the op on inputs that are cast by hand."""

    def expected(entry: Entry) -> Any:
        args, kwargs = entry.arguments(low)
        if entry.list.endswith("fp16"):
            args, kwargs = cast_args((args, kwargs), low)
        elif entry.list.endswith(("fp32", "need_autocast_promote")):  # each promote entry has a float32 operand
            args, kwargs = cast_args((args, kwargs), torch.float32)
        else:
            assert entry.list.endswith("builtin_promote")
        return entry.function(*args, **kwargs)

    assert wrong("cuda", low, expected) == []


@pytest.mark.parametrize("entry", CUDNN, ids=str)
def test_cudnn(entry: Entry) -> None:
    assert autocastfx.load_op_list("torch_autocast_cuda").rules[entry.op].category is Category.ALLOW
    if not torch.backends.cudnn.is_available():
        pytest.skip("needs cuDNN, and this torch has none")


@pytest.mark.parametrize("entry", BANNED, ids=str)
def test_banned(entry: Entry) -> None:
    model = Calls([entry], torch.float16)
    with pytest.raises(BannedOpError, match="binary_cross_entropy_with_logits"):
        autocastfx.convert(model, NOTHING, op_list="torch_autocast_cuda", dtype="float16")
