"""What is decided of the values that backward reads: the fewest bytes, by rules, and what has to stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional

import autocastfx
from autocastfx import OpList
from autocastfx.errors import OpListError, UnmatchedRuleWarning
from autocastfx.plan.plan import Plan, PlannedSaved
from autocastfx.policy.saved import Keep
from tests.decided import decided
from tests.helpers import Function
from tests.report.shown import nodes_in
from tests.runtime.test_saved import Layers


def plan_of(model: nn.Module, *inputs: Tensor, saved: Any = "recompute", **options: Any) -> Plan:
    return decided(model.train(), *inputs, saved=saved, **{"dtype": torch.bfloat16, **options}).plan


def parts(plan: Plan) -> dict[str, PlannedSaved]:
    return {f"{one.op}{' inside' if one.inside else ''}": one for one in plan.saved}


class Mlp(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(functional.gelu(self.up(self.norm(x)))).square().mean()
        return y


X = torch.randn(128, 64)


def test_what_cheap_ops_give_is_recomputed() -> None:
    plan = plan_of(Mlp(), X)
    found = {one.name: one for one in plan.saved}
    assert found["gelu"].keep is Keep.RECOMPUTE
    assert (found["gelu"].bytes, found["gelu"].kept, found["gelu"].recomputes) == (2 * 128 * 256, 0, ("gelu",))
    assert found["gelu"].readers == ("linear_1",)
    assert found["linear"].keep is Keep.COMPUTED  # the input of the GELU
    assert found["linear"].because == "linear is not cheap"
    assert found["layer_norm_bfloat16"].recomputes == ("layer_norm", "layer_norm_bfloat16")
    assert str(found["gelu"]) == "recomputed by gelu, 0 instead of 65,536 bytes: (saved:saved[0])"


@pytest.mark.parametrize("keep", [Keep.BFLOAT16, Keep.FLOAT8])
def test_forms_take_fewer_bytes(keep: Keep) -> None:
    found = {one.name: one for one in plan_of(Mlp(), X, saved=keep.value).saved}
    assert (found["linear"].keep is keep) == (keep is Keep.FLOAT8)  # it has 16 bits already
    assert found["linear"].kept == (128 * 256 + 6 * 128 if keep is Keep.FLOAT8 else 2 * 128 * 256)


def test_a_rule_of_a_module_wins_over_an_earlier_one() -> None:
    rules = [{"keep": "recompute"}, {"keep": "float8", "ops": ["gelu"], "reason": "measured"}]
    found = {one.name: one for one in plan_of(Mlp(), X, saved=rules).saved}
    assert found["gelu"].keep is Keep.FLOAT8
    assert found["gelu"].because == "measured (saved:saved[1].ops[0])"
    again = {one.name: one for one in plan_of(Mlp(), X, saved=[*rules, {"keep": "computed", "ops": ["gelu"]}]).saved}
    assert again["gelu"].keep is Keep.COMPUTED


def test_a_chain_is_not_too_long() -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)) for _ in range(12))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x.square().mean()

    plan = plan_of(Sums(), X)
    adds = {name for one in plan.saved for name in one.recomputes if name.startswith("add")}
    longest = max(sum(name.startswith("add") for name in one.recomputes) for one in plan.saved)
    assert adds
    assert longest <= 6
    assert any(one.op == "add" and one.keep is Keep.COMPUTED for one in plan.saved)


def test_a_loss_makes_its_probabilities_again() -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(64, 512)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return functional.cross_entropy(self.head(x), labels)

    plan = plan_of(Classifier(), X, torch.zeros(128, dtype=torch.long))
    inside = parts(plan)["cross_entropy_loss inside"]
    assert inside.inside == "computed"
    assert inside.bytes >= 4 * 128 * 512
    assert inside.kept == 0
    assert {one.name: one.kept for one in plan.saved}["linear"] == 2 * 128 * 512  # which it is made of


def test_what_is_small_written_into_or_frozen_stays() -> None:
    def call(x: Tensor) -> Tensor:
        y = functional.silu(x * 2)
        z = functional.silu(x * 3)
        z.add_(1)
        return (y.exp() + z.exp() + functional.silu(x[:4]).exp().sum()).mean()

    plan = plan_of(nn.Sequential(nn.Linear(64, 64), Function(call)), X)
    silus = {one.name: one.keep for one in plan.saved if one.op in ("silu", "add_")}
    assert silus.get("silu", Keep.RECOMPUTE) is Keep.RECOMPUTE
    assert silus.get("silu_1") in (None, Keep.COMPUTED)
    assert "silu_2" not in silus
    model = Mlp()
    for p in (model.norm, model.up):
        p.requires_grad_(False)
    found = {one.name for one in plan_of(model, X).saved}
    assert found <= {"linear_1", "gelu", "down_weight_bfloat16", "linear", "linear_1_float32"}


def test_numbers_beside_masks_are_not_kept_in_float8() -> None:
    model = nn.Sequential(nn.Linear(64, 64), Function(lambda x: x.masked_fill(x > 1, -1e9).exp().square().mean()))
    found = {one.op: one.keep for one in plan_of(model, X, saved="float8").saved}
    assert found.get("masked_fill", Keep.COMPUTED) is Keep.COMPUTED, found


def test_nothing_is_decided_without_rules_or_for_evaluation() -> None:
    assert plan_of(Mlp(), X, saved="as computed").saved == ()
    x = torch.randn(4, 64, 32)
    amp_model = autocastfx.convert(Layers(1), (x,), dtype="bfloat16", saved="recompute", check=False)
    amp_model.eval()(x)
    assert {variant.mode: bool(variant.plan.saved) for variant in amp_model.variants} == {"train": True, "eval": False}


def test_a_plan_with_it_reads_back_and_is_told(tmp_path: Any) -> None:
    amp_model = autocastfx.convert(Mlp(), (X,), dtype="bfloat16", saved="recompute", check=False)
    plan = amp_model.plan
    assert Plan.from_json(plan.to_json()) == Plan.from_json(Plan.from_json(plan.to_json()).to_json())
    assert Plan.from_json(plan.to_json()).saved == plan.saved
    assert '"saved"' not in decided(Mlp(), X, dtype="bfloat16").plan.to_json()
    assert "kept for backward: " in autocastfx.dump(amp_model)
    assert "for backward: recomputed by gelu, 0 instead of 65,536 bytes" in autocastfx.explain(amp_model, "gelu")
    page = autocastfx.dump(amp_model, format="html")
    (gelu,) = (node for node in nodes_in(page) if node["name"] == "gelu")
    assert "recomputed by gelu, 0 instead of 65,536 bytes" in " ".join(gelu["backward"])


# -- refusal ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"ops": ["gelu"]}, "does not say how values are kept"),
        ({"keep": "bfloat16"}, "bfloat16"),
        ({"keep": "low", "ops": []}, "an empty list of ops never matches"),
        ({"keep": "low", "ops": ["gelo"]}, "did you mean 'gelu'"),
        ({"keep": "low", "path": "re:("}, "saved"),
        ({"keep": "low", "opps": ["gelu"]}, "no key of an entry under 'saved'"),
    ],
)
def test_a_wrong_entry_is_one_error(entry: dict[str, Any], said: str) -> None:
    with pytest.raises(OpListError, match=said):
        OpList.of({"saved": [entry]})


def test_a_wrong_word_is_one_error() -> None:
    with pytest.raises(ValueError, match="saved is 'as computed', 'recompute', 'low', 'float8', or a list of entries"):
        plan_of(Mlp(), X, saved="bfloat16")


def test_a_rule_that_matches_nothing_is_told() -> None:
    rules = [{"keep": "recompute"}, {"keep": "float8", "ops": ["softmax"]}]
    with pytest.warns(UnmatchedRuleWarning, match="no node of the model is 'softmax'"):
        autocastfx.convert(Mlp(), X, dtype="bfloat16", saved=rules, check=False)
    with pytest.warns(UnmatchedRuleWarning, match="nothing is kept otherwise"):
        autocastfx.convert(Mlp(8), X[:2, :8], dtype="bfloat16", saved="recompute", check=False)


def test_lists_merge_and_write_back() -> None:
    first = OpList.of({"saved": [{"keep": "recompute"}]})
    second = OpList.of({"saved": [{"keep": "low", "ops": ["exp"], "path": "head", "reason": "measured"}]})
    merged = first | second
    assert [str(rule.effect) for rule in merged.saved] == ["recompute", "low"]
    assert "keep: low" in merged.text()
    assert [str(change) for change in first.diff(second)]
    everything = [
        *({"keep": "low", "path": path, "ops": ["exp", "gelu"], "devices": ["cpu", "cuda"]} for path in ("a", "b")),
        *({"keep": "float8", "path": "a", "ops": ["exp"]}, {"keep": "computed"}, {"keep": "low", "shipped": True}),
    ]
    merged |= OpList.of({"saved": everything})
    again = OpList.of(yaml.safe_load(merged.text()))
    assert again == merged
    assert [rule.shipped for rule in again.saved] == [rule.shipped for rule in merged.saved]
    assert {str(rule.effect): rule.shipped for rule in again.saved if not rule.path} == {"low": True}


def test_the_most_specific_rule_wins_and_then_the_later() -> None:
    wide, narrow = {"keep": "recompute"}, {"keep": "float8", "ops": ["gelu"]}
    for rules in ([wide, narrow], [narrow, wide]):
        assert {one.op: one for one in plan_of(Mlp(), X, saved=rules).saved}["gelu"].keep is Keep.FLOAT8
    lists = ["default", OpList.of({"saved": [narrow]})]
    assert {one.op: one for one in plan_of(Mlp(), X, op_list=lists).saved}["gelu"].keep is Keep.FLOAT8
    other = {**narrow, "keep": "computed"}
    assert {one.op: one for one in plan_of(Mlp(), X, saved=[narrow, other]).saved}["gelu"].keep is Keep.COMPUTED
    elsewhere = [wide, {**narrow, "devices": "meta"}]
    assert {one.op: one for one in plan_of(Mlp(), X, saved=elsewhere).saved}["gelu"].keep is Keep.RECOMPUTE


# -- what may not be rounded ------------------------------------------------------------------------------------------


class Masked(nn.Module):
    """Attention whose scores get a mask by ``add_mask``, and then a temperature that is learned."""

    def __init__(self, add_mask: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 64) for _ in range(3))
        self.temperature, self.add_mask = nn.Parameter(torch.ones(())), add_mask

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(-1, -2) / 8
        y: Tensor = (self.add_mask(scores, hidden) * self.temperature).softmax(-1) @ self.v(x)
        return x + y


LOWEST = torch.finfo(torch.float32).min
MASKS: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "input": ("add", lambda scores, hidden: scores + hidden),
    "made of an input": ("add", lambda scores, hidden: scores + (hidden != 0).float() * LOWEST),
    "bounded": ("clamp", lambda scores, hidden: (scores + hidden).clamp(min=LOWEST)),
    "filled in": ("masked_fill", lambda scores, hidden: scores.float().masked_fill(hidden != 0, -1e4)),
}
HIDDEN = torch.ones(64, 64).triu(1) * LOWEST


@pytest.mark.parametrize("kind", MASKS)
def test_a_mask_beside_scores_forbids_forms_that_cannot_hold_both(kind: str) -> None:
    op, add_mask = MASKS[kind]
    plan = plan_of(Masked(add_mask), torch.randn(4, 64, 64), HIDDEN, saved=[{"keep": "computed"}])
    forms = {one.op: {size.keep for size in one.smaller} for one in plan.saved}
    assert forms[op] == ({Keep.BFLOAT16} if kind == "filled in" else set())
    assert Keep.FLOAT8 in forms["softmax"]


def test_scores_beside_a_mask_have_their_gradients() -> None:
    torch.manual_seed(0)
    model, x = Masked(MASKS["input"][1]), torch.randn(4, 64, 64)
    exact: tuple[Tensor, ...] = ()
    rules = [{"keep": "recompute"}, {"keep": "float8", "ops": ["add"]}]
    for saved, bound in (("as computed", 0.0), ("low", 0.02), ("float8", 0.1), (rules, 0.02)):
        amp_model = autocastfx.convert(model, (x, HIDDEN), dtype="bfloat16", saved=saved, check=False)
        gradients = torch.autograd.grad(amp_model(x, HIDDEN).square().sum(), [model.temperature, model.q.weight])
        exact = exact or gradients
        for one, other in zip(gradients, exact, strict=True):
            assert (one - other).norm() <= bound * other.norm(), saved


def test_a_residual_sum_may_be_rounded_wherever_it_comes_from() -> None:
    found = plan_of(Layers(1), torch.randn(4, 64, 32), saved="float8").saved
    assert {one.keep for one in found if one.op == "add" and "layer_norm" in "".join(one.readers)} == {Keep.FLOAT8}


class Exact(nn.Module):
    """Computes ``call`` of float32 values with an offset."""

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.call = nn.Linear(64, 64), nn.Linear(64, 64), call
        self.scale, self.offset = nn.Parameter(torch.ones(64)), nn.Parameter(torch.full((64,), 30.0))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.call(self.first(x).float() * self.scale + self.offset))
        return y


def variance(y: Tensor) -> Tensor:
    return y / ((y * y).mean(1, keepdim=True) - y.mean(1, keepdim=True) ** 2 + 1e-5).sqrt()


@pytest.mark.parametrize(
    ("call", "op"), [(variance, "add"), (lambda y: (y * 300).sin(), "mul")], ids=["variance", "sine"]
)
def test_what_runs_in_float32_for_its_numbers_reads_no_rounded_ones(call: Callable[[Tensor], Tensor], op: str) -> None:
    x = torch.randn(256, 64)
    found = [one for one in plan_of(Exact(call), x, saved="low").saved if one.op == op]
    assert any(one.because.startswith("it may not be rounded: ") and one.readers for one in found)
    again = plan_of(Exact(call), x, saved=[{"keep": "recompute"}, {"keep": "float8", "ops": [op]}]).saved
    assert {one.keep for one in again if one.op == op} == {Keep.COMPUTED}


@pytest.mark.parametrize("keep", [Keep.BFLOAT16, Keep.FLOAT8])
@pytest.mark.parametrize(
    "call",
    [
        lambda y: y.std(1, keepdim=True),
        lambda y: y.square().mean(1, keepdim=True) - y.mean(1, keepdim=True).square(),
        lambda y: functional.batch_norm(y, None, None, training=True),
        lambda y: functional.cosine_similarity(y, y.roll(1, 0), 1)[:, None],
        lambda y: functional.smooth_l1_loss(y, y.roll(1, 0), reduction="none"),
        lambda y: torch.cdist(y, y),
        lambda y: y.logsumexp(1, keepdim=True),
        lambda y: functional.layer_norm(y.mT, (256,)).mT,
        lambda y: y.clamp(29.9, 30.1),
        torch.tanh,
        lambda y: functional.layer_norm(y.view(512, 32), (32,)).view(256, 64),
    ],
    ids=["std", "squares", "batch norm", "cosine", "loss", "cdist", "sum", "other rows", "clamp", "tanh", "split rows"],
)
def test_what_an_op_subtracts_or_compares_inside_is_not_rounded(call: Callable[[Tensor], Tensor], keep: Keep) -> None:
    model = Exact(lambda y: call(y)[:, :64] + y.new_zeros(64))
    found = [one for one in plan_of(model, torch.randn(256, 64), saved=keep.value).saved if one.op in ("add", "tanh")]
    assert {one.keep for one in found if one.readers} == {Keep.COMPUTED}
    assert any(one.because.startswith("it may not be rounded: ") for one in found)


def images(y: Tensor) -> Tensor:
    """Rows of 64 as pixels, with their channels side by side in memory."""
    return (y.view(4, 8, 8, 64).permute(0, 3, 1, 2) + 1).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "norm", ["layer", "layer of channels", "group", "instance", "batch", "batch of rows", "batch of channels"]
)
def test_norms_of_values_with_an_offset_have_their_gradients(norm: str) -> None:
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "layer": lambda y: functional.layer_norm(y, (64,)),
        "group": lambda y: functional.group_norm(y.view(32, 8, 64), 4).flatten(0, 1),
        "instance": lambda y: functional.instance_norm(y.view(32, 8, 64)).flatten(0, 1),
        "batch": lambda y: functional.batch_norm(y.view(32, 8, 64), None, None, training=True).flatten(0, 1),
        "layer of channels": lambda y: functional.layer_norm(images(y).permute(0, 2, 3, 1), (64,)).reshape(256, 64),
        "batch of channels": lambda y: (
            functional.batch_norm(images(y), None, None, training=True).permute(0, 2, 3, 1).reshape(256, 64)
        ),
        "batch of rows": lambda y: functional.batch_norm(y, None, None, training=True),
    }
    torch.manual_seed(0)
    model, x = Exact(lambda y: calls[norm](y + 100)), torch.randn(256, 64)
    exact: tuple[Tensor, ...] = ()
    for saved, bound in (("as computed", 0.0), ("low", 0.02), ("float8", 0.1)):
        amp_model = autocastfx.convert(model, (x,), dtype="bfloat16", saved=saved, check=False)
        torch.manual_seed(1)
        loss = (amp_model(x).float() * torch.randn(256, 64)).sum()
        gradients = torch.autograd.grad(loss, [model.first.weight, model.scale])
        exact = exact or gradients
        parts = amp_model.plan.saved
        is_rounded = any(one.keep.value == saved and norm.split()[0] in "".join(one.readers) for one in parts)
        assert is_rounded == (bound > 0 and norm in ("layer", "layer of channels", "group", "batch"))
        for one, other in zip(gradients, exact, strict=True):
            assert (one - other).norm() <= bound * other.norm()


# -- what is told is what is kept -------------------------------------------------------------------------------------


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.head, self.words = nn.Linear(64, 64), nn.Linear(64, 512), nn.Embedding(128, 64)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = functional.gelu(self.up(x)) + self.words(labels)
        largest: Tensor = h.view(64, -1, 64).max(-1)[0]
        return functional.cross_entropy(self.head(h), labels) + largest.mean()


@pytest.mark.parametrize("keep", ["recompute", "low", "float8"])
def test_the_bytes_that_are_told_are_those_that_are_kept(keep: str) -> None:
    x, labels = torch.randn(1024, 64), torch.randint(128, (1024,))
    model, storages = Loss(), dict[int, Any]()

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
        return tensor

    amp_model = autocastfx.convert(model, (x, labels), dtype="bfloat16", saved=keep, check=False)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        amp_model(x, labels)
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    kept = sum(storage.nbytes() for number, storage in storages.items() if number not in own)
    assert sum(one.kept for one in amp_model.plan.saved) == pytest.approx(kept, rel=0.01)
