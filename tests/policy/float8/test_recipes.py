"""A recipe of float8 is a value: one that no code names is obeyed by all that reads it."""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import nn

import autocastfx
from autocastfx import AmpModule, OpList
from autocastfx.errors import ArgumentError, UnsupportedError, VerifyError
from autocastfx.numerics.check import allowance
from autocastfx.numerics.float8_search import product_of
from autocastfx.policy.float8 import E4M3, E5M2, RECIPES, Product
from autocastfx.report.lint.roofline import find_gpu
from autocastfx.runtime.operators import float8
from autocastfx.runtime.operators.float8 import missing_products, quantize

X = torch.randn(16, 96, generator=torch.Generator().manual_seed(0))


def plant(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
    """Add a recipe ``spare``: ``rowwise``, but for these fields."""
    known = cast("MutableMapping[str, object]", RECIPES)
    monkeypatch.setitem(known, "spare", replace(RECIPES["rowwise"], name="spare", **fields))


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(96, 144), nn.GELU(), nn.Linear(144, 112))


def converted(*, modules: list[dict[str, Any]] | None = None, device: str | None = None, **keys: Any) -> AmpModule:
    entry = {"ops": ["linear"], "recipe": "spare", **keys}
    lists = OpList.of({"extends": "bfloat16", "float8": [entry], "modules": modules or []})
    return autocastfx.convert(model(), X, dtype="bfloat16", op_list=lists, device=device)


def planned(amp_model: AmpModule) -> list[str]:
    return [str(node.float8) for node in amp_model.plan.nodes if node.float8 is not None]


def test_sizes_are_its_multiples(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, multiple=48)
    amp_model = converted()
    assert planned(amp_model) == ["spare", "no float8: N is 112, no multiple of 48"]
    assert "\nfloat8 takes multiples of 48; pad N of linear_1 from 112 to 144\n" in str(
        autocastfx.lint(amp_model, "H100")
    )
    measured = autocastfx.sensitivity(
        model(), [X], lambda output, _: output.square().mean(), dtype="bfloat16", float8="spare", progress=False
    )
    assert [effect.op for effect in measured.effects if effect.products] == ["linear"]
    mixed = autocastfx.lint(converted(modules=[{"path": "0", "float8": {"recipe": "rowwise"}}]), "H100")
    assert mixed.out_of_float8 == (("linear_1", "N", 112, 48),)


def test_numbers_are_in_its_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, numbers=E5M2, gradient=E4M3)
    amp_model = converted()
    made = [node for node in amp_model.graph.nodes if node.target is quantize]
    assert {node.args[2] for node in made} == {E5M2}
    result = amp_model(X).sum()
    seen: list[torch.dtype] = []
    plain = float8.quantize
    monkeypatch.setattr(float8, "quantize", lambda *args: seen.append(args[2]) or plain(*args))
    result.backward()
    assert set(seen) == {E4M3}, "only gradients are quantised in backward"
    coarse = allowance([amp_model.plan], None)
    assert coarse is not None
    assert coarse.outputs == 2 * coarse.gradients, "e5m2 has one digit less"


def test_a_gpu_is_served_from_its_capability_on(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, capability=(12, 1))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    device = torch.device("cuda")
    assert missing_products(device, "spare") == "H100 has compute capability 9.0, below 12.1"
    assert missing_products(device) == missing_products(device, "rowwise") == ""


NEEDS = r"needs float8 products, and cuda has none: this package calls none by the recipe spare\. Leave float8 out"
OTHERS: dict[str, tuple[dict[str, Any], list[dict[str, Any]], str]] = {
    "rule": ({}, [], r"OpList:float8\[0\]\.ops\[0\]: 'float8 of linear' " + NEEDS),
    "off, and on in a module": (
        {"products": []},
        [{"path": "0", "float8": {"products": ["output"]}}],
        r"OpList:modules\[0\]: 'linear' " + NEEDS,
    ),
    "emulated, and not in a module": (
        {"emulate": True},
        [{"path": "2", "float8": {"emulate": False}}],
        r"OpList:modules\[0\]: 'linear_1' " + NEEDS,
    ),
}


@pytest.mark.parametrize(("keys", "modules", "said"), OTHERS.values(), ids=list(OTHERS))
def test_without_kernels_other_devices_are_refused(
    keys: dict[str, Any], modules: list[dict[str, Any]], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, capability=None)
    with pytest.raises(UnsupportedError, match=said):
        converted(**keys, modules=modules, device="cuda")
    assert planned(converted(emulate=True, device="cuda")) == ["spare, emulated"] * 2
    mixed = [{"path": "2", "float8": {"recipe": "spare", "emulate": True}}]
    assert planned(converted(recipe="rowwise", modules=mixed, device="cuda")) == ["rowwise", "spare, emulated"]


def test_without_kernels_products_are_in_float32_and_save_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, capability=None)
    amp_model = converted()
    expected = amp_model(X)
    monkeypatch.setattr(float8, "has_fast_products", lambda _: True)

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a kernel is called")

    monkeypatch.setattr(float8, "_scaled_mm", never)
    assert torch.equal(amp_model(X), expected)
    with pytest.raises(VerifyError, match="a kernel is called"):
        converted(recipe="rowwise")
    monkeypatch.undo()
    plant(monkeypatch, capability=None)
    found = autocastfx.lint(amp_model, "H100")
    assert not any(op.in_float8 for op in found.ops)
    assert any(op.in_float8 for op in autocastfx.lint(converted(recipe="rowwise"), "H100").ops)
    spare, rowwise = (
        product_of(one.plan.nodes[0], Product.OUTPUT, 0.1, (4096, 4096, 4096), None, find_gpu("H100"))
        for one in (amp_model, converted(recipe="rowwise"))
    )
    assert spare.gain == 0 < rowwise.gain
    with pytest.raises(ArgumentError, match=re.escape("by spare, so it saves no time: give a share")):
        autocastfx.tune(model(), [X, X], lambda output, _: output.sum(), dtype="bfloat16", float8="spare")
