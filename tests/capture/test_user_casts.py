"""Casts of the model's code keep what they mean, and numbers for operators stay inputs."""

from __future__ import annotations

import torch
from torch.nn import functional

import autocastfx
from autocastfx.graph.names import op_name
from tests.helpers import Function, relative_error

X = torch.rand(4, 4)
FOLLOWS = autocastfx.OpList.of({"placement": "follow", "unlisted": "keep", "allow": ["matmul"]})


def test_a_cast_that_follows_a_dtype_follows_it() -> None:
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        low = x @ x
        return x.to(low.dtype), x.type_as(low), torch.zeros(2, dtype=low.dtype), low.float()

    model = autocastfx.convert(Function(forward), X, op_list=FOLLOWS, keep_output_dtype=False, dtype="float16")
    assert [o.dtype for o in model(X)] == [*[torch.float16] * 3, torch.float32]


def test_what_is_read_beside_a_cast_that_changes_nothing_is_read_uncast() -> None:
    amp_model = autocastfx.convert(Function(lambda x: (x.float().exp(), x.tanh())), X, dtype="bfloat16")
    captured = amp_model.variants[0].captured
    assert captured is not None
    read = {op_name(n): n.all_input_nodes[0] for n in captured.graph.nodes if n.op == "call_function"}
    assert (read["tanh"].op, op_name(read["exp"])) == ("placeholder", "to")


def test_a_number_that_changes_is_read_by_few_graphs() -> None:
    model = Function(lambda x, scale: functional.scaled_dot_product_attention(x, x, x, scale=scale))
    amp_model = autocastfx.convert(model, dtype="bfloat16")
    for scale in (0.1, 0.2, 0.3, 0.4, 0.5):
        assert relative_error(amp_model(X[None], scale), model(X[None], scale)) < 0.01
    assert len(amp_model.variants) == 2, "from the second number on it is an input"
