"""weights="low": a model for inference alone whose weights are stored in 16 bits."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from autocastfx import AmpModule
from autocastfx.errors import BannedOpError, UnsupportedError, VariantError
from benchmarks.models.tiny import CNN, EncoderLayer

LOW = torch.bfloat16
ADVICE = re.escape('Convert with weights="cast" or weights="cached" to train, or for gradients.')


class Encoder(nn.Module):
    """A table, layers, two linears that share their weight, and a parameter that nothing reads."""

    def __init__(self, width: int = 16, layers: int = 1) -> None:
        super().__init__()
        self.table = nn.Embedding(11, width)
        self.layers = nn.ModuleList(EncoderLayer(width) for _ in range(layers))
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.second.weight = self.first.weight
        self.unread = nn.Parameter(torch.ones(3))

    def forward(self, tokens: Tensor, scale: float = 1.0) -> Tensor:
        hidden = self.table(tokens)
        for layer in self.layers:
            hidden = layer(hidden, torch.zeros(1))
        return self.second(self.first(hidden)) * scale


TOKENS = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])
KINDS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "encoder": (Encoder, TOKENS),
    "cnn": (CNN, torch.randn(2, 3, 8, 8)),
}


def made(kind: Callable[[], nn.Module] = Encoder) -> nn.Module:
    torch.manual_seed(0)
    return kind().train()


@functools.cache
def converted() -> AmpModule:
    return autocastfx.convert(made(), (TOKENS,), dtype=LOW, weights="low")


@pytest.fixture
def amp_model() -> AmpModule:
    return copy.deepcopy(converted())


@pytest.mark.parametrize("op_list", ["default", "torch_autocast_cpu", "tensorflow"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_gives_what_casts_give_to_the_bit(kind: str, op_list: str) -> None:
    make, x = KINDS[kind]
    cast = autocastfx.convert(made(make).eval(), (x,), dtype=LOW, op_list=op_list)
    model = made(make)
    low = autocastfx.convert(model, (x,), dtype=LOW, op_list=op_list, weights="low")
    assert model.training
    assert not low.training
    with torch.no_grad():
        assert torch.equal(low(x), cast(x))
        assert torch.equal(low(x[:1]), cast(x[:1]))
    assert list(low.state_dict()) == list(cast.state_dict())
    assert {c.value for c in low.plan.casts}.isdisjoint({n.replace(".", "_") for n, _ in model.named_parameters()})


def test_what_is_read_low_is_stored_low_and_nothing_else(amp_model: AmpModule) -> None:
    stored = {name: p.dtype for name, p in amp_model.named_parameters()}
    wide = {name for name, dtype in stored.items() if dtype == torch.float32}
    norms = {f"layers.0.norm{i}.{p}" for i in (1, 2) for p in ("weight", "bias")}
    assert wide == {"table.weight", "unread", *norms}
    assert {stored[name] for name in stored.keys() - wide} == {LOW}
    assert amp_model.first.weight is amp_model.second.weight
    assert not any(p.requires_grad for p in amp_model.parameters())
    rows = [line.split() for line in autocastfx.dump(amp_model, full=True).splitlines() if " parameter " in line]
    shown = {row[2]: row[3] for row in rows}
    assert (shown["layers.0.qkv.weight"], shown["layers.0.norm1.weight"]) == ("bfloat16", "float32")


class Mixed(nn.Module):
    """A weight that a softmax reads in float32 under its other name."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) @ torch.softmax(self.b.weight, -1)


def test_what_is_read_in_float32_too_stays_so_under_all_its_names() -> None:
    x = torch.randn(2, 8)
    cast = autocastfx.convert(made(Mixed).eval(), (x,), dtype=LOW)
    low = autocastfx.convert(made(Mixed), (x,), dtype=LOW, weights="low")
    assert low.a.weight is low.b.weight
    assert low.a.weight.dtype == torch.float32
    assert torch.equal(low(x), cast(x).detach())
    assert low.plan.casts == cast.plan.casts
    assert low.plan.traffic == cast.plan.traffic


class Rotated(nn.Module):
    """A product of a buffer and a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))
        self.register_buffer("turn", torch.rand(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.turn @ self.weight


def test_a_buffer_stays_as_it_is_and_is_cast() -> None:
    x = torch.randn(2, 8)
    low = autocastfx.convert(made(Rotated), (x,), dtype=LOW, weights="low")
    assert (low.turn.dtype, low.weight.dtype) == (torch.float32, LOW)
    assert [c.value for c in low.plan.casts] == ["x", "turn", "matmul_1"]
    turn = low.turn.to(LOW)
    assert torch.equal(low(x), (x.to(LOW) @ turn @ low.weight).float())


def nbytes(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


def test_memory_halves_when_the_original_is_dropped() -> None:
    model = Encoder(64, 4)
    before, norms_and_table = nbytes(model), 4 * (4 * 4 * 64 + 11 * 64 + 3)
    masters = [weakref.ref(t) for t in (model, *model.parameters(), *model.buffers())]
    amp_model = autocastfx.convert(model, (TOKENS,), dtype=LOW, weights="low")
    assert nbytes(amp_model) == (before - norms_and_table) / 2 + norms_and_table < 0.52 * before
    del model
    gc.collect()
    assert [m() for m in masters if m() is not None] == []
    assert amp_model(TOKENS).shape == (2, 5, 64)


def test_the_original_stays_as_it_was_and_shares_nothing() -> None:
    model = made()
    before, parameters = copy.deepcopy(model.state_dict()), list(model.parameters())
    amp_model = autocastfx.convert(model, (TOKENS,), dtype=LOW, weights="low")
    expected = amp_model(TOKENS)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), before.values(), strict=True))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert torch.equal(amp_model(TOKENS), expected)


def test_a_float32_checkpoint_is_rounded(amp_model: AmpModule) -> None:
    torch.manual_seed(5)
    other = Encoder()
    amp_model.load_state_dict(other.state_dict())
    cast = autocastfx.convert(other.eval(), (TOKENS,), dtype=LOW)
    assert amp_model.first.weight.dtype == LOW
    assert torch.equal(amp_model(TOKENS), cast(TOKENS).detach())


def _saved(amp_model: AmpModule) -> AmpModule:
    file = io.BytesIO()
    torch.save(amp_model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _pickled(amp_model: AmpModule) -> AmpModule:
    return pickle.loads(pickle.dumps(amp_model))


@pytest.mark.parametrize("twin_of", [copy.deepcopy, _pickled, _saved], ids=["copy", "pickle", "save"])
def test_a_twin_is_low_too(twin_of: Callable[[AmpModule], AmpModule], amp_model: AmpModule) -> None:
    twin = twin_of(amp_model)
    assert torch.equal(twin(TOKENS), amp_model(TOKENS))
    assert twin.first.weight is twin.second.weight
    assert [p.dtype for p in twin.parameters()] == [p.dtype for p in amp_model.parameters()]
    with pytest.raises(UnsupportedError, match=ADVICE):
        twin.train()
    with pytest.raises(VariantError):
        twin(TOKENS, 2.0)


def test_it_moves_but_keeps_its_dtypes(amp_model: AmpModule) -> None:
    for change in (amp_model.half, amp_model.float, amp_model.bfloat16):
        with pytest.raises(UnsupportedError, match="keep the dtypes that they are stored in"):
            change()
    amp_model.to("meta")
    assert amp_model(TOKENS.to("meta")).device.type == "meta"
    assert amp_model.first.weight.dtype == LOW


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_and_exported_it_reads_low_weights(backend: str, amp_model: AmpModule) -> None:
    compiled = torch.compile(amp_model, backend=backend, fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(TOKENS), amp_model(TOKENS))
    program = torch.export.export(amp_model, (TOKENS,), strict=False)
    assert torch.equal(program.module()(TOKENS), amp_model(TOKENS))
    assert program.state_dict["first.weight"].dtype == LOW


# -- what is refused --------------------------------------------------------------------------------------------------


def test_training_is_refused(amp_model: AmpModule) -> None:
    for refused in (amp_model.train, amp_model.requires_grad_):
        with pytest.raises(UnsupportedError, match=f"keeps no float32 weights.*{ADVICE}"):
            refused()
    assert amp_model.eval() is amp_model
    assert amp_model.requires_grad_(False) is amp_model


def test_a_gradient_is_refused(amp_model: AmpModule) -> None:
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    low = autocastfx.convert(made(CNN), (x.detach(),), dtype=LOW, weights="low")
    with pytest.raises(UnsupportedError, match=f"is for inference: an input or a parameter.*{ADVICE}"):
        low(x)
    with torch.no_grad():
        low(x)
    amp_model.first.weight.requires_grad_()
    with pytest.raises(UnsupportedError, match="is for inference"):
        amp_model(TOKENS)


def test_example_inputs_are_needed() -> None:
    with pytest.raises(UnsupportedError, match="give convert the inputs of one call as example_inputs"):
        autocastfx.convert(made(), dtype=LOW, weights="low")


@pytest.mark.parametrize("is_made_so", [True, False], ids=["made", "given"])
def test_tensors_made_in_inference_mode_are_taken(is_made_so: bool) -> None:
    """Autograd takes none, and nothing is to be recorded."""
    with torch.inference_mode():
        x, model = torch.randn(2, 3, 8, 8), made(CNN)
    model = model if is_made_so else made(CNN)
    low = autocastfx.convert(model, (x,), dtype=LOW, weights="low")
    with torch.no_grad():
        assert torch.equal(low(x), autocastfx.convert(model.eval(), (x,), dtype=LOW)(x))


def test_another_call_is_refused(amp_model: AmpModule) -> None:
    advice = re.escape('weights="low" keeps no original: convert it again, in evaluation, with the inputs of this call')
    with pytest.raises(VariantError, match=f"takes the call .*not .*{advice}"):
        amp_model(TOKENS, 2.0)


def test_a_banned_op_leaves_the_original_whole(tmp_path: Any) -> None:
    path = tmp_path / "ban.yaml"
    path.write_text("extends: bfloat16\nban: [linear]\n")
    model = made()
    with pytest.raises(BannedOpError):
        autocastfx.convert(model, (TOKENS,), dtype=LOW, op_list=path, weights="low")
    assert model.training
    assert all(p.requires_grad and p.dtype == torch.float32 for p in model.parameters())
