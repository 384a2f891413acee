"""Triton kernels are chosen where they are measured faster, or where a variable asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from autocastfx.errors import MissingExtraError, UnsupportedError
from autocastfx.policy.kernel_facts import load_kernel_facts
from autocastfx.runtime.kernels import chosen
from autocastfx.runtime.kernels.chosen import KERNELS, is_chosen, names_chosen
from autocastfx.training import copying_step

FACTS = load_kernel_facts()
OTHERS = (torch.empty(1, device="meta"), torch.empty(1))


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("AUTOCASTFX_TRITON", raising=False)
    monkeypatch.setattr(chosen, "find_spec", lambda name: object())
    names_chosen.cache_clear()
    yield
    names_chosen.cache_clear()


def test_what_is_not_measured_is_off() -> None:
    assert FACTS.triton_faster == {"cuda": KERNELS - {"quantize", "optimizer_step"}}
    assert names_chosen() == KERNELS - {"quantize", "optimizer_step"}


def test_without_a_measurement_none_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chosen, "load_kernel_facts", lambda: replace(FACTS, triton_faster={}))
    assert names_chosen() == frozenset()


def test_what_is_measured_faster_is_chosen_where_triton_is(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = replace(FACTS, triton_faster={"cuda": frozenset({"rms_norm"})})
    monkeypatch.setattr(chosen, "load_kernel_facts", lambda: facts)
    assert names_chosen() == {"rms_norm"}
    names_chosen.cache_clear()
    monkeypatch.setattr(chosen, "find_spec", lambda name: None)
    assert names_chosen() == frozenset()


@pytest.mark.parametrize(
    ("asked", "names"),
    [("all", KERNELS), ("none", set()), ("", set()), ("rms_norm", {"rms_norm"}),
     ("quantize", {"quantize"}), ("rms_norm,cross_entropy_loss", KERNELS - {"quantize", "optimizer_step"})],
)  # fmt: skip
def test_the_variable_chooses(asked: str, names: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOCASTFX_TRITON", asked)
    assert names_chosen() == names


def test_what_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOCASTFX_TRITON", "rms_norm,softmax")
    with pytest.raises(UnsupportedError, match=r"=rms_norm,softmax: no operator named softmax .* cross_entropy_loss"):
        names_chosen()
    monkeypatch.setenv("AUTOCASTFX_TRITON", "all")
    monkeypatch.setattr(chosen, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="AUTOCASTFX_TRITON=all: the package triton is not installed"):
        names_chosen()


@pytest.mark.parametrize("tensor", OTHERS, ids=["meta", "cpu"])
def test_other_devices_have_none(tensor: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOCASTFX_TRITON", "all")
    assert not is_chosen("rms_norm", tensor)


def test_optimizers_read_the_same_variable() -> None:
    assert copying_step.OPTIMIZER_STEP in KERNELS
    assert copying_step.VARIABLE == chosen.VARIABLE


def test_every_choice_names_kernels_that_there_are() -> None:
    assert all(names <= KERNELS for names in FACTS.triton_faster.values())
