"""The lists of torch.autocast's presets are torch's own registrations, overload by overload."""

from __future__ import annotations

import pytest
import torch
from torch import fx

import autocastfx
from autocastfx import OpList
from autocastfx.policy.match import Matcher
from autocastfx.policy.rule import Category
from tests.helpers import with_pinned_torch

KEYS = {"torch_autocast_cpu": "AutocastCPU", "torch_autocast_cuda": "AutocastCUDA"}
# A build of torch without CUDA does not register it; the list must hold for both.
CUDA_BUILD_ONLY = {"_cudnn_rnn"}


def registered(key: str) -> dict[str, set[str]]:
    """Overloads by op, ``default`` where an op has one without a name."""
    found: dict[str, set[str]] = {}
    for name in torch._C._dispatch_get_registrations_for_dispatch_key(key):
        op, _, overload = name.removeprefix("aten::").partition(".")
        found.setdefault(op, set()).add(overload or "default")
    return found


def category(op_list: OpList, op: str, overload: str) -> Category | None:
    node = fx.Graph().call_function(getattr(getattr(torch.ops.aten, op), overload))
    rule = Matcher(op_list, "cpu")(node)
    return rule.category if rule is not None else None


@with_pinned_torch
@pytest.mark.parametrize("preset", KEYS)
def test_every_registered_overload_is_listed(preset: str) -> None:
    op_list = autocastfx.load_op_list(preset)
    missing = [(op, o) for op, os in registered(KEYS[preset]).items() for o in os if category(op_list, op, o) is None]
    assert not missing


@with_pinned_torch
@pytest.mark.parametrize("preset", KEYS)
def test_every_listed_op_is_registered(preset: str) -> None:
    listed = {name.partition(".")[0] for name in autocastfx.load_op_list(preset).rules}
    assert listed - CUDA_BUILD_ONLY == registered(KEYS[preset]).keys() - CUDA_BUILD_ONLY


@pytest.mark.parametrize("preset", KEYS)
def test_no_other_overload_is_decided(preset: str) -> None:
    """But overloads that call a registered one: torch.autocast decides inside them, on the same inputs."""
    op_list = autocastfx.load_op_list(preset)
    composite = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
    }
    others = [
        (op, overload)
        for op, own in registered(KEYS[preset]).items()
        for overload in getattr(torch.ops.aten, op).overloads()
        if overload not in own and f"{op}.{overload}" not in composite and _is_dispatched(op, overload)
    ]
    assert others
    assert [pair for pair in others if category(op_list, *pair) is not None] == []


def _is_dispatched(op: str, overload: str) -> bool:
    """TorchScript has overloads of its own (``exp.float``), which no graph holds."""
    suffix = "" if overload == "default" else f".{overload}"
    return f"aten::{op}{suffix}" in torch._C._dispatch_get_all_op_names()


@pytest.mark.parametrize("preset", KEYS)
def test_in_place_forms_are_not_listed(preset: str) -> None:
    op_list = autocastfx.load_op_list(preset)
    forms = [f"{op}_" for op in registered(KEYS[preset]) if hasattr(torch.ops.aten, f"{op}_")]
    assert forms
    assert [op for op in forms if op_list.rule(op) is not None] == []


@pytest.mark.parametrize("preset", KEYS)
def test_reading_is_complete(preset: str) -> None:
    op_list = autocastfx.load_op_list(preset)
    assert op_list.placement == "follow"
    assert op_list.unlisted is Category.KEEP
    for op in op_list.set_dtype:
        rules = [rule for name, rule in op_list.rules.items() if name.partition(".")[0] == op]
        assert {rule.category for rule in rules} == {Category.DENY}
