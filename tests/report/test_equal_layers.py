"""Layers that a text dump leaves out, for they are equal to one above."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import autocastfx
from autocastfx.report.dump import view_of
from tests.report.html.test_page_view import Block, Tower
from tests.report.shown import as_written

FOLDED = re.compile(r"^  … layers? .*", re.MULTILINE)


def table(text: str) -> list[str]:
    """The lines of the table of a dump."""
    return text.split("\n\n")[1].splitlines()


def test_the_first_of_equal_layers_stands_for_all() -> None:
    amp_model = as_written(Tower().eval(), torch.ones(4, 8))
    text = autocastfx.dump(amp_model)
    assert FOLDED.findall(text) == [
        "  … layers layers.2-3 as layers.1: 5 lines each, with the same dtypes and reasons",
        "  … layer layers.6 as layers.5: 5 lines, with the same dtypes and reasons",
    ]
    shown = [row.name for row in view_of(amp_model).rows if row.kind == "op"]
    left_out = [name for name in shown if not re.search(rf"^  {name} ", text, re.MULTILINE)]
    modules = {amp_model.plan[name].module.split(".")[1] for name in left_out}
    assert modules == {"2", "3", "6"}
    assert len(left_out) == 3 * 5
    reasons = [str(amp_model.plan[name].placement.because) for name in ("add", "add_1")]
    assert reasons == ["an input is float32", "after layer_norm"], "so the first layer is not equal"


def test_full_only_and_module_leave_nothing_out() -> None:
    amp_model = as_written(Tower().eval(), torch.ones(4, 8))
    for options in ({"full": True}, {"only": "low"}, {"module": "layers.2"}):
        assert not FOLDED.search(autocastfx.dump(amp_model, **options))
    assert "relu_2" in autocastfx.dump(amp_model, module="layers.2")


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"modules": [{"path": "layers.1", "category": "float32", "ops": ["linear"]}]}, ["layer layers.3 as layers.2"]),
        # the same precision for another reason is not the same
        ({"modules": [{"path": "layers.1", "category": "float32", "ops": ["layer_norm"]}]}, ["layer layers.3 as"]),
    ],
)
def test_another_dtype_or_reason_is_shown(rules: dict[str, object], said: list[str]) -> None:
    mine = autocastfx.OpList.of(rules, name="mine")
    amp_model = autocastfx.convert(
        Tower().eval(), (torch.ones(4, 8),), dtype="float16", op_list=["default", mine], check=False
    )
    found = FOLDED.findall(autocastfx.dump(amp_model))
    assert not any("layers.1-" in line or "layer layers.1 " in line for line in found)
    assert all(any(words in line for line in found) for words in said)


class Scaled(nn.Module):
    """Layers that differ in a number alone."""

    def __init__(self, power: float) -> None:
        super().__init__()
        self.power, self.up = power, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.up(x) * self.power) + x


class Crossed(nn.Module):
    """The second layer reads its inputs in another order than the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Two(), Two()])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first = self.layers[0](x, y, x)
        return first + self.layers[1](x, y, y)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.up(x)) - torch.relu(y) * z


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (nn.Sequential(Scaled(2.0), Scaled(3.0)), (torch.ones(2, 8),)),
        (Crossed(), (torch.ones(2, 8), torch.ones(2, 8))),
    ],
)
def test_other_numbers_and_other_ways_to_read_are_shown(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    assert not FOLDED.search(autocastfx.dump(autocastfx.convert(model.eval(), inputs, dtype="bfloat16", check=False)))


class Nested(nn.Module):
    """Equal stages, each of equal blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([nn.Sequential(*(Block() for _ in range(3))) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


def test_layers_inside_layers_are_left_out_as_well() -> None:
    found = FOLDED.findall(autocastfx.dump(as_written(Nested().eval(), torch.ones(4, 8))))
    assert any("stages.0.2" in line or "stages.0.1-2" in line for line in found)


class Frozen(nn.Module):
    """A layer that captures as a sub-graph of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = self.block(x)
        return x + y


def test_the_lines_of_a_sub_graph_go_with_its_layer() -> None:
    amp_model = autocastfx.convert(
        nn.Sequential(*(Frozen() for _ in range(3))), (torch.ones(4, 8),), dtype="bfloat16", check=False
    )
    lines = table(autocastfx.dump(amp_model))
    assert any(line.startswith("  … layers 1-2 as 0: ") for line in lines)
    inside = [line for line in lines if re.match(r" +submod_\w*/", line.replace("*", " "))]
    assert len({line.split("/")[0].strip() for line in inside}) == 1, "of the first layer alone"


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_the_number_of_a_layer_is_never_shortened(width: int) -> None:
    class Long(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder_with_a_long_name = nn.ModuleList([Tower() for _ in range(2)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.encoder_with_a_long_name[1](self.encoder_with_a_long_name[0](x))

    amp_model = as_written(Long().eval(), torch.ones(4, 8))
    lines = {line.split()[0]: line for line in table(autocastfx.dump(amp_model, width=width)) if line.strip()}
    for node in amp_model.plan.nodes:
        if node.name in lines:
            numbers = [part for part in node.module.split(".") if part.isdecimal()]
            assert all(re.search(rf"[ .]{number}[ .]", lines[node.name]) for number in numbers), lines[node.name]
