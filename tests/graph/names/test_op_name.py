"""Every spelling of an op has one name."""

from __future__ import annotations

import functools
import operator
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from autocastfx.graph.names import base_name, canonical, located, of_function, op_name

aten = torch.ops.aten

SPELLINGS: dict[str, list[Any]] = {
    "add": [
        aten.add.Tensor,
        aten.add.Scalar,
        aten.add,
        torch.add,
        torch.Tensor.add,
        operator.add,
        torch.Tensor.__add__,
    ],
    "add_": [aten.add_.Tensor, torch.Tensor.add_, torch.Tensor.__iadd__, operator.iadd],
    "sub": [aten.sub.Tensor, torch.sub, operator.sub],
    "mul": [aten.mul.Tensor, torch.mul, torch.Tensor.mul, operator.mul],
    "mul_": [aten.mul_.Tensor, operator.imul],
    "div": [aten.div.Tensor, torch.div, operator.truediv],
    "div_": [operator.itruediv],
    "pow": [aten.pow.Tensor_Scalar, torch.pow, operator.pow],
    "pow_": [aten.pow_.Scalar, operator.ipow],
    "floor_divide": [torch.floor_divide, operator.floordiv],
    "remainder": [torch.remainder, operator.mod],
    "neg": [torch.neg, torch.Tensor.neg, operator.neg],
    "matmul": [aten.matmul.default, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, operator.matmul],
    "getitem": [operator.getitem, torch.Tensor.__getitem__],
    "setitem": [operator.setitem, torch.Tensor.__setitem__],
    "eq": [aten.eq.Tensor, torch.eq, operator.eq],
    "bitwise_and": [torch.bitwise_and, operator.and_],
    "relu": [aten.relu.default, torch.relu, F.relu, torch.Tensor.relu],
    "relu_": [aten.relu_.default, torch.relu_, F.relu_, torch.Tensor.relu_],
    "linear": [aten.linear.default, F.linear, torch._C._nn.linear],
    "conv2d": [aten.conv2d.default, aten.conv2d.padding, torch.conv2d, F.conv2d],
    "gelu": [aten.gelu.default, F.gelu],
    "silu": [F.silu],
    "softmax": [aten.softmax.int, torch.softmax, F.softmax, torch.Tensor.softmax],
    "layer_norm": [aten.layer_norm.default, torch.layer_norm, F.layer_norm],
    "batch_norm": [aten.batch_norm.default, torch.batch_norm, F.batch_norm],
    "dropout": [aten.dropout.default, torch.dropout, F.dropout],
    "max_pool2d": [aten.max_pool2d.default, F.max_pool2d],
    "scaled_dot_product_attention": [F.scaled_dot_product_attention],
    "linalg_norm": [torch.linalg.norm],
    "fft_rfft": [torch.fft.rfft],
    "special_expit": [torch.special.expit],
    "split": [torch.split, torch.Tensor.split],
    "norm": [torch.norm, torch.Tensor.norm],
    "einsum": [torch.einsum],
    "lstm": [aten.lstm.input, torch.lstm],
}
CASES = [
    pytest.param(spelling, name, id=f"{name}-{i}")
    for name, all_ in SPELLINGS.items()
    for i, spelling in enumerate(all_)
]


@pytest.mark.parametrize(("function", "name"), CASES)
def test_one_name_for_all_spellings(function: Callable[..., Any], name: str) -> None:
    assert of_function(function) == name


def plain(x: torch.Tensor) -> torch.Tensor:
    return x


@functools.wraps(plain)
def wrapped(*args: torch.Tensor) -> torch.Tensor:
    return plain(*args)


def relu(x: torch.Tensor) -> torch.Tensor:
    """Called as an ATen op is, but somebody else's."""
    return x


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Block(nn.Module):
    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    @staticmethod
    def helper(x: torch.Tensor) -> torch.Tensor:
        return x


def test_functions_that_are_no_torch_operators_have_their_dotted_path() -> None:
    assert of_function(plain) == f"{__name__}.plain"
    assert of_function(wrapped) == f"{__name__}.plain"
    assert of_function(relu) == f"{__name__}.relu"
    assert of_function(Straight.apply) == f"{__name__}.Straight"
    assert of_function(Block.helper) == f"{__name__}.Block.helper"
    assert of_function(F.cross_entropy) == "torch.nn.functional.cross_entropy"
    assert of_function(torch.sym_max) == "torch.sym_max"
    assert of_function(len) == "builtins.len"
    # lists know these too, and aten has operators of their names
    assert of_function(operator.index) == "_operator.index"
    assert of_function(operator.concat) == "_operator.concat"


def test_custom_operators_have_their_namespace() -> None:
    with torch.library._scoped_library("autocastfx_test", "FRAGMENT") as library:
        library.define("scale(Tensor x, float by) -> Tensor")
        library.define("scale_(Tensor(a!) x, float by) -> Tensor(a!)")
        library.define("relu.out(Tensor x) -> Tensor")
        ops = torch.ops.autocastfx_test
        assert of_function(ops.scale.default) == of_function(ops.scale) == "autocastfx_test::scale"
        assert of_function(ops.relu.out) == "autocastfx_test::relu"
        assert base_name(of_function(ops.scale_.default)) == "autocastfx_test::scale"


def test_the_path_of_an_operator_is_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.library._scoped_library("autocastfx_test", "FRAGMENT") as library:
        library.define("scale(Tensor x, float by) -> Tensor")
        custom = torch.library.custom_op("autocastfx_test::custom", plain, mutates_args=())
        packet = torch.ops.autocastfx_test.scale
        for target, name in ((custom, "custom"), (packet, "scale"), (packet.default, "scale")):
            monkeypatch.setattr(sys.modules[__name__], "wrapped", target)
            assert canonical(f"{__name__}.wrapped") == f"autocastfx_test::{name}"


def test_higher_order_operators() -> None:
    assert of_function(torch.ops.higher_order.cond) == "cond"
    assert of_function(torch.ops.higher_order.wrap_with_set_grad_enabled) == "wrap_with_set_grad_enabled"


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block.Inner()
        self.linear = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(self.block(x)) * self.scale
        return F.relu(y).add_(1).view(-1) + torch.matmul(y, y).flatten()


def test_nodes_of_a_symbolic_trace() -> None:
    module = Everything()

    class Tracer(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return True

    graph = Tracer().trace(module)
    assert [op_name(node) for node in graph.nodes] == [
        "placeholder",
        "call_module",
        "call_module",
        "get_attr",
        "mul",
        "relu",
        "add_",
        "view",
        "matmul",
        "flatten",
        "add",
        "output",
    ]


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("add_", "add"),
        ("add", "add"),
        ("index_put_", "index_put"),
        ("my_lib::op_", "my_lib::op"),
        ("__and__", "__and__"),
        ("_softmax", "_softmax"),
        ("_", "_"),
        ("", ""),
    ],
)
def test_base_name(name: str, base: str) -> None:
    assert base_name(name) == base
    assert base_name(base) == base


def test_located_reads_loaded_modules_and_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.ModuleType("autocastfx_fake")

    def lazy(name: str) -> Any:
        raise AssertionError(f"{name} was imported")

    package.__dict__.update(function=plain, Block=Block, __getattr__=lazy)
    monkeypatch.setitem(sys.modules, "autocastfx_fake", package)
    assert located("autocastfx_fake") is package
    assert located("autocastfx_fake.function") is plain
    assert located("autocastfx_fake.Block.helper") is Block.helper
    assert located("autocastfx_fake.missing") is None
    assert located("autocastfx_fake.missing.deeper") is None
    assert located("autocastfx_nowhere.function") is None
    assert located("torch.nn.functional.relu") is F.relu


def test_canonical(monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.ModuleType("autocastfx_fake")
    package.__dict__.update(function=plain, Block=Block, Straight=Straight, number=3, partial=functools.partial(plain))
    monkeypatch.setitem(sys.modules, "autocastfx_fake", package)
    assert canonical("autocastfx_fake.function") == f"{__name__}.plain"
    assert canonical("autocastfx_fake.Block") == f"{__name__}.Block"
    assert canonical("autocastfx_fake.Block.Inner") == f"{__name__}.Block.Inner"
    assert canonical("autocastfx_fake.Straight") == of_function(Straight.apply)
    for path in ("autocastfx_fake.number", "autocastfx_fake.partial", "autocastfx_fake.later", "not_loaded.function"):
        assert canonical(path) == path
    assert canonical("torch.nn.LayerNorm") == "torch.nn.modules.normalization.LayerNorm"
    assert canonical("torch.Tensor.add") == "add"
