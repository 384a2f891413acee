"""The caller's module, lists and settings unmodified."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import autocastfx
from tests.invariants.pair import Busy, net, settings_now, snapshot

pytestmark = [
    pytest.mark.filterwarnings("ignore:float16 convolutions on a CPU"),
    pytest.mark.filterwarnings("ignore::autocastfx.errors.StateWarning"),  # of a model that changes whatever it can
]


CONTEXTS: dict[str, Callable[[], Any]] = {
    "plain": torch.enable_grad,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference_mode": torch.inference_mode,
}


@pytest.mark.parametrize("context", CONTEXTS)
def test_the_callers_module_and_settings_are_unmodified(context: str) -> None:
    model, x = Busy(), torch.randn(3, 8)
    model.a.weight.grad = torch.ones(8, 8)
    with CONTEXTS[context]():
        before, now = snapshot(model), settings_now()
        autocastfx.convert(model, (x,), dtype="float16")
        assert settings_now() == now
    assert snapshot(model) == before
    assert x._version == 0
    assert x.grad is None
    assert not x.requires_grad


def test_a_further_capture_leaves_the_callers_module_unmodified() -> None:
    model = Busy()
    amp_model = autocastfx.convert(model, (torch.randn(3, 8),), dtype="float16")
    before, now, captured = snapshot(model), settings_now(), len(amp_model.variants)
    amp_model._capture_first((torch.randn(5, 8),), {})
    assert len(amp_model.variants) == captured + 1
    assert settings_now() == now
    assert snapshot(model) == before


def test_a_default_dtype_is_left_and_has_no_say() -> None:
    model, x = net(lambda m, x: m.b(m.a(x).tanh())), torch.randn(3, 8)
    usual = autocastfx.convert(model, (x,), dtype="float16")
    torch.set_default_dtype(torch.float64)
    try:
        other = autocastfx.convert(model, (x,), dtype="float16")
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert other.code == usual.code


def test_lists_and_examples_are_unmodified(tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    path.write_text("deny: [linear]\n")
    lists: list[Any] = ["default", path, autocastfx.load_op_list("bfloat16")]
    kept_lists, kept_rules, text = list(lists), dict(lists[2].rules), path.read_text()
    kwargs = {"scale": 2.0, "more": {"z": torch.ones(8)}}
    inner = kwargs["more"]
    model = net(lambda m, x, scale, more: m.a(x) * scale + more["z"])
    autocastfx.convert(model, (torch.randn(3, 8),), kwargs, op_list=lists, dtype="float16")
    assert lists == kept_lists
    assert dict(lists[2].rules) == kept_rules
    assert path.read_text() == text
    assert list(kwargs) == ["scale", "more"]
    assert kwargs["more"] is inner
    assert torch.equal(kwargs["more"]["z"], torch.ones(8))


def test_the_original_still_runs_in_float32() -> None:
    model, x = net(lambda m, x: m.b(m.a(x).tanh())), torch.randn(3, 8)
    expected = model(x)
    amp_model = autocastfx.convert(model, (x,), dtype="float16")
    amp_model.half_written = True  # attributes are the converted model's own
    assert torch.equal(model(x), expected)
    assert not hasattr(model, "half_written")
