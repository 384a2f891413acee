"""Arguments that a list leaves in float32: kernels that take them so, and those that do not, which are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autocastfx
from autocastfx.errors import OpListError
from autocastfx.graph.node import dtypes

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    def __init__(self, body: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.square, self.row = body, nn.Parameter(torch.eye(16)), nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x, self.square, self.row)


def convert(path: Path, text: str, body: Callable[[Tensor, Tensor, Tensor], Tensor]) -> autocastfx.AmpModule:
    path.write_text(f"extends: bfloat16\nkeep_args:\n  {text}\n")
    return autocastfx.convert(Model(body), (X,), dtype=torch.bfloat16, op_list=path)


REFUSED: dict[str, tuple[str, str, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "weight": ("linear: [weight]", "its kernel does not take that .*same dtype", lambda x, a, b: F.linear(x, a, b)),
    "abstract values take it": ("matmul: other", "its kernel does not take that .*same dtype", lambda x, a, b: x @ a),
    "only operand": ("gelu: [self]", "it then gives float32", lambda x, a, b: F.gelu(x @ a) @ a),
    "size of data": ("linear: bias", "it then gives float32", lambda x, a, b: F.linear(x[x[:, 0] > 0], a, b).sum()),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_kernel_takes_is_an_error_of_the_list(case: str, tmp_path: Path) -> None:
    text, why, body = REFUSED[case]
    op, _, argument = text.replace("[", "").replace("]", "").partition(": ")
    place = rf"list.yaml:3:3: {op} cannot run in bfloat16 with '{argument}' in float32, as node '{op}' would"
    way_out = rf"Take this out of 'keep_args', or let the op run in float32: 'deny: \[{op}\]'"
    before = torch.get_rng_state()
    with pytest.raises(OpListError, match=f"{place}: {why}.* {way_out}"):
        convert(tmp_path / "list.yaml", text, body)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_a_kernel_takes_is_left_in_float32(tmp_path: Path) -> None:
    amp_model = convert(tmp_path / "list.yaml", "scaled_dot_product_attention: [attn_mask]", _attention)
    (node,) = (n for n in amp_model.graph.nodes if n.name == "scaled_dot_product_attention")
    assert [dtypes(read) for read in node.all_input_nodes] == [(torch.bfloat16,), (torch.float32,)]
    torch.testing.assert_close(amp_model(X), _attention(X, torch.eye(16), torch.ones(16)), rtol=0.02, atol=0.02)


def _attention(x: Tensor, square: Tensor, row: Tensor) -> Tensor:
    rows = (x @ square)[None, None]
    return F.scaled_dot_product_attention(rows, rows, rows, attn_mask=square[:4, :4])
