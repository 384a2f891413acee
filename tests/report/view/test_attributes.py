"""Arguments of ops that are no values."""

from __future__ import annotations

import torch
from torch import nn

import autocastfx
from autocastfx.report.dump import view_of
from tests.golden.models import converted
from tests.report.shown import with_symbols


def attributes(amp_model: autocastfx.AmpModule) -> dict[str, dict[str, str]]:
    return {row.name: dict(row.attributes) for row in view_of(amp_model).rows}


def test_numbers_lists_and_dtypes_are_written_with_their_names() -> None:
    found = attributes(converted("encoder_layer"))
    assert found["softmax"] == {"dim": "-1"}
    assert found["layer_norm"] == {"normalized_shape": "[16]"}, "what the op takes by default is left out"
    other = attributes(autocastfx.convert(nn.LayerNorm(8, eps=1e-3), (torch.ones(2, 8),), dtype="float16"))
    assert other["layer_norm"] == {"normalized_shape": "[8]", "eps": "0.001"}
    assert found["getitem_1"] == {"argument 1": "1"}
    assert found["x"] == found["qkv_weight"] == found["add_2"] == {}
    assert "dtype" in attributes(converted("no_grad"))["to"]
    assert attributes(converted("no_grad"))["to"]["dtype"] == "float32"


class Views(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], 2, -1) + torch.tensor([1.0]) @ torch.ones(1, 1)


def test_a_size_that_is_computed_has_the_name_of_its_node() -> None:
    found = attributes(with_symbols(Views(), (torch.ones(3, 8),), (torch.ones(4, 8),), "float16"))
    (size,) = [name for name in found if name.startswith("sym_size")]
    assert found["view"] == {"size": f"[{size}, 2, -1]"}


class Far(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view([1] * 60 + [8])


def test_what_is_long_is_cut() -> None:
    said = attributes(autocastfx.convert(Far(), (torch.ones(8),), dtype="float16"))["view"]["size"]
    assert len(said) == 80
    assert said.endswith("…")


def test_lists_of_values_are_left_out() -> None:
    class Joins(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, x], dim=1)

    assert attributes(autocastfx.convert(Joins(), (torch.ones(2, 8),), dtype="float16"))["cat"] == {"dim": "1"}
