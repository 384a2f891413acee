"""A planted overflow is named, with its step and the rule that mends it, in training loops of both scalers."""

from __future__ import annotations

import copy
import linecache
import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autocastfx import (
    AmpModule,
    DynamicLossScale,
    GradScaler,
    LossScalingOptimizer,
    OpList,
    StaticLossScale,
    compare,
    convert,
    watch,
)
from autocastfx.errors import LossScaleError, SkippedStepWarning
from autocastfx.numerics import watch as watch_module
from autocastfx.numerics.watch import SkippedStep, Watch, WatchedNode, report

LISTED = OpList.of({"allow": ["exp"]}, name="mine")
STEPS, PLANTED = 9, 6  # no step that a watch with every=4 observes


class Network(nn.Module):
    """Overflows in its exponential, in float16 alone, where inputs are ten times as large as usual."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(8, 16), nn.Dropout(dropout), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.log1p(torch.exp(self.first(x)))))


def converted(dropout: float = 0.0, **options: Any) -> AmpModule:
    torch.manual_seed(0)
    model = Network(dropout)
    return convert(model, (torch.ones(4, 8),), dtype=torch.float16, op_list=["default", LISTED], **options)


def batches(planted: Sequence[int] = (PLANTED,), steps: int = STEPS) -> Iterator[Tensor]:
    torch.manual_seed(1)
    for step in range(1, steps + 1):
        yield torch.randn(4, 8).sign() * (12.0 if step in planted else 1.0)


def with_optimizer(model: AmpModule, seen: Watch, inputs: Iterator[Tensor]) -> None:
    optimizer = LossScalingOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4), StaticLossScale(8.0))
    for x in inputs:
        optimizer.zero_grad()
        optimizer.backward(model(x).square().mean())
        optimizer.step()
        seen.step(optimizer)


def with_scaler(model: AmpModule, seen: Watch, inputs: Iterator[Tensor]) -> None:
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-4), GradScaler("cpu", init_scale=64.0)
    for x in inputs:
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.step(scaler)


Loop = Callable[[AmpModule, Watch, Iterator[Tensor]], None]
LOOPS = pytest.mark.parametrize("loop", [with_optimizer, with_scaler])
MESSAGE = rf"step {PLANTED} was skipped: exp \(exp\) in module \(root\) gives \d+ Inf in float16\. Print the watch"


def row(seen: Watch, name: str) -> WatchedNode:
    return next(row for row in seen.rows if row.name == name)


@LOOPS
def test_a_skipped_step_names_the_node_and_the_rule_that_mends_it(loop: Loop) -> None:
    model = converted()
    with watch(model, every=4) as seen, pytest.warns(SkippedStepWarning, match=MESSAGE) as warned:
        loop(model, seen, batches())
    assert len(warned) == 1
    assert warned[0].filename == __file__
    assert linecache.getline(__file__, warned[0].lineno).strip().startswith("seen.step("), "the line of the loop"
    (skipped,) = seen.skipped
    assert (skipped.step, skipped.found and skipped.found.name) == (PLANTED, "exp")
    assert row(seen, "exp").first_overflow == PLANTED
    assert [one.name for one in seen.rows if one.first_overflow] == ["exp"], "none that only carries it on"
    assert str(seen).startswith("9 steps, 3 of them observed (1 in 4), 1 skipped\n")
    assert str(seen).endswith("  what to do: add this to your op list:\n    deny: [exp]")
    assert skipped.found is not None
    mended = converted_with(OpList.of(yaml.safe_load(skipped.found.fix)))
    with watch(mended, every=4) as again:
        loop(mended, again, batches())
    assert again.skipped == ()


def test_what_did_not_happen_is_a_dash() -> None:
    nodes = [
        WatchedNode("exp", "exp", "", "float16", 1234, 5, 0, 0.5, 2),
        WatchedNode("x_float16", "cast", "first", "float16", 64, 0, 7, 1e5, None),
    ]
    _, _, *rows = report(nodes, [], steps=3, observed=2, every=2, most=20).splitlines()
    assert [row.split() for row in rows] == [
        ["exp", "exp", "(root)", "float16", "1,234", "5", "-", "0.5", "step", "2"],
        ["x_float16", "cast", "first", "float16", "64", "-", "7", "1e+05", "-"],
    ]


def converted_with(fix: OpList) -> AmpModule:
    torch.manual_seed(0)
    return convert(Network(), (torch.ones(4, 8),), dtype=torch.float16, op_list=["default", LISTED, fix])


@LOOPS
def test_an_observed_step_names_the_node(loop: Loop) -> None:
    model = converted()
    with watch(model, every=1) as seen, pytest.warns(SkippedStepWarning):
        loop(model, seen, batches())
    found = row(seen, "exp")
    assert (found.op, found.module, found.dtype, found.elements) == ("exp", "", "float16", STEPS * 4 * 16)
    assert found.overflow > 0
    assert found.first_overflow == row(seen, "last_weight_float16").first_overflow or PLANTED
    assert row(seen, "linear").first_overflow is None
    assert row(seen, "linear_1").first_overflow == PLANTED, "it carries Inf on"
    assert str(seen).splitlines()[2].split()[:2] == ["exp", "exp"]


@LOOPS
def test_in_between_an_overflow_is_seen_if_it_persists(loop: Loop) -> None:
    model = converted()
    with watch(model, every=4) as seen, pytest.warns(SkippedStepWarning):
        loop(model, seen, batches(planted=range(PLANTED, STEPS + 1)))
    assert row(seen, "exp").first_overflow == PLANTED, "by the search"
    assert row(seen, "linear_1").first_overflow == 9, "by the next observed step"
    assert [one.step for one in seen.skipped] == [6, 7, 8, 9]
    assert "4 steps (6, 7, 8, 9) were skipped, because\nexp (exp)" in str(seen)


def test_without_step_each_call_counts_as_one() -> None:
    model = converted()
    with watch(model, every=2) as seen:
        for x in batches(planted=(5,)):
            model(x).sum().backward()
            with torch.no_grad():
                model(x * 100)  # evaluation
    assert row(seen, "exp").first_overflow == 5
    assert str(seen).startswith("9 steps, 5 of them observed (1 in 2), 0 skipped\n")


def test_a_gradient_that_overflows_is_told_from_a_value() -> None:
    model = converted()
    optimizer = LossScalingOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4))
    with watch(model) as seen:
        optimizer.backward(model(torch.ones(4, 8)).sum() * float("inf"))
        optimizer.step()
        seen.step(optimizer)
    assert seen.skipped == (SkippedStep(1, None),)
    assert str(seen).endswith(
        "step 1 was skipped though every value of the forward pass is finite: the loss or a gradient overflowed"
    )


def test_every_call_of_a_step_is_searched_and_each_runs_again_with_its_random_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = converted(dropout=0.5)
    optimizer = LossScalingOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4))
    inputs = list(batches(planted=(3,), steps=4))
    with watch(model, nodes=["exp", "dropout"]) as seen:
        seen.step()
        given = [model(x) for x in inputs]
        assert len(seen._calls) == 4
        torch.manual_seed(7)
        state = torch.get_rng_state()
        optimizer.backward(torch.stack([one.sum() for one in given]).sum())
        optimizer.step()
        searched: list[Tensor] = []
        find = watch_module.find_overflow
        monkeypatch.setattr(
            watch_module, "find_overflow", lambda model, x: (searched.append(_output(model, x)), find(model, x))[1]
        )
        with pytest.warns(SkippedStepWarning, match="step 2 was skipped: exp"):
            seen.step(optimizer)
        assert torch.equal(torch.get_rng_state(), state)
    assert len(searched) == 3, "the rest need not be searched"
    assert all(torch.equal(a, b) for a, b in zip(searched[:2], given[:2], strict=True))


def _output(model: AmpModule, x: Tensor) -> Tensor:
    with torch.random.fork_rng(), torch.no_grad():
        return model(x)


def test_an_overflow_at_the_floor_of_the_scale_is_explained() -> None:
    model = converted()
    optimizer = LossScalingOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4), DynamicLossScale(init=1.0))
    with (
        pytest.warns(SkippedStepWarning, match="step 2 was skipped: exp"),
        pytest.raises(LossScaleError, match="floor"),
    ):
        _train_in(seen := watch(model), optimizer, batches(planted=(2,)))
    assert [(one.step, one.found and one.found.name) for one in seen.skipped] == [(2, "exp")]
    with (
        pytest.warns(SkippedStepWarning, match="step 3 was skipped: exp"),
        pytest.raises(LossScaleError, match="floor"),
    ):
        _train_in(seen := watch(model), optimizer, batches(planted=(3,)), is_told=False)
    assert [one.step for one in seen.skipped] == [3]
    seen = watch(model)
    with pytest.raises(LossScaleError, match="no loss was scaled"):
        _step_unscaled_in(seen, optimizer)
    assert seen.skipped == ()


def _step_unscaled_in(seen: Watch, optimizer: LossScalingOptimizer) -> None:
    with seen:
        seen._model(torch.ones(4, 8)).sum().backward()
        optimizer.step()


def _train_in(seen: Watch, optimizer: LossScalingOptimizer, inputs: Iterator[Tensor], is_told: bool = True) -> None:
    with seen:
        for x in inputs:
            optimizer.zero_grad()
            optimizer.backward(seen._model(x).square().mean())
            optimizer.step()
            if is_told:
                seen.step(optimizer)


class Grows(nn.Module):
    """Its gradient grows a thousand times in a product, and is lost in float16 behind it; values stay small.

    Args:
        where: what the output is nested in.
    """

    def __init__(self, where: str = "tensor") -> None:
        super().__init__()
        self.first, self.last, self.where = nn.Linear(16, 16), nn.Linear(16, 16), where

    def forward(self, x: Tensor, loss: float = 1.0) -> Any:
        y = self.last(torch.relu(self.first(x)) * 1e3) * loss
        return {"tensor": y, "tuple": (x.new_zeros(2), y), "dict": {"kept": x.sum(), "y": y}}[self.where]


def grown(where: str = "tensor", **options: Any) -> AmpModule:
    torch.manual_seed(0)
    return convert(Grows(where), (torch.ones(4, 16),), dtype=torch.float16, **options)


def train_grown(model: AmpModule, seen: Watch, kind: str, factor: float = 1e-2, calls: int = 1) -> None:
    scale = 2.0**16
    sgd, scaler = torch.optim.SGD(model.parameters(), lr=1e-6), GradScaler("cpu", init_scale=scale)
    optimizer = LossScalingOptimizer(sgd, StaticLossScale(scale))
    torch.manual_seed(1)
    for _ in range(3):
        sgd.zero_grad()
        for _ in range(calls):
            output = model(torch.randn(4, 16))
            loss = factor * pytree.tree_leaves(output)[-1].square().mean() / calls
            if kind == "optimizer":
                optimizer.backward(loss)
            else:
                scaler.scale(loss).backward()
        if kind == "optimizer":
            optimizer.step()
        else:
            scaler.step(sgd)
            scaler.update()
        seen.step(optimizer if kind == "optimizer" else scaler)


BEGINS = "on the way back, Inf and NaN begin with the gradient of relu (relu) in module (root)"


@pytest.mark.parametrize("kind", ["optimizer", "scaler"])
@pytest.mark.parametrize(("where", "calls"), [("tensor", 1), ("tuple", 2), ("dict", 1)])
def test_a_gradient_that_overflows_is_named_from_the_second_skipped_step_on(kind: str, where: str, calls: int) -> None:
    model = grown(where)
    with watch(model) as seen:
        train_grown(model, seen, kind, calls=calls)
    assert [one.gradient.node for one in seen.skipped] == ["", "relu", "relu"]
    assert [one.gradient.says for one in seen.skipped] == ["", BEGINS, BEGINS]
    assert [one.found for one in seen.skipped] == [None] * 3
    assert str(seen).endswith(f"the loss or a gradient overflowed\n  {BEGINS} (2 of them)")
    compared = compare(None, model, torch.randn(4, 16), gradients=True, scale=2.0**12)
    assert compared.first_non_finite_gradient is not None
    assert compared.first_non_finite_gradient.name == "relu", "as compare names it"


def test_a_loss_that_overflows_is_told_from_a_gradient() -> None:
    model = grown()
    with watch(model) as seen:
        train_grown(model, seen, "optimizer", factor=1e36)
    assert [one.gradient.says for one in seen.skipped][1:] == [
        "on the way back, Inf and NaN begin in the loss, behind the model's output"
    ] * 2


def test_gradients_of_outputs_are_kept_only_once_they_may_be_needed_and_until_the_step_ends() -> None:
    model = grown()
    with watch(model) as seen:
        model(torch.randn(4, 16)).sum().backward()
        assert seen._calls[-1].gradients == {}
        train_grown(model, seen, "scaler")
        model(torch.randn(4, 16)).sum().backward()
        assert list(seen._calls[-1].gradients) == [0]
        with torch.no_grad():
            model(torch.randn(4, 16))
        seen.step()
        assert not seen._calls


def test_a_node_is_warned_of_once() -> None:
    model = converted()
    with watch(model, every=4) as seen, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with_optimizer(model, seen, batches(planted=(2, 3, 7)))
    assert [str(one.message)[:22] for one in warned] == ["step 2 was skipped: exp"[:22]]
    assert len(seen.skipped) == 3


def test_an_observed_call_gives_the_same_to_the_bit() -> None:
    plain, observed = converted(dropout=0.5), converted(dropout=0.5)
    results: list[list[Tensor]] = []
    for model in (plain, observed):
        torch.manual_seed(3)
        seen = watch(model, every=1) if model is observed else None
        output = model(torch.ones(4, 8))
        output.sum().backward()
        results.append([output, *(p.grad for p in model.parameters() if p.grad is not None)])
        if seen is not None:
            seen.stop()
            assert len(seen.rows) > 5
    assert len(results[0]) == 5
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_one_call_in_every_runs_node_by_node_and_counts_are_read_once_in_every() -> None:
    model, reads, seen_by_node = converted(), list[int](), list[bool]()
    read = watch_module.read_counts
    with pytest.MonkeyPatch.context() as patch, watch(model, every=4) as seen:
        patch.setattr(watch_module, "read_counts", lambda counts: (reads.append(len(counts)), read(counts))[1])
        for x in batches(planted=()):
            model.register_forward_pre_hook(lambda *_: seen_by_node.append(bool(model._observers)))
            model(x).sum().backward()
            seen.step()
            model._forward_pre_hooks.popitem()
    assert seen_by_node == [True, False, False, False, True, False, False, False, True]
    assert len([count for count in reads if count]) == 2, "the third is read when somebody asks"
    assert row(seen, "exp").elements == 3 * 4 * 16


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        (None, ["x_float16", "first_weight_float16", "first_bias_float16", "linear", "exp"]),
        (["exp"], ["exp"]),
        (["linear"], ["linear", "linear_1"]),
        (["linear_1"], ["linear_1"]),
        (["cast", "exp"], ["x_float16", "first_weight_float16", "first_bias_float16", "exp"]),
    ],
)
@pytest.mark.parametrize("weights", ["cast", "cached"])
def test_the_nodes_can_be_chosen(nodes: list[str] | None, names: list[str], weights: str) -> None:
    model = converted(weights=weights)
    with watch(model, nodes=nodes) as seen:
        model(torch.ones(4, 8)).sum().backward()
    assert [row.name for row in seen.rows][: len(names)] == names
    assert all(row.dtype == "float16" or nodes for row in seen.rows)
    assert ("linear_1_float32" in [row.name for row in seen.rows]) is (nodes is not None and "cast" in nodes)
    assert all(row.module == "first" for row in seen.rows if row.name in ("x_float16", "first_weight_float16"))


@pytest.mark.parametrize("weights", ["cast", "cached"])
def test_what_a_cast_loses_is_counted(weights: str) -> None:
    model = converted(weights=weights)
    with torch.no_grad():
        model.get_parameter("first.weight")[0] = torch.tensor([0.0, 1e-9, 1e-7, 1e-6, 1e-5, 1.0, 0.0, 1e6])
    with watch(model) as seen:
        model(torch.ones(4, 8)).sum().backward()
    found = row(seen, "first_weight_float16")
    assert (found.overflow, found.underflow, found.first_overflow) == (1, 4, 1)


def test_what_a_model_does_after_the_watch_or_in_a_copy_is_not_seen() -> None:
    model = converted()
    with watch(model, every=1) as seen:
        model(torch.ones(4, 8)).sum().backward()
        for other in (copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))):
            other(torch.ones(4, 8)).sum().backward()
    model(torch.ones(4, 8)).sum().backward()
    assert row(seen, "exp").elements == 64
    assert str(seen).startswith("1 steps, 1 of them observed (1 in 1), 0 skipped\n")
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    assert not model._observers


def test_a_call_that_raises_is_not_observed_on() -> None:
    model = converted()
    with watch(model, every=5) as seen:
        with pytest.raises(TypeError):
            model()
        assert not model._observers
        model(torch.ones(4, 8)).sum().backward()
    assert seen.rows == ()


def test_what_is_compiled_is_not_observed_and_compiles_whole() -> None:
    model = converted()
    with watch(model, every=1) as seen:
        compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.equal(compiled(torch.ones(4, 8)), model(torch.ones(4, 8)))
        compiled(torch.ones(4, 8)).sum().backward()
    assert row(seen, "exp").elements == 64, "of the plain call"
    torch.compiler.reset()


def test_the_inputs_kept_hold_no_graph() -> None:
    model = converted()
    x = torch.ones(4, 8, requires_grad=True) * 2
    with watch(model) as seen:
        model(x).sum().backward()
        (call,) = seen._calls
        assert call.args[0].grad_fn is None
        assert call.args[0].data_ptr() == x.data_ptr()
    assert not seen._calls


def test_of_a_step_of_many_calls_the_last_inputs_are_kept() -> None:
    model = converted()
    with watch(model, nodes=["exp"]) as seen:
        seen.step()
        for _ in range(70):
            model(torch.ones(4, 8))
        assert len(seen._calls) == 64


def test_a_model_without_inputs_is_watched_from_its_first_call() -> None:
    torch.manual_seed(0)
    model = convert(Network(), dtype=torch.float16, op_list=["default", LISTED])
    with watch(model, nodes=["exp"]) as seen:
        model(torch.ones(4, 8)).sum().backward()
    assert [row.name for row in seen.rows] == ["exp"]


def test_what_cannot_be_watched_is_refused() -> None:
    model = converted()
    with pytest.raises(
        TypeError, match="watch takes what convert\\(\\) returned, not a Linear: convert the model first"
    ):
        watch(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"nodes is a sequence of names: write \['exp'\]"):
        watch(model, nodes="exp")
    with pytest.raises(ValueError, match="no node and no op called 'lineer' \\(did you mean 'linear'\\?\\)"):
        watch(model, nodes=["lineer"])
    for every in (0, True, 1.5):
        with pytest.raises(ValueError, match="every is a whole number of steps above 0, not"):
            watch(model, every=every)  # type: ignore[arg-type]
    assert not model._forward_pre_hooks


def test_who_does_not_know_of_skipped_steps_is_refused() -> None:
    model = converted()
    with watch(model) as seen:
        for other in (torch.optim.SGD(model.parameters()), torch.amp.GradScaler("cpu")):
            with pytest.raises(TypeError, match=r"which know whether a step was skipped, not torch\.\S+\.(SGD|GradSc)"):
                seen.step(other)  # type: ignore[arg-type]
