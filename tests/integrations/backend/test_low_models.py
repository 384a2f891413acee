"""Enabled models that are 16-bit already: generate, plans, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autocastfx
from autocastfx import OpList
from autocastfx.errors import UnsupportedError
from autocastfx.plan.plan import Precision
from tests.invariants.test_low_models import NOTHING, RAISED, batches, llama

transformers: Any = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("fresh_dynamo")

PROMPT = torch.arange(10).view(2, 5)


def plans(model: nn.Module) -> list[autocastfx.Plan]:
    backend = autocastfx.backend_of(model)
    assert backend is not None
    return [graph.plan for graph in backend.graphs if graph.plan is not None]


def generated(model: Any) -> Any:
    return model.generate(
        *(PROMPT,),
        **{"attention_mask": torch.ones_like(PROMPT), "max_new_tokens": 8, "do_sample": False, "use_cache": True},
        **{"pad_token_id": 0, "output_logits": True, "return_dict_in_generate": True, "eos_token_id": None},
    )


def test_generate_gives_the_plain_models_tokens_if_nothing_is_raised() -> None:
    model = llama().bfloat16()
    plain = generated(model)
    ours = generated(autocastfx.enable(model, op_list=NOTHING))
    assert torch.equal(ours.sequences, plain.sequences)
    assert all(torch.equal(a, b) for a, b in zip(ours.logits, plain.logits, strict=True))


def test_generate_runs_raised() -> None:
    model = llama().bfloat16()
    plain, full = generated(model), generated(llama().bfloat16().float())
    ours = generated(autocastfx.enable(model, op_list=["default", RAISED]))
    assert ours.sequences.shape == plain.sequences.shape
    first = [found.logits[0].float() for found in (ours, plain, full)]  # of the same prompt
    assert (first[0] - first[2]).norm() < (first[1] - first[2]).norm()
    assert all(("linear", "float32") in plan.by_op() for plan in plans(model))


def test_training_an_enabled_model_raises_in_both_directions() -> None:
    model, (batch,) = llama().bfloat16(), batches()
    autocastfx.enable(model, op_list=["default", RAISED])
    model.train()(**batch, labels=batch["input_ids"]).loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in model.parameters())


def test_what_a_model_keeps_in_float32_is_so_in_an_enabled_one() -> None:
    sizes: dict[str, Any] = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    for low in (torch.float32, torch.float16):
        config = transformers.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0)
        model = transformers.T5ForConditionalGeneration(config).eval().to(low)
        autocastfx.enable(model, dtype="float16")
        model(input_ids=PROMPT, decoder_input_ids=PROMPT, use_cache=False)
        wo = [node for plan in plans(model) for node in plan.nodes if node.module.endswith(".wo")]
        assert {node.placement.run for node in wo if node.op == "linear"} == {Precision.FLOAT32}


@pytest.mark.parametrize(
    ("options", "name"),
    [({"dtype": "float16"}, "dtype"), ({"fold": "kernel"}, "fold"), ({"recompose": []}, "recompose")],
)
def test_arguments_that_mean_nothing_are_refused(options: dict[str, Any], name: str) -> None:
    model = llama().bfloat16()
    with pytest.raises(UnsupportedError, match=f"^{name} was given, and the parameters of this LlamaForCausalLM are"):
        autocastfx.enable(model, **options)
    assert autocastfx.backend_of(model) is None


def test_lists_that_follow_torch_autocast_take_any_dtype() -> None:
    model = autocastfx.enable(llama().bfloat16(), dtype="float16", op_list="torch_autocast_cuda")
    backend = autocastfx.backend_of(model)
    assert backend is not None
    assert backend.low == torch.float16


def test_a_part_in_16_bits_of_a_float32_model_stays_as_it_is() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x.bfloat16()).softmax(-1)
            torch._dynamo.graph_break()
            return self.second(y.float())

    model = autocastfx.enable(Mixed(), dtype="bfloat16", op_list=["default", OpList.of({"deny": ["softmax"]})])
    model(torch.ones(2, 4))
    (softmax,) = [node for plan in plans(model) for node in plan.nodes if node.op == "softmax"]
    assert softmax.placement.run is Precision.CAPTURED
