"""PEFT's adapters on a converted model: trained, switched off, merged and saved as on the model itself."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autocastfx import CompileBackend
from autocastfx.errors import UncapturedGraphWarning
from tests.helpers import relative_error
from tests.integrations.trained import char_gpt, made
from tests.nearness import assert_near

pytest.importorskip("peft", reason="needs peft: make integrations")

import peft

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # of transformers
]
LOW = torch.bfloat16
LORA: Any = {"r": 4, "task_type": "CAUSAL_LM", "fan_in_fan_out": True, "init_lora_weights": False}
IDS = torch.arange(32).view(2, 16)


def adapted() -> Any:
    model: Any = made("char GPT")[0]
    model.loss_type = "ForCausalLM"  # or transformers logs in the forward pass, where Dynamo stops
    config: Any = peft.LoraConfig(target_modules=["c_attn"], **LORA)
    torch.manual_seed(1)
    return peft.get_peft_model(model, config)  # type: ignore[arg-type]


def assert_logits_near(found: Tensor, model: Any) -> None:
    """``found`` is as near to float32 as under torch.autocast, but is not float32's."""
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.compile is off", UncapturedGraphWarning)
        exact = model(IDS).logits
        with torch.autocast("cpu", LOW):
            usual = model(IDS).logits
    assert_near({"logits": found}, {"logits": usual}, {"logits": exact}, times=2)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


def test_adapters_are_trained_and_nothing_else_is() -> None:
    model = adapted().train()
    CompileBackend(dtype=LOW, inner="eager").compile(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if "lora" in name}
    assert len(changed) == 4


def test_an_adapter_that_is_switched_off_merged_or_changed_is_followed(tmp_path: Path) -> None:
    model = adapted().eval()
    backend = CompileBackend(dtype=LOW, inner="eager")
    backend.compile(model)
    on = logits(model)
    assert_logits_near(on, model)
    with model.disable_adapter():
        off = logits(model)
        assert_logits_near(off, model)
    assert relative_error(off, on) > 0.1
    assert torch.equal(logits(model), on)
    torch.manual_seed(2)
    other: Any = peft.LoraConfig(target_modules=["c_proj"], **LORA)
    model.add_adapter("other", other)
    model.set_adapter("other")
    assert_logits_near(logits(model), model)
    assert relative_error(logits(model), on) > 0.1
    model.set_adapter("default")
    assert torch.equal(logits(model), on)
    model.save_pretrained(str(tmp_path))
    loaded: Any = peft.PeftModel.from_pretrained(made("char GPT")[0].eval(), str(tmp_path))
    CompileBackend(dtype=LOW, inner="eager").compile(loaded)
    assert torch.equal(logits(loaded.eval()), on)
    model.merge_adapter()
    assert_logits_near(logits(model), model)
    assert relative_error(logits(model), on) <= 0.1
    assert not backend.skipped


def test_a_model_converted_before_it_is_adapted_is_followed_too() -> None:
    torch.manual_seed(0)
    base: Any = char_gpt().eval()
    CompileBackend(dtype=LOW, inner="eager").compile(base)
    alone = logits(base)
    torch.manual_seed(1)
    config: Any = peft.LoraConfig(target_modules=["c_attn"], **LORA)
    model: Any = peft.get_peft_model(base, config)
    assert_logits_near(logits(model), model)
    assert relative_error(logits(model), alone) > 0.1
    base = model.unload()
    assert torch.equal(logits(base), alone)
