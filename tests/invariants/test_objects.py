"""Objects passed to forward: registered pytrees are taken apart, all others are passed on, and examples stay."""

from __future__ import annotations

import enum
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import autocastfx
from autocastfx.capture.call import CallSignature
from autocastfx.errors import UncheckedWarning, UnsupportedError, VariantError
from tests.helpers import heard, relative_error
from tests.invariants.pair import Pair, net, settings_now, snapshot


class Cache:
    """What transformers' caches are: an object that forward reads and writes."""

    def __init__(self) -> None:
        self.kept: list[Any] = []


def with_cache(m: Any, x: Tensor, cache: Any = None) -> Tensor:
    y = m.a(x)
    if cache is not None:
        cache.kept.append(y)
    return m.b(y)


class Holder(dict[str, Any]):
    """A dict that torch does not know."""


@pytest.mark.parametrize(
    "given",
    [Cache(), [1, {"k": Cache()}], SimpleNamespace(x=torch.ones(2)), Holder(x=torch.ones(2)), len, nn.ReLU(), {1, 2}],
    ids=lambda given: type(given).__name__,
)
def test_an_example_may_hold_any_object_and_stays_as_it_is(given: Any) -> None:
    plain = net(lambda m, x, given: m.b(m.a(x)))
    model, x = net(with_cache) if isinstance(given, Cache) else plain, torch.randn(2, 8)
    before, now = snapshot(model), settings_now()
    with heard() as said:
        amp_model = autocastfx.convert(model, (x, given), dtype=torch.bfloat16)
    assert any("compared with the model: other values, in training" in line for line in said)
    if isinstance(given, Cache):
        assert given.kept == []
    assert relative_error(amp_model(x, given), model.b(model.a(x))) < 4 * torch.finfo(torch.bfloat16).eps
    assert settings_now() == now
    assert snapshot(model) == before


def test_an_object_that_cannot_be_copied_is_told_of() -> None:
    model, x = net(with_cache), torch.randn(2, 8)
    given = Cache()
    given.kept.append(model.a(x))  # part of a graph
    with pytest.warns(UncheckedWarning, match="an argument cannot be copied: Only Tensors created explicitly"):
        autocastfx.convert(model, (x, given), dtype=torch.bfloat16)


def test_weights_that_are_stored_low_take_no_objects() -> None:
    with pytest.raises(UnsupportedError, match=r"args\[1\] is an object of class Cache, which a graph cannot hold"):
        autocastfx.convert(net(with_cache), (torch.randn(2, 8), Cache()), dtype=torch.bfloat16, weights="low")


def test_a_later_call_may_bring_an_object_and_changes_it_as_the_model_does() -> None:
    model, x = net(with_cache), torch.randn(2, 8)
    amp_model = autocastfx.convert(model, (x,), dtype=torch.bfloat16)
    for _ in range(2):
        cache = Cache()
        assert relative_error(amp_model(x, cache=cache), model(x)) < 4 * torch.finfo(torch.bfloat16).eps
        (kept,) = cache.kept
        assert relative_error(kept, model.a(x)) < 4 * torch.finfo(torch.bfloat16).eps
    assert len(amp_model.variants) == 2


class Color(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    "given",
    [None, True, 2, 2.5, 1j, "word", torch.float64, torch.device("cpu"), torch.strided, torch.channels_last, Color.RED],
    ids=repr,
)
def test_plain_values_are_taken(given: Any) -> None:
    def run(m: Any, x: Tensor, by: Any) -> Any:
        assert by is given or by == given
        return m.a(x)

    Pair.of(net(run), (torch.randn(2, 8), given), torch.bfloat16).agree(torch.randn(2, 8), given)


def test_the_sign_of_a_zero_is_part_of_the_call() -> None:
    def run(m: Any, x: Tensor, by: float) -> Tensor:
        return m.a(x).abs() + (1.0 if str(by) == "0.0" else 2.0)

    pair = Pair.of(net(run), (torch.randn(2, 8), 0.0), torch.bfloat16)
    pair.agree(torch.randn(2, 8), -0.0)
    pair.agree(torch.randn(2, 8), 0.0)


def test_a_number_of_thousands_of_digits_is_a_number() -> None:
    def run(m: Any, x: Tensor, by: int) -> Tensor:
        return m.a(x) * (by % 7)

    x = torch.randn(2, 8)
    amp_model = autocastfx.convert(net(run), (x, 10**5000), dtype=torch.bfloat16)
    assert torch.equal(amp_model(x, 10**5000), amp_model(x, 10**5000 % 7))
    loaded = pickle.loads(pickle.dumps(amp_model))
    with pytest.raises(VariantError, match=r"\(args=\(float32\[2d\], 4\)\), only for .*int of 16610 bits"):
        loaded(x, 4)


# -- pytrees whose constructors check what they get -------------------------------------------------------------------


@dataclass
class Checked:
    """A registered class that takes nothing but matrices."""

    left: Tensor
    right: Tensor

    def __post_init__(self) -> None:
        for held in (self.left, self.right):
            if not isinstance(held, Tensor):
                raise TypeError(f"a Checked holds tensors, no {type(held).__name__}")
            assert held.ndim == 2


@pytest.fixture
def registered() -> Iterator[None]:
    pytree.register_pytree_node(
        Checked,
        lambda c: ([c.left, c.right], None),
        lambda leaves, _: Checked(*leaves),
        serialized_type_name="tests.Checked",
    )
    yield
    pytree._deregister_pytree_node(Checked)


def doubled(m: Any, c: Checked) -> Checked:
    return Checked(m.a(c.left), m.b(c.right))


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_a_pytree_whose_constructor_checks_its_leaves(registered: None, low: torch.dtype) -> None:
    given = Checked(torch.randn(2, 8), torch.randn(3, 8))
    pair = Pair.of(net(doubled), (given,), low)
    pair.agree(given)
    pair.agree(Checked(torch.randn(5, 8), torch.randn(1, 8)))
    found = pickle.loads(pickle.dumps(pair.amp_model))(given)
    assert isinstance(found, Checked)
    call = CallSignature.of(pair.amp_model.forward).bind((given,), {})
    assert call.structure.tensor_names() == ["args_0_0", "args_0_1"]
    assert str(call.structure) == "args=(Checked(float32[2d], float32[2d]),)"


# -- transformers -----------------------------------------------------------------------------------------------------


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=11, n_positions=16, n_embd=8, n_layer=1, n_head=2)
    return transformers.GPT2LMHeadModel(config).eval()


def test_a_cache_of_transformers_is_an_example_and_is_filled_by_calls() -> None:
    model, ids = gpt2(), torch.arange(6).view(2, 3)
    caches = [pytest.importorskip("transformers").DynamicCache() for _ in range(2)]
    amp_model = autocastfx.convert(model, (ids,), {"past_key_values": caches[0]}, dtype=torch.bfloat16)
    assert caches[0].get_seq_length() == 0
    for step in range(3):
        given = ids if step == 0 else ids[:, :1]
        with torch.no_grad():
            outputs = [one(given, past_key_values=cache) for one, cache in zip((amp_model, model), caches, strict=True)]
        assert [cache.get_seq_length() for cache in caches] == [3 + step] * 2
        assert relative_error(outputs[0].logits, outputs[1].logits) < 8 * torch.finfo(torch.bfloat16).eps
    assert all(type(layer.keys) is Tensor for layer in caches[0].layers)


@dataclass
class Batch:
    x: Tensor
    factor: float = 2.0


class TakesBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, batch: Batch) -> Batch:
        return Batch(self.fc(batch.x) * batch.factor)


def test_a_dataclass_is_given_with_and_without_being_registered() -> None:
    model, batch = TakesBatch(), Batch(torch.linspace(-1, 1, 24).reshape(3, 8))
    for register in (lambda _: None, torch.export.register_dataclass):
        register(Batch)
        returned = autocastfx.convert(model, (batch,), dtype="bfloat16")(batch)
        assert isinstance(returned, Batch)
        assert torch.allclose(returned.x, model(batch).x, rtol=2e-2, atol=2e-2)
