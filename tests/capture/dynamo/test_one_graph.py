"""What a model's code may do around its one graph: messages, state, errors; and plain functions of tensors."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable
from logging.handlers import BufferingHandler
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from autocastfx.errors import CaptureError, UnsupportedError
from tests.helpers import heard

X = torch.linspace(-2, 2, 128).view(16, 8)
LOG = logging.getLogger("of a model")
LAYER = nn.Linear(8, 8)
WEIGHT = torch.ones(8, 8, requires_grad=True)
SCALE = 2.0


class Net(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.register_buffer("average", torch.ones(8))
        self.kept, self.last = torch.ones(8), torch.ones(8)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, self.linear(x))


def convert(function: Callable[..., Any]) -> autocastfx.AmpModule:
    return autocastfx.convert(Net(function), X, dtype="bfloat16", check=False)


# -- messages ---------------------------------------------------------------------------------------------------------


def says(m: Net, x: Tensor) -> Tensor:
    print("sizes", x.shape, [len(x)])
    LOG.info("sizes %s", x.shape)
    warnings.warn("careful", FutureWarning, stacklevel=2)
    return x + 1


def test_what_forward_says_is_said_in_each_call_by_one_graph(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = convert(says)
    assert not capsys.readouterr().out
    logged = BufferingHandler(10)
    monkeypatch.setattr(LOG, "handlers", [logged])
    monkeypatch.setattr(LOG, "level", logging.INFO)
    for _ in range(2):
        with pytest.warns(FutureWarning, match="careful"):
            model(X)
    assert capsys.readouterr().out == "sizes torch.Size([16, 8]) [16]\n" * 2
    assert [one.getMessage() for one in logged.buffer] == ["sizes torch.Size([16, 8])"] * 2
    assert len(model.variants) == 1


def test_a_message_with_keywords_is_refused() -> None:
    with pytest.raises(CaptureError, match="a call of print with end"):
        convert(lambda m, x: print("x", end="") or x)


# -- state ------------------------------------------------------------------------------------------------------------


def assigns(m: Net, x: Tensor) -> Tensor:
    m.average = m.average * 0.9 + x.detach().mean(0) * 0.1
    m.kept = m.kept * 0.9 + x.detach().mean(0) * 0.1
    m.last = x.detach() * 2
    return x


def test_what_is_assigned_to_state_is_computed_in_float32() -> None:
    plan = convert(assigns).plan
    forced = [node.decision.reason for node in plan.nodes if str(node.decision.source) == "forced:update"]
    assert sum("leads to average: it computes the next contents of average" in one for one in forced) >= 3
    assert sum("leads to kept: it computes the next contents of kept" in one for one in forced) >= 2
    assert not any("last" in one for one in forced)


def test_rules_for_the_class_of_the_model_itself_hold() -> None:
    model = autocastfx.convert(
        Net(lambda m, x: x.exp()),
        X,
        dtype="bfloat16",
        op_list=["default", autocastfx.OpList.of({"deny": [f"{__name__}.Net"]})],
    )
    assert {str(node.placement.run) for node in model.plan.nodes} == {"float32"}


# -- errors -----------------------------------------------------------------------------------------------------------


class OwnError(Exception):
    pass


def raises(m: Net, x: Tensor) -> Tensor:
    raise OwnError("too wide", x.shape[1])


def asserts(m: Net, x: Tensor) -> Tensor:
    assert x.shape[1] == 9
    return x


def chosen_rows(m: Net, x: Tensor) -> Tensor:
    (rows,) = torch.where(x[:, 0] > 0)
    return x.index_add(0, rows, x[rows]) if rows.numel() else x


HERE = r"\nAt .*test_one_graph\.py:\d+: .*, called with x=float32\[16, 8\]\n"
ITSELF = "Call the model itself with these inputs: if that fails too"
VALUES = "Its control flow depends on tensor values"
ERRORS: dict[str, tuple[Callable[..., Any], str]] = {
    "its own": (raises, rf"Net fails: forward raises OwnError\('too wide', 8\){HERE}{ITSELF}"),
    "an assertion": (asserts, f"Net fails: .*assert.*{HERE}{ITSELF}"),
    "a size": (lambda m, x: x @ torch.zeros(5, 2), rf"Net fails: .*\[16, 8\] X \[5, 2\]\.{HERE}{ITSELF}"),
    "a size of the data": (chosen_rows, f"in one graph: Could not guard on data-dependent .*{HERE}{VALUES}"),
    "a branch": (lambda m, x: x if x.sum() > 0 else -x, f"in one graph: Data-dependent branching.*{HERE}{VALUES}"),
    "equality": (
        lambda m, x: x if torch.equal(x, x) else -x,
        f"Could not guard on data-dependent expression.*{HERE}{VALUES}",
    ),
    "a clock": (lambda m, x: x * __import__("time").time(), f"{HERE}Write this line so that one graph holds it"),
}


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_an_error_says_what_where_and_what_next(name: str) -> None:
    function, said = ERRORS[name]
    with pytest.raises(CaptureError, match=said):
        convert(function)


class UnlikeError(Exception):
    def __init__(self, what: str, size: int) -> None:  # Dynamo does not follow this
        super().__init__(what)
        self.size = size


def refuses(m: Net, x: Tensor) -> Tensor:
    m.calls.add_(1)
    if x.shape[1] == 8:
        raise UnlikeError("too wide", 8) from KeyError("width")
    return x


REFUSALS: dict[str, tuple[Callable[..., Any], type[Exception]]] = {
    "an exception": (raises, OwnError),
    "one of a class that Dynamo does not follow": (refuses, UnlikeError),
    "an assertion": (asserts, AssertionError),
    "a key": (lambda m, x: x * {"a": 1.0}[str(x.shape[1])], KeyError),
    "a division": (lambda m, x: x * (1 / (x.shape[1] - 8)), ZeroDivisionError),
}


@pytest.mark.parametrize("with_gradients", [True, False])
@pytest.mark.parametrize("name", REFUSALS)
def test_a_call_raises_what_the_model_raises(name: str, with_gradients: bool) -> None:
    function, kind = REFUSALS[name]
    model = Net(function)
    model.register_buffer("calls", torch.zeros(()))
    amp_model = autocastfx.convert(model, dtype="bfloat16")
    with torch.set_grad_enabled(with_gradients):
        with pytest.raises(kind) as expected:
            model(X)
        with pytest.raises(kind) as found:
            amp_model(X)
    assert found.value.args == expected.value.args
    assert vars(found.value) == vars(expected.value)
    assert repr(found.value.__cause__) == repr(expected.value.__cause__)
    assert found.traceback[-1].lineno == expected.traceback[-1].lineno  # the model's own line
    assert not isinstance(found.value.__context__, CaptureError)
    assert model.calls in (0, 2)  # once by each


class DoneError(Exception):
    pass


def leaves_early(m: Any, x: Tensor) -> Tensor:
    m.count.add_(1)
    m.history.append(x.shape[0])
    if x.shape[0] == 3:
        raise DoneError(m.layer(x))
    return m.layer(x)


def test_a_call_that_raises_leaves_what_the_model_leaves() -> None:
    model = Net(leaves_early)
    model.register_buffer("count", torch.zeros(()))
    model.layer, model.history = nn.Linear(8, 8), list[int]()
    amp_model = autocastfx.convert(model, dtype="bfloat16")
    for rows in (4, 3, 4, 3):
        try:
            amp_model(X[:rows])
        except DoneError as done:
            done.args[0].sum().backward()  # an early exit, with what was computed
    assert model.count == 4
    assert model.history == [4, 3, 4, 3]
    assert model.layer.bias.grad.equal(torch.full((8,), 6.0))


def test_a_call_that_the_model_takes_is_told_why_it_is_not_captured() -> None:
    model = Net(lambda m, x: x + m.count.add_(1) if x.sum() > 0 else -x)
    model.register_buffer("count", torch.zeros(()))
    with pytest.raises(CaptureError, match=VALUES):
        autocastfx.convert(model, dtype="bfloat16")(X)
    assert model.count == 0  # the model was tried on copies


def test_the_module_is_named_where_torchs_code_fails() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Linear(9, 2)))
    with pytest.raises(CaptureError, match=r"\nIn module '1\.1' \(Linear\), called with input=float32\[3, 4\]\n"):
        autocastfx.convert(model, torch.randn(3, 4), dtype="bfloat16")


def test_arguments_that_do_not_fit_are_pythons_own_error() -> None:
    model = convert(lambda m, x: x)
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        model()
    with pytest.raises(TypeError, match="unexpected keyword argument 'y'"):
        model(X, y=1)


# -- plain functions --------------------------------------------------------------------------------------------------


def scaled(x: Tensor) -> Tensor:
    return x @ x.mT * SCALE


def test_a_function_follows_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    model = autocastfx.convert(scaled, X, dtype="bfloat16")
    for value in (2.0, 5.0, 7.0):
        monkeypatch.setattr(f"{__name__}.SCALE", value)
        assert (model(X) - scaled(X)).abs().max() < 0.02 * scaled(X).abs().max()


@pytest.mark.parametrize(
    "function", [lambda x: LAYER(x), lambda x: x @ WEIGHT, lambda x: (lambda w=WEIGHT: x @ w)()], ids=["a", "b", "c"]
)
def test_a_function_that_reads_what_is_trained_is_refused(function: Callable[..., Any]) -> None:
    said = (
        r"the function function reads a tensor from around it that requires a gradient \(\[8, 8\], at .*\)\. .*Module"
    )
    with pytest.raises(UnsupportedError, match=said):
        autocastfx.convert(function, X, dtype="bfloat16")
    late = autocastfx.convert(function, dtype="bfloat16")
    with pytest.raises(UnsupportedError, match=said):
        late(X)


def test_methods_and_compiled_functions_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"forward is a method of a Linear.*: convert the module"):
        autocastfx.convert(LAYER.forward, X)
    with pytest.raises(UnsupportedError, match=r"scaled is compiled by torch\.compile already"):
        autocastfx.convert(torch.compile(scaled), X)


def test_a_further_capture_tells_why() -> None:
    model = convert(lambda m, x: x * 2 if x.shape[0] > 20 else x)
    with heard() as lines:
        model(torch.ones(30, 8))
    assert any(line.startswith("capturing variant 2: it does not hold that ") for line in lines)


def test_an_operator_that_takes_no_symbols_is_captured_for_each_size() -> None:
    generator = torch.Generator()
    model = Net(lambda m, x: m.linear(x) + torch.randn(x.shape, generator=generator))
    amp_model = autocastfx.convert(model, dtype="bfloat16")
    for size in (16, 5, 7):
        results: list[Any] = []
        for one in (amp_model, model):
            generator.manual_seed(size)
            results.append(one(X[:size]))
        torch.testing.assert_close(*results, rtol=0.05, atol=0.05)


def test_what_may_be_written_without_gradients_alone_is_captured_without() -> None:
    model = Net(lambda m, x: m.linear.weight.mul_(0.5) @ x.add_(1).T)
    expected = copy.deepcopy(model)
    amp_model = autocastfx.convert(model, dtype="bfloat16")
    with torch.no_grad():
        for size in (16, 5):
            own, plain = X[:size].clone().requires_grad_(), X[:size].clone().requires_grad_()
            torch.testing.assert_close(amp_model(own), expected(plain), rtol=0.05, atol=0.05)
            assert torch.equal(own, plain)
    assert torch.equal(*(next(one.parameters()) for one in (model, expected)))
