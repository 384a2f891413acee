"""What the lists of TensorFlow, of Apex and the conservative one make of a small model."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autocastfx
from autocastfx.errors import BannedOpError
from tests.decided import decided
from tests.helpers import Function, listing, text


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.conv(x))).flatten(2).mean(-1)
        return F.softmax(F.layer_norm(self.head(x), (5,)), -1)


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.rand(2, 3, 6, 6)


def converted(preset: str, x: torch.Tensor) -> dict[str, tuple[str, str]]:
    """Precision and dtype of each op."""
    model = Small().eval()
    plan = decided(model, x, dtype=torch.bfloat16, op_list=preset, keep_output_dtype=False).plan
    return {node.op: (str(node.placement.run), node.dtype) for node in plan.nodes}


def test_tensorflow(x: torch.Tensor) -> None:
    """A mean is denied and taints nothing backwards; a norm that TensorFlow does not have stays as it was."""
    found = converted("tensorflow", x)
    low = {op for op, (run, _) in found.items() if run == "low"}
    assert {"conv2d", "linear"} <= low
    assert found["mean"][0] == found["layer_norm"][0] == found["softmax"][0] == "float32"
    assert autocastfx.load_op_list("tensorflow").placement == "simple"


def test_tensorflow_casts_by_its_rule() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (((x @ x).tanh() @ x).exp().sigmoid() @ x).log_softmax(-1)

    model = decided(function, torch.rand(4, 4), dtype=torch.float16, op_list="tensorflow")
    assert [node.op for node in model.plan.nodes if str(node.placement.run) == "float32"] == [
        "exp",
        "sigmoid",
        "log_softmax",
    ]


def test_apex(x: torch.Tensor) -> None:
    found = converted("apex_o1", x)
    assert {op: found[op] for op in ("conv2d", "batch_norm", "relu", "mean", "linear", "layer_norm", "softmax")} == {
        "conv2d": ("low", "bfloat16"),
        "batch_norm": ("given", "bfloat16"),
        "relu": ("given", "bfloat16"),
        "mean": ("given", "bfloat16"),
        "linear": ("low", "bfloat16"),
        "layer_norm": ("float32", "float32"),
        "softmax": ("float32", "float32"),
    }


def test_apex_promotes_and_keeps_python_functions_whole() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([F.normalize(x @ x), x @ x])

    model = autocastfx.convert(
        Function(function), torch.rand(4, 4), op_list="apex_o1", keep_output_dtype=False, dtype="float16", check=False
    )
    assert listing(model.graph) == text("""
        + args_0_float16: f16 = to(args_0)
        + args_0_float16_1: f16 = to(args_0)
          matmul: f16 = matmul(args_0_float16_1, args_0_float16)
        + matmul_float32: f32 = to(matmul)
          normalize: f32 = torch.nn.functional.normalize(matmul_float32)
        + args_0_float16_2: f16 = to(args_0)
        + args_0_float16_3: f16 = to(args_0)
          matmul_1: f16 = matmul(args_0_float16_3, args_0_float16_2)
        + matmul_1_float32: f32 = to(matmul_1)
          cat: f32 = cat(normalize, matmul_1_float32)
          return cat
    """)


def test_apex_bans() -> None:
    with pytest.raises(BannedOpError, match="Apex refuses it"):
        autocastfx.convert(
            Function(F.binary_cross_entropy), (torch.rand(3), torch.rand(3)), op_list="apex_o1", dtype="float16"
        )


def test_conservative(x: torch.Tensor) -> None:
    found = converted("conservative", x)
    assert {op for op, (run, _) in found.items() if run == "low"} == {"conv2d", "linear"}
    assert all(found[op] == ("float32", "float32") for op in ("batch_norm", "relu", "mean", "layer_norm", "softmax"))


def test_conservative_casts_no_view_between_products() -> None:
    between = Function(lambda x: (x @ x).t().reshape(4, 4) @ x)
    model = decided(between, torch.rand(4, 4), op_list="conservative", dtype="float16")
    assert [cast.value for cast in model.plan.casts] == ["args_0", "matmul_1"]
