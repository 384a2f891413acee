"""Models of transformers that are 16-bit already: to the bit themselves, or raised where a list asks for it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autocastfx import OpList, convert, logprob_gap
from autocastfx.errors import NotCapturedError, StateWarning, UnsupportedError
from autocastfx.plan.plan import Precision

transformers: Any = pytest.importorskip("transformers")

LOW = [torch.float16, torch.bfloat16]
SIZES: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4},
    **{"intermediate_size": 64, "max_position_embeddings": 64, "use_cache": False},
}
STREAM = {"path": "model.layers.*", "ops": ["add"], "category": "float32", "reason": "the residual stream"}
ROTATED = {"path": "model.layers.*.self_attn", "ops": ["add"], "category": "infer"}
NORMS = {"path": "**.*norm", "category": "float32", "reason": "norms"}
HEAD = {"path": "lm_head", "category": "float32", "reason": "logits"}
RAISED = OpList.of({"modules": [STREAM, ROTATED, NORMS, HEAD]}, name="raised")
NOTHING = OpList.of({"allow": ["linear"]}, name="nothing")


def llama() -> Any:
    """With a large residual stream, whose rounding outweighs that of the branches."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(50)
        model.lm_head.weight.mul_(10)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


def mixtral() -> Any:
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, num_local_experts=4)).eval()


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, use_cache=False)
    return transformers.GPT2LMHeadModel(config).eval()


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)).eval()


def batches(count: int = 1) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    return [{"input_ids": torch.randint(0, 64, (2, 16))} for _ in range(count)]


def gradients(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model.zero_grad()
    found = model(**batch, labels=batch["input_ids"])
    found.loss.backward()
    return found.logits, [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("make", [llama, mixtral, gpt2])
def test_a_model_of_which_nothing_is_raised_is_itself_to_the_bit(low: torch.dtype, make: Callable[[], Any]) -> None:
    model, (batch,) = make().to(low), batches()
    plain = copy.deepcopy(model)
    amp_model = convert(model, {**batch, "labels": batch["input_ids"]}, op_list=NOTHING)
    ours, theirs = gradients(amp_model, batch), gradients(plain, batch)
    assert torch.equal(ours[0], theirs[0])
    assert len(ours[1]) == len(theirs[1]) > 0
    assert all(torch.equal(a, b) for a, b in zip(ours[1], theirs[1], strict=True))
    assert {g.dtype for g in ours[1]} == {low}


def test_raised_it_is_nearer_to_the_float32_model() -> None:
    low = llama().bfloat16()
    full, runs = copy.deepcopy(low).float(), batches(4)
    plain = logprob_gap(full, low, runs)
    raised = convert(low, runs[0], op_list=["default", RAISED], keep_output_dtype=False)
    gap = logprob_gap(full, raised, runs)
    assert gap.tokens == plain.tokens == 4 * 2 * 15
    assert gap.mean < plain.mean / 2
    assert gap.quantile < plain.quantile / 2
    for rule in (HEAD, NORMS):
        part = convert(low, runs[0], op_list=["default", OpList.of({"modules": [rule]})], keep_output_dtype=False)
        assert logprob_gap(low, part, runs).largest > 0


@pytest.mark.parametrize("low", LOW)
def test_gradients_of_a_raised_model_are_16_bit_and_near_those_of_float32(low: torch.dtype) -> None:
    model, (batch,) = llama().to(low), batches()
    full = copy.deepcopy(model).float()
    amp_model = convert(model, {**batch, "labels": batch["input_ids"]}, op_list=["default", RAISED])
    _, ours = gradients(amp_model, batch)
    _, theirs = gradients(full, batch)
    assert {g.dtype for g in ours} == {low}
    bound = 8 * torch.finfo(low).eps  # roundings of a path through two layers
    for a, b in zip(ours, theirs, strict=True):
        assert (a.float() - b).norm() <= bound * b.norm() + torch.finfo(low).tiny


@pytest.mark.parametrize("low", LOW)
def test_a_raised_model_pickles_and_keeps_its_state(low: torch.dtype) -> None:
    model, (batch,) = llama().to(low), batches()
    amp_model = convert(model, batch, op_list=["default", RAISED])
    again = pickle.loads(pickle.dumps(amp_model))
    assert torch.equal(again(**batch).logits, amp_model(**batch).logits)
    assert again.plan == amp_model.plan
    state = amp_model.state_dict()
    assert {k: v.dtype for k, v in state.items()} == {k: v.dtype for k, v in model.state_dict().items()}
    other = convert(llama().to(low), batch, op_list=["default", RAISED])
    other.load_state_dict(state)
    assert torch.equal(other(**batch).logits, amp_model(**batch).logits)


def test_other_sizes_and_training_are_served() -> None:
    model = llama().bfloat16()
    amp_model = convert(model, batches()[0], op_list=["default", RAISED])
    longer = torch.randint(0, 64, (3, 24))
    with torch.no_grad():
        assert amp_model(input_ids=longer).logits.shape == (3, 24, 64)
    assert not torch.equal(amp_model(input_ids=longer).logits, model(input_ids=longer).logits)
    amp_model.train()
    assert amp_model.plan.by_op()["linear", "float32"] == 1


def test_without_inputs_the_first_call_captures_it() -> None:
    model, x = small().bfloat16(), torch.linspace(-1, 1, 16).view(2, 8).bfloat16()
    amp_model, given = convert(model), convert(model, x)
    with pytest.raises(NotCapturedError, match="before the first call"):
        str(amp_model.plan)
    assert torch.equal(amp_model(x), given(x))
    assert amp_model.plan == given.plan
    assert amp_model.plan["softmax"].placement.run is Precision.FLOAT32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"dtype": "float16"},
            r"^dtype was given, .* LlamaForCausalLM are bfloat16 already: the conversion has",
        ),
        ({"weights": "cached"}, r"^weights was given, .*: its parameters are stored in 16 bits as they are"),
        ({"weights": "low"}, r"^weights was given"),
        ({"fold": "kernel"}, r"^fold was given, .*: what the list denies is raised"),
        ({"calibrate": batches()}, r"^calibrate was given, .*: nothing is rounded that was not"),
        ({"recompose": ["rms_norm"]}, r"^recompose was given, .*: its ops stay those that they are"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    model = llama().bfloat16()
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(UnsupportedError, match=message):
        convert(model, batches()[0], **options)  # before anything is captured
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_arguments_that_say_what_holds_are_taken() -> None:
    options: dict[str, Any] = {"weights": "cast", "fold": "none", "recompose": False, "dtype": "bfloat16"}
    plan = convert(small().bfloat16(), torch.ones(2, 8).bfloat16(), **options).plan
    assert plan == convert(small().bfloat16(), torch.ones(2, 8).bfloat16()).plan
    assert plan.low == "bfloat16"
    assert convert(small().half(), torch.ones(2, 8).half()).plan.low == "float16"


def test_lists_that_follow_torch_autocast_take_any_dtype() -> None:
    options: dict[str, Any] = {"dtype": "float16", "op_list": "torch_autocast_cuda", "fold": "kernel"}
    assert convert(small().bfloat16(), torch.ones(2, 8).bfloat16(), **options).plan.low == "float16"
    assert convert(small().half(), torch.ones(2, 8).half(), op_list="torch_autocast_cpu").plan.low == "bfloat16"


def test_models_of_two_16_bit_dtypes_are_warned_of() -> None:
    model = nn.Sequential(nn.Linear(4, 4).half(), nn.Linear(4, 4).bfloat16())
    with pytest.warns(StateWarning, match="are bfloat16 and float16 already, .* Give them one dtype, or convert"):
        convert(model)


def test_models_with_float32_parameters_are_converted_as_those() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), nn.LayerNorm(8)).eval()
    model[2].bfloat16()

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner[2](self.inner[:2](x).bfloat16())

    plan = convert(Mixed(), (torch.ones(2, 8),), dtype="bfloat16").plan
    assert plan["linear"].placement.run is Precision.LOW
    assert plan["linear"].captured == "float32"
    assert plan["layer_norm"].placement.run is Precision.CAPTURED


def test_float16_logits_that_overflow_are_raised() -> None:
    model, (batch,) = llama(), batches()
    with torch.no_grad():
        model.lm_head.weight.mul_(torch.finfo(torch.float16).max / model.lm_head.weight.abs().max())
    model.half()
    assert not model(**batch).logits.isfinite().all()
    raised = convert(model, batch, op_list=["default", RAISED], keep_output_dtype=False)
    assert raised(**batch).logits.isfinite().all()
