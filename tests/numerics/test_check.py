"""``check`` and ``convert(check=)``: what a captured graph does otherwise than its model is found."""

from __future__ import annotations

import itertools
import json
import logging
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

import autocastfx
from autocastfx.errors import CalibrationError, CaptureError, SensitivityError, UncheckedWarning, UnsupportedError
from autocastfx.numerics.check import Check, CheckedValue
from autocastfx.runtime import behaviour, captures
from tests.helpers import heard

aten: Any = torch.ops.aten


class Net(nn.Module):
    """A little of everything that a graph could lose."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.25)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("average", torch.ones(8))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor, y: Tensor, mask: Tensor, seen: Tensor) -> dict[str, Tensor]:
        self.steps += 1
        hidden = self.drop(torch.relu(self.a(x))) - torch.tanh(y)
        hidden = self.norm(hidden) * self.scale
        self.average.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        seen.add_(1)
        hidden = torch.where(mask, hidden, -1.0)
        share = torch.softmax(self.b(hidden), -1)
        return {"share": share, "loss": (share * share).sum(-1).clamp(min=0.6).mean(), "steps": self.steps * 2}


def inputs(rows: int = 6) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(0)
    x, y = (torch.randn(rows, 8, generator=random) for _ in range(2))
    return x, y, torch.rand(rows, 8, generator=random) > 0.3, torch.zeros(3)


def _node(graph: fx.Graph, target: Any, which: int = 0) -> fx.Node:
    return [node for node in graph.nodes if node.target == target][which]


def _reads(graph: fx.Graph, node: fx.Node, argument: int, other: Any) -> None:
    args = list(node.args)
    args[argument] = other
    node.args = tuple(args)


def _swap(graph: fx.Graph, target: Any) -> None:
    node = _node(graph, target)
    node.args = (node.args[1], node.args[0], *node.args[2:])


def _drop(graph: fx.Graph, target: Any, which: int = 0) -> None:
    node = _node(graph, target, which)
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    graph.erase_node(node)


def _after(graph: fx.Graph, node: fx.Node, target: Any) -> fx.Node:
    """Put a call that gives a value like that of ``node`` behind it."""
    with graph.inserting_after(node):
        made = graph.call_function(target, (node,))
    made.meta = dict(node.meta)
    return made


def _constant(graph: fx.Graph, name: str) -> None:
    """The input as it was at capture."""
    placeholder = next(node for node in graph.nodes if node.op == "placeholder" and node.name == name)
    made = _after(graph, placeholder, aten.zeros_like.default)
    placeholder.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)


def _same(graph: fx.Graph) -> None:
    """The second input read for the first one, as if one tensor had been given for both."""
    x, y = (node for node in graph.nodes if node.op == "placeholder" and node.name in ("x", "y"))
    y.replace_all_uses_with(x)


def _detach(graph: fx.Graph) -> None:
    node = _node(graph, aten.relu.default)
    made = _after(graph, node, aten.detach.default)
    node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)


def _extra_random(graph: fx.Graph) -> None:
    _after(graph, _node(graph, aten.linear.default), aten.rand_like.default)


def _swap_outputs(graph: fx.Graph) -> None:
    (output,) = [node for node in graph.nodes if node.op == "output"]
    output.args = (tuple(reversed(output.args[0])),)


FAULTS: dict[str, Callable[[fx.Graph], None]] = {
    "a swapped subtraction": lambda g: _swap(g, aten.sub.Tensor),
    "an input that is another": _same,
    "an input that is a constant": lambda g: _constant(g, "y"),
    "a mask that is a constant": lambda g: _constant(g, "mask"),
    "a lost activation": lambda g: _drop(g, aten.relu.default),
    "a lost dropout": lambda g: _drop(g, aten.dropout.default),
    "another share dropped": lambda g: _reads(g, _node(g, aten.dropout.default), 1, 0.5),
    "a baked flag of dropout": lambda g: _reads(g, _node(g, aten.dropout.default), 2, False),
    "a baked flag of a norm": lambda g: _reads(g, _node(g, aten.batch_norm.default), 5, False),
    "another momentum": lambda g: _reads(g, _node(g, aten.batch_norm.default), 6, 0.5),
    "another epsilon": lambda g: _reads(g, _node(g, aten.batch_norm.default), 7, 0.1),
    "a lost write into a counter": lambda g: _drop(g, aten.add_.Tensor, 0),
    "a lost write into an average": lambda g: _drop(g, aten.mul_.Tensor),
    "a lost write into an argument": lambda g: _drop(g, aten.add_.Tensor, -1),
    "another dimension": lambda g: _reads(g, _node(g, aten.softmax.int), 1, 0),
    "a lost limit": lambda g: _drop(g, aten.clamp.default),
    "a lost gradient": _detach,
    "another random stream": _extra_random,
    "outputs in another order": _swap_outputs,
    "another number": lambda g: _reads(g, _node(g, aten.mul.Tensor, -1), 1, 3),
}


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[fx.Graph], None]], None]:
    """Edit each captured graph."""
    own = captures._graph_of

    def plant(edit: Callable[[fx.Graph], None]) -> None:
        def graph_of(*args: Any, **kwargs: Any) -> Any:
            found = own(*args, **kwargs)
            edit(found.captured.graph)
            found.captured.graph.lint()
            return found

        monkeypatch.setattr(captures, "_graph_of", graph_of)

    return plant


def test_a_right_capture_passes() -> None:
    found = autocastfx.check(Net(), [inputs(), inputs(4)], dtype="bfloat16")
    assert found.ok, str(found)
    assert found.differences == ()
    assert len(found.calls) == 14  # forward alone, where what is written into would learn


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, planted: Callable[[Callable[[fx.Graph], None]], None]) -> None:
    planted(FAULTS[fault])
    model = Net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CaptureError, match=r"the graph captured of Net does not do what the model does: "):
        autocastfx.convert(model, inputs(), dtype="bfloat16", check=True)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    found = autocastfx.check(model, [inputs()], dtype="bfloat16")
    assert not found.ok
    assert found.differences


def test_the_difference_is_named(planted: Callable[[Callable[[fx.Graph], None]], None]) -> None:
    planted(FAULTS["a lost write into an average"])
    found = autocastfx.check(Net(), [inputs()], dtype="bfloat16")
    assert str(found.differences[0]).startswith("buffer average differs by ")
    assert "check of Net in bfloat16: WRONG" in str(found)
    held = json.loads(found.to_json())
    assert not held["ok"]
    assert held["differences"][0]["what"] == "buffer average"


def test_without_a_check_it_is_handed_out(planted: Callable[[Callable[[fx.Graph], None]], None]) -> None:
    planted(FAULTS["a swapped subtraction"])
    autocastfx.convert(Net(), inputs(), dtype="bfloat16", check=False)


def test_a_large_model_is_checked_when_asked(
    planted: Callable[[Callable[[fx.Graph], None]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(FAULTS["a swapped subtraction"])
    monkeypatch.setattr("autocastfx.conversion._CHECKED", 100)
    autocastfx.convert(Net(), inputs(), dtype="bfloat16")
    with pytest.raises(CaptureError):
        autocastfx.convert(Net(), inputs(), dtype="bfloat16", check=True)


def test_a_check_that_cannot_be_made_is_refused() -> None:
    for options in ({"weights": "low"}, {}):
        given = (inputs(),) if options else ()
        with pytest.raises(UnsupportedError, match="check=True compares the graph with the model in a call"):
            autocastfx.convert(Net().eval(), *given, dtype="bfloat16", check=True, **options)
    with pytest.raises(ValueError, match="check is None, True or False, not 'yes'"):
        autocastfx.convert(Net(), inputs(), check="yes")  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match=r"check=True could compare no call: .*the model gives Inf or NaN"):
        autocastfx.convert(Refuses(), torch.zeros(2, 4) + 2, dtype="bfloat16", check=True)


def test_what_was_compared_is_logged() -> None:
    with heard() as lines:
        autocastfx.convert(Net(), inputs(), dtype="bfloat16", check=True)
    (told,) = [line for line in lines if line.startswith("compared with the model")]
    for call in ("other values, in training", "the values given, in training", "other values, in evaluation"):
        assert call in told


class Refuses(nn.Module):
    """Takes sorted numbers alone, and has one call whose result is no number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(self.linear(x).abs().sum() * (x[0, 0] == 1))


def test_what_the_model_cannot_do_is_dropped_and_told() -> None:
    found = autocastfx.check(Refuses(), [torch.ones(2, 4) + torch.eye(2, 4)[[1, 0]]], dtype="bfloat16")
    assert found.differences == ()
    assert any("the model gives Inf or NaN" in one for one in found.dropped)


def _cross_entropy(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(output, batch[1])


def test_a_loss_function_is_where_gradients_begin() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
    batches = [(torch.randn(16, 8), torch.randint(4, (16,))) for _ in range(2)]
    for dtype in ("float16", "bfloat16"):
        found = autocastfx.check(model, batches, _cross_entropy, dtype=dtype, inputs=lambda batch: batch[0])
        assert found.ok, str(found)
        assert {one.name for one in found.values} >= {"output", "all gradients", "gradient of 0.weight"}


def test_a_loss_that_cannot_be_computed_is_an_error() -> None:
    model, batches = nn.Linear(8, 4), [torch.randn(6, 8)]
    with pytest.raises(SensitivityError, match="loss_fn returns one number"):
        autocastfx.check(model, batches, lambda output, batch: output, dtype="bfloat16")
    with pytest.raises(ZeroDivisionError):
        autocastfx.check(model, batches, lambda output, batch: output.sum() / (1 // 0), dtype="bfloat16")


def test_everything_is_as_it_was() -> None:
    model = Net()
    model.a.weight.grad = torch.ones(8, 8)
    model.norm.eval()
    given = inputs()
    before = [t.clone() for t in (*model.state_dict().values(), *given)], torch.get_rng_state()
    flags = [module.training for module in model.modules()]
    autocastfx.check(model, [given], dtype="bfloat16")
    after = [*model.state_dict().values(), *given]
    assert all(torch.equal(a, b) for a, b in zip(before[0], after, strict=True))
    assert torch.equal(before[1], torch.get_rng_state())
    assert [module.training for module in model.modules()] == flags
    assert torch.equal(model.a.weight.grad, torch.ones(8, 8))
    assert all(p.grad is None for name, p in model.named_parameters() if name != "a.weight")


def test_a_converted_model_is_checked_with_its_original() -> None:
    amp_model = autocastfx.convert(Net(), inputs(), dtype="bfloat16")
    assert autocastfx.check(amp_model, [inputs(3)]).ok
    with pytest.raises(UnsupportedError, match="leave the options of a conversion out"):
        autocastfx.check(amp_model, [inputs()], dtype="float16")


def test_no_batches_are_an_error() -> None:
    with pytest.raises(CalibrationError, match="there are no batches to check with"):
        autocastfx.check(Net(), [])


class QualityIndex(nn.Module):
    """The universal quality index of two pictures: its own float32 gradient is off by more than 1e-5."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Conv2d(1, 1, 3, padding=1, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        p = self.net(x)

        def total(t: Tensor) -> Tensor:
            return functional.conv2d(t, torch.ones(1, 1, 5, 5))

        a, b, n = total(p), total(y), 25
        above = 4 * (n * total(p * y) - a * b) * a * b
        below = (n * (total(p * p) + total(y * y)) - (a * a + b * b)) * (a * a + b * b)
        return 1 - (above / (below + 1e-3)).mean()


class WindowIndex(QualityIndex):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        p = self.net(x)
        variance = functional.avg_pool2d(p * p, 4) - functional.avg_pool2d(p, 4).square()
        return (functional.avg_pool2d(p * y, 4) / (variance + 1e-4)).mean()


@pytest.mark.parametrize("kind", [QualityIndex, WindowIndex])
def test_what_a_rounding_of_the_arguments_does_is_no_difference(kind: type[QualityIndex]) -> None:
    y = 0.6 + 0.01 * torch.rand(2, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    amp_model = autocastfx.convert(kind(), (y + 1e-3 * y.cos(), y), dtype=torch.bfloat16, check=True)
    assert not autocastfx.check(amp_model, [(y + 1e-3 * y.sin(), y)]).differences


class Named(dict[str, Any]):
    """An output as packages have them, known to torch's trees, but without the names of its members."""


torch.utils._pytree.register_pytree_node(
    Named, lambda held: (list(held.values()), list(held)), lambda values, keys: Named(zip(keys, values, strict=True))
)


class Returns(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.a, self.make = nn.Linear(8, 4), make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.a(x))


@pytest.mark.parametrize(
    "make",
    [
        lambda y: Named(sample=y),
        lambda y: {"first": Named(sample=y, more=(y * 2, None)), "second": [y]},
        lambda y: (Named(inner=Named(sample=y)), "text"),
    ],
)
def test_outputs_whose_members_have_no_names_are_compared(make: Callable[[Tensor], Any]) -> None:
    x = torch.randn(4, 8)
    found = autocastfx.check(Returns(make), [(x,)], dtype="bfloat16")
    assert found.ok, found
    assert not found.dropped
    assert any(one.name.startswith("output[") for one in found.values)
    autocastfx.convert(Returns(make), (x,), dtype="bfloat16", check=True)


class Calls(nn.Module):
    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.call = nn.Linear(4, 4), call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.a(x))


def _refuse(y: Tensor) -> Tensor:
    if not torch.compiler.is_exporting():
        raise RuntimeError("not these numbers")
    return y


UNCOMPARABLE: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "not finite": (lambda y: torch.log(-y.abs()), "the model gives Inf or NaN"),
    "refused": (lambda y: _refuse(y), "the model raises RuntimeError: not these numbers"),
}


@pytest.mark.parametrize("kind", UNCOMPARABLE)
def test_a_conversion_that_was_compared_with_nothing_says_so(kind: str) -> None:
    call, why = UNCOMPARABLE[kind]
    with pytest.warns(
        UncheckedWarning, match=f"the conversion of Calls was not compared with the model: .*{why}"
    ) as told:
        autocastfx.convert(Calls(call), torch.randn(2, 4), dtype="bfloat16")
    assert [one.filename for one in told] == [__file__]
    autocastfx.convert(Calls(call), torch.randn(2, 4), dtype="bfloat16", check=False)


class Draws(nn.Module):
    """Draws numbers from a source of its own, which capture does not watch."""

    def __init__(self, source: Any, *, in_training: bool) -> None:
        super().__init__()
        self.a, self.source, self.in_training = nn.Linear(4, 4), source, in_training

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * (self.source() if self.training or not self.in_training else 1.0)


@pytest.mark.parametrize("in_training", [True, False])
def test_a_model_that_does_not_repeat_itself_is_refused(in_training: bool) -> None:
    model, x = Draws(itertools.count(1).__next__, in_training=in_training), torch.randn(2, 4)
    with pytest.raises(CaptureError, match=r"output differs by .* of its norm when the model itself is called again"):
        autocastfx.convert(model, x, dtype="bfloat16")
    assert not autocastfx.check(model, [x], dtype="bfloat16").ok


@pytest.mark.filterwarnings("default:Dynamo does not know how to trace")
@pytest.mark.parametrize("source", [random.SystemRandom().random, random.Random(0).random])
def test_a_source_that_no_graph_holds_is_refused_with_its_line(source: Callable[[], float]) -> None:
    model, x = Draws(source, in_training=True), torch.randn(2, 4)
    with pytest.raises(CaptureError, match=r"Draws cannot be captured in train mode, in one graph: (.|\n)*self.source"):
        autocastfx.convert(model, x, dtype="bfloat16")


@pytest.mark.parametrize("place", ["leaf_paths", "_buffers", "differences"])
def test_a_fault_of_the_comparison_is_not_taken_for_the_models(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise TypeError("a fault of ours")

    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    monkeypatch.setattr(behaviour, place, fails)
    with (
        heard(level=logging.ERROR) as lines,
        pytest.warns(UncheckedWarning, match=r"which is a fault of autocastfx: TypeError: a fault of ours"),
    ):
        autocastfx.convert(model, x, dtype="bfloat16")
    assert "the comparison with the model failed" in lines
    with pytest.raises(TypeError, match="a fault of ours"):
        autocastfx.convert(model, x, dtype="bfloat16", check=True)
    with pytest.raises(TypeError, match="a fault of ours"):
        autocastfx.check(model, [x], dtype="bfloat16")


class Chooses(nn.Module):
    """Gives scores of which some are minus infinity, as those of masked choices are."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).masked_fill(torch.tensor([False, True, False, False]), -torch.inf)


def test_outputs_that_mask_are_compared(planted: Callable[[Callable[[fx.Graph], None]], None]) -> None:
    found = autocastfx.check(Chooses(), [torch.randn(3, 4)], dtype="bfloat16")
    assert found.ok, str(found)
    assert not found.dropped
    planted(lambda graph: _node(graph, aten.masked_fill.Scalar).update_arg(2, 0.0))
    with pytest.raises(CaptureError, match="output differs by"):
        autocastfx.convert(Chooses(), torch.randn(3, 4), dtype="bfloat16")


class Unlearnable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError("this has no gradient")


def test_a_model_without_a_backward_is_compared_forward(planted: Callable[[Callable[[fx.Graph], None]], None]) -> None:
    x = torch.randn(2, 4)
    autocastfx.convert(Calls(Unlearnable.apply), x, dtype="bfloat16", check=True)
    found = autocastfx.check(Calls(Unlearnable.apply), [x], dtype="bfloat16")
    assert "the values given, in training, forward alone" in found.calls
    planted(lambda graph: _node(graph, aten.linear.default).update_arg(2, None))
    with pytest.raises(CaptureError, match="output differs by"):
        autocastfx.convert(Calls(Unlearnable.apply), x, dtype="bfloat16")


# -- what is compared, and with what ----------------------------------------------------------------------------------


def test_evaluation_is_compared_however_little_time_there_is(
    planted: Callable[[Callable[[fx.Graph], None]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose_in_evaluation(graph: fx.Graph) -> None:
        if not any(node.args[2] for node in graph.nodes if node.target == aten.dropout.default):
            _drop(graph, aten.relu.default)

    planted(lose_in_evaluation)
    monkeypatch.setattr("autocastfx.conversion.time.perf_counter", lambda: 0.0)  # a conversion that took no time
    with pytest.raises(CaptureError, match="in evaluation"):
        autocastfx.convert(Net(), inputs(), dtype="bfloat16")


def test_a_lost_gradient_is_seen_in_a_large_one_in_short(planted: Callable[[Callable[[fx.Graph], None]], None]) -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))
    planted(_detach)
    with pytest.raises(CaptureError, match=r"gradient of 0\.weight is missing"):
        autocastfx.convert(model, torch.randn(4, 256), dtype="bfloat16")


def test_a_check_measures_evaluation_too() -> None:
    found = autocastfx.check(nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.5)), [torch.randn(6, 8)], dtype="bfloat16")
    assert {"output", "output, in evaluation"} <= {one.name for one in found.values}


def _judged(**errors: tuple[float, float]) -> Check:
    values = [CheckedValue("all gradients", 1.1e-2, 1e-2)]
    values += [CheckedValue(f"gradient of {n}", ours, theirs, 0.1, 4096) for n, (ours, theirs) in errors.items()]
    return Check("Net", "bfloat16", (), ("a call",), (), tuple(values))


def test_a_gradient_that_is_inexact_is_named_first() -> None:
    found = _judged(good=(1e-2, 1e-2), bad=(9e-2, 1e-2))
    assert [one.name for one in found.inexact] == ["gradient of bad"]
    assert str(found).startswith("check of Net in bfloat16: INEXACT: gradient of bad\n")
    assert "    gradient of bad: 0.09 (0.01)" in str(found)


def test_a_gradient_that_matters_little_or_differs_by_chance_is_exact() -> None:
    assert _judged(bad=(1.4e-2, 1e-2)).ok  # an epsilon more
    far = CheckedValue("gradient of small", 0.5, 1e-2, 1e-4, 4096)
    few = CheckedValue("gradient of few", 2.2e-2, 1e-2, 0.9, 4)
    cases = ((far, True), (replace(far, share=0.5), False), (few, True), (replace(few, elements=999), False))
    for value, is_exact in cases:
        assert replace(_judged(), values=(*_judged().values, value)).ok == is_exact, value


def test_a_gradient_that_is_rounding_in_float32_too_is_told_as_such() -> None:
    zero = CheckedValue("gradient of zero", 5e5, 2e5, 5e-8, 8)
    found = replace(_judged(), values=(*_judged().values, zero))
    assert found.ok
    assert found.noise == (zero,)
    assert str(found).startswith("check of Net in bfloat16: right\n")
    said = "zero but for rounding, in float32 too, as of a bias before a batch norm: gradient of zero"
    assert str(found).endswith(f"\n  {said}")
    for value in (
        replace(zero, share=1e-5),  # float32 knows its numbers
        replace(zero, autocast=0.9),  # torch.autocast does
        replace(zero, autocast=None),
        replace(zero, error=3e6),
        replace(zero, error=math.inf, autocast=math.inf),
    ):
        found = replace(_judged(), values=(*_judged().values, value))
        assert (found.inexact, found.noise) == ((value,), ()), value
    whole = replace(zero, name="all gradients")
    assert replace(_judged(), values=(whole,)).inexact == (whole,)


def test_the_bias_of_a_sum_that_is_zero_is_no_failure() -> None:
    class Sums(nn.Module):
        """What follows a batch norm, summed: its mean is 0, so the loss does not depend on the bias to first order."""

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm, self.last = nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.norm(self.linear(x)))

    torch.manual_seed(0)
    batches = [torch.randn(32, 16) for _ in range(2)]
    for dtype in ("float16", "bfloat16"):
        found = autocastfx.check(Sums(), batches, lambda output, _: output.square().mean(), dtype=dtype)
        assert found.ok, str(found)
        (bias,) = (one for one in found.values if one.name == "gradient of norm.bias")
        assert bias.error > 1
        assert bias.share < 1e-6


def test_an_output_is_judged_by_itself_however_far_gradients_may_be() -> None:
    output = CheckedValue("output", 1.5e-2, 1e-3)
    found = replace(_judged(), values=(CheckedValue("all gradients", 0.2, 0.2), output))
    assert found.inexact == (output,)


# -- what a check must not stumble over -------------------------------------------------------------------------------


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.a = nn.EmbeddingBag(9, 8, sparse=True), nn.Linear(8, 2)

    def forward(self, words: Tensor) -> Tensor:
        return self.a(self.table(words))


class Noisy(nn.Module):
    """Draws from generators of its own, one of them in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.mine = nn.Linear(8, 4), torch.Generator().manual_seed(3)
        self.more = [torch.Generator().manual_seed(4)]

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x + torch.randn(x.shape, generator=self.mine) * torch.rand(8, generator=self.more[0]))


CHECKED: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "sparse gradients": (
        lambda: nn.Sequential(nn.Embedding(9, 8, sparse=True), nn.Linear(8, 2)),
        torch.arange(6).view(2, 3),
    ),
    "sparse gradients of bags": (Bag, torch.arange(6).view(2, 3)),
    "an empty batch": (lambda: nn.Linear(8, 4), torch.randn(0, 8)),
    "an empty output": (lambda: Calls(lambda y: y[:0]), torch.randn(5, 4)),
    "generators of its own": (Noisy, torch.randn(6, 8)),
    "rows of one": (lambda: nn.Linear(8, 4), torch.randn(1, 8)),
}


@pytest.mark.parametrize("kind", CHECKED)
def test_no_alarm_is_false(kind: str) -> None:
    make, x = CHECKED[kind]
    torch.manual_seed(0)
    autocastfx.convert(make(), x, dtype="bfloat16")  # a warning would be an error
    autocastfx.convert(make(), x, dtype="bfloat16", check=True)
    found = autocastfx.check(make(), [x], dtype="bfloat16")
    assert found.ok, str(found)


@pytest.mark.parametrize("where", ["meta", torch.float64], ids=str)
def test_neither_default_device_nor_default_dtype_matter(where: Any) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4)), torch.randn(4, 8)
    try:
        torch.set_default_dtype(where) if isinstance(where, torch.dtype) else torch.set_default_device(where)
        amp_model = autocastfx.convert(model, x, dtype="bfloat16")
        assert autocastfx.check(model, [x], dtype="bfloat16").ok
        autocastfx.compare(model, amp_model, x, gradients=True)
        autocastfx.sensitivity(model, [x], lambda output, _: output.square().mean(), probes=2, dtype="bfloat16")
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def test_options_that_leave_nothing_to_compare_are_refused() -> None:
    for options, why in (({"check": True}, "leave check= out"), ({"weights": "low"}, "keeps no original")):
        given: dict[str, Any] = {**options}
        with pytest.raises(UnsupportedError, match=why):
            autocastfx.check(nn.Linear(8, 4), [torch.randn(2, 8)], dtype="bfloat16", **given)
