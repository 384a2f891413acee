"""What has to be float32 is found, nothing more, and in few evaluations."""

from __future__ import annotations

import copy
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from autocastfx import AmpModule, OpList, bisect
from autocastfx.errors import BisectError, EvaluationsError, UnmatchedRuleWarning, UnsupportedError
from autocastfx.numerics import bisect as bisect_module
from autocastfx.numerics.bisect import OpInModule, places_of, search_order
from autocastfx.plan.sensitivity import Effect
from tests.helpers import Net, unchecked

LISTED = OpList.of({"allow": ["exp"]}, name="mine")  # lets what needs float32 into 16 bits
LAYERS = 5


class Block(nn.Module):
    """Harmless but for an exponential, where it is planted."""

    def __init__(self, is_faulty: bool) -> None:
        super().__init__()
        self.layer, self.is_faulty = nn.Linear(8, 8), is_faulty

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(x))
        return torch.log1p(torch.exp(x + 20) * 1e-9) if self.is_faulty else x


def planted(*faults: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(i in faults) for i in range(LAYERS)), nn.Linear(8, 8))


class Distance:
    """Largest distance from the float32 model."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        self.x, self.calls = x, 0
        with torch.no_grad():
            self.expected = model(x)

    def __call__(self, amp_model: AmpModule) -> float:
        self.calls += 1
        with torch.no_grad():
            return float((amp_model(self.x) - self.expected).abs().max())


X = torch.linspace(-1, 1, 32).reshape(4, 8)


@pytest.mark.filterwarnings("ignore:mine.*no node of the model is 'exp'")
@pytest.mark.parametrize("faults", [(), (3,), (0, 4)])
def test_the_planted_places_are_found_and_nothing_more(faults: tuple[int, ...]) -> None:
    model = planted(*faults)
    metric = Distance(model, X)
    found = bisect(model, (X,), metric, 0.02, op_list=["default", LISTED], dtype="float16")
    assert found.places == tuple(OpInModule(str(i), "exp") for i in faults)
    places = 1 + LAYERS * 3
    assert metric.calls == found.evaluations <= 2 + len(faults) * (math.ceil(math.log2(places)) + 1)
    if faults:
        assert not found.low <= 0.02  # Inf, or NaN
        amp_model = autocastfx.convert(model, (X,), op_list=["default", LISTED, found.op_list], dtype="float16")
        assert Distance(model, X)(amp_model) == found.metric <= 0.02


class Small(nn.Module):
    """Four places, of which one may be at fault; nothing to learn, so that a hundred are captured quickly."""

    def __init__(self, is_faulty: bool) -> None:
        super().__init__()
        self.is_faulty = is_faulty

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        y = torch.log1p(torch.exp(y + 20) / 1e9) if self.is_faulty else torch.sin(y)
        return x * 0.9 + y


@pytest.mark.parametrize("faults", [(17,), (0, 25), (5, 6, 20)], ids=["1", "2", "3"])
def test_among_a_hundred_places_it_needs_few_evaluations(faults: tuple[int, ...]) -> None:
    model = nn.Sequential(*(Small(i in faults) for i in range(26)))
    listed = OpList.of({"allow": ["exp", "tanh", "sin", "mul", "add"]}, name="mine")
    metric, places = Distance(model, X), list[int]()

    def counted(amp_model: AmpModule) -> float:
        low = [node for node in amp_model.plan.nodes if str(node.placement.run) == "low"]
        places.append(len({(node.module, node.op) for node in low}))
        return metric(amp_model)

    found = bisect(model, (X,), counted, 0.2, op_list=["default", listed], dtype="float16")
    assert found.places == tuple(OpInModule(str(i), "exp") for i in faults)
    assert places[0] >= 100
    assert found.evaluations == metric.calls <= 3 * len(faults) * math.log2(places[0])


def test_the_model_is_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = planted(2)
    once = bisect(model, (X,), Distance(model, X), 0.02, op_list=["default", LISTED], dtype="float16")
    monkeypatch.setattr(bisect_module, "convert_again", lambda amp_model, op_list: None)
    each = bisect(model, (X,), Distance(model, X), 0.02, op_list=["default", LISTED], dtype="float16")
    assert str(once) == str(each)


def test_a_rule_that_matches_nothing_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bisect_module, "convert_again", lambda amp_model, op_list: None)
    model = planted(2)
    listed = OpList.of({"allow": ["exp", "erfinv"]}, name="mine")
    with pytest.warns(UnmatchedRuleWarning, match="erfinv") as warned:
        bisect(model, (X,), Distance(model, X), 0.02, op_list=["default", listed], dtype="float16")
    assert len(warned) == 1


class TwoWays(nn.Module):
    """Large values, then small ones; an exponential of the large ones may overflow."""

    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        large = torch.exp(torch.tanh(x) * factor)
        return large.sum() * 0 + torch.sin(x[0]).sum()


@pytest.mark.parametrize(("factor", "kept"), [(1.0, "sin"), (20.0, "exp")])
@pytest.mark.parametrize("is_by_name", [False, True])
def test_of_two_that_hold_alike_it_keeps_the_overflows_or_the_cheaper(
    factor: float, kept: str, is_by_name: bool
) -> None:
    def metric(amp_model: AmpModule) -> float:
        runs = {node.op: str(node.placement.run) for node in amp_model.plan.nodes}
        return 1.0 if runs["exp"] == runs["sin"] == "low" else 0.0

    x, by = torch.ones(32, 32), torch.tensor(factor)
    listed = OpList.of({"allow": ["exp", "tanh", "sin", "mul"]}, name="mine")
    inputs: Any = {"x": x, "factor": by} if is_by_name else (x, by)
    found = bisect(TwoWays(), inputs, metric, 0.5, op_list=["default", listed], dtype="float16")
    assert found.places == (OpInModule("", kept),)
    if is_by_name:
        assert (
            bisect(
                TwoWays(),
                (x,),
                metric,
                0.5,
                op_list=["default", listed],
                example_kwargs={"factor": by},
                dtype="float16",
            )
            == found
        )


@pytest.mark.parametrize(
    ("factor", "errors", "kept"),
    [
        (1.0, {"exp": 0.2, "sin": 0.1}, "exp"),
        (1.0, {"exp": 0.1, "sin": 0.2}, "sin"),
        (1.0, {"tanh": 0.2}, "sin"),  # neither was measured: the cheaper
        (20.0, {"exp": 0.1, "sin": 0.2}, "exp"),  # where it overflows
    ],
)
def test_of_two_that_hold_alike_it_keeps_the_one_of_the_larger_predicted_error(
    factor: float, errors: dict[str, float], kept: str
) -> None:
    def metric(amp_model: AmpModule) -> float:
        runs = {node.op: str(node.placement.run) for node in amp_model.plan.nodes}
        return 1.0 if runs["exp"] == runs["sin"] == "low" else 0.0

    listed = OpList.of({"allow": ["exp", "tanh", "sin", "mul"]}, name="mine")
    effects = tuple(Effect("train", op, op, "", (error,)) for op, error in errors.items())
    measured = autocastfx.Sensitivity("gradient", "float16", 1, 1, effects)
    inputs, lists = (torch.ones(32, 32), torch.tensor(factor)), ["default", listed]
    found = bisect(TwoWays(), inputs, metric, 0.5, op_list=lists, dtype="float16", sensitivity=measured)
    assert found.places == (OpInModule("", kept),)


def test_effects_of_a_places_nodes_may_cancel() -> None:
    amp_model = autocastfx.convert(
        nn.Sequential(Small(True), Small(False)).eval(),
        (X,),
        dtype="float16",
        op_list=["default", OpList.of({"allow": ["tanh", "sin", "mul", "add"]}, name="mine")],
        sensitivity=autocastfx.Sensitivity(
            "gradient",
            "float16",
            1,
            1,
            tuple(
                Effect("eval", name, op, module, (error,))
                for name, op, module, error in [
                    ("mul", "mul", "0", 0.1),
                    ("add", "add", "0", 0.3),
                    ("add_1", "add", "0", -0.25),
                    ("sin", "sin", "1", 0.2),
                ]
            ),
        ),
    )
    order = search_order(amp_model, places_of(amp_model.plan), None)
    assert order[:3] == (OpInModule("1", "sin"), OpInModule("0", "mul"), OpInModule("0", "add"))


@unchecked
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.02), (torch.float16, 0.1)], ids=str)
def test_a_16_bit_model_is_searched_as_it_is(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Small(i == 2) for i in range(4)))
    low_model, x = nn.Sequential(nn.Linear(8, 8), model).to(dtype), X.to(dtype)
    with torch.no_grad():
        expected = copy.deepcopy(low_model).float()(X.to(dtype).float())

    def distance(amp_model: nn.Module) -> float:
        with torch.no_grad():
            return float((amp_model(x).float() - expected).abs().max())

    listed = OpList.of({"allow": ["exp", "tanh", "sin", "mul", "add"]}, name="mine")
    found = bisect(low_model, (x,), distance, tolerance, op_list=["default", listed])
    assert found.low == pytest.approx(distance(low_model), nan_ok=True)
    assert not found.low <= tolerance
    assert found.places
    assert (found.places == (OpInModule("1.2", "exp"),)) == (dtype == torch.float16), "where it overflows"
    amp_model = autocastfx.convert(low_model, (x,), op_list=["default", listed, found.op_list])
    assert distance(amp_model) == found.metric <= tolerance
    assert {p.dtype for p in amp_model.parameters()} == {dtype}


def test_a_sensitivity_says_nothing_of_a_16_bit_model() -> None:
    measured = autocastfx.Sensitivity("output", "bfloat16", 1, 1, ())
    with pytest.raises(UnsupportedError, match=r"sensitivity was given, .* of this Linear are bfloat16"):
        bisect(nn.Linear(8, 8).bfloat16(), (X.bfloat16(),), lambda _: 0.0, 0.1, sensitivity=measured)


def test_without_example_inputs_it_searches_in_graph_order() -> None:
    model = planted(2)
    found = bisect(model, None, Distance(model, X), 0.02, op_list=["default", LISTED], dtype="float16")
    assert found.places == (OpInModule("2", "exp"),)


def test_at_the_root_the_op_is_denied() -> None:
    model = Net(lambda m, x: torch.log1p(torch.exp(m.layer(x) + 20) * 1e-9), layer=nn.Linear(8, 8))
    found = bisect(model, X, Distance(model, X), 0.05, op_list=["default", LISTED], dtype="float16")
    assert found.places == (OpInModule("", "exp"),)
    assert str(found).startswith(f"float32 for exp: metric {found.metric:.4g}, ")
    assert found.metric <= 0.05


def test_the_list_can_be_saved_and_read(tmp_path: Path) -> None:
    model = planted(1)
    found = bisect(model, (X,), Distance(model, X), 0.02, op_list=["default", LISTED], dtype="float16")
    found.op_list.save(tmp_path / "found.yaml")
    assert f"found by bisection: {found.metric:.4g} with this list" in (tmp_path / "found.yaml").read_text()
    (rule,) = autocastfx.load_op_list(tmp_path / "found.yaml").modules
    assert (rule.path, rule.wanted) == ("1", "float32")


def test_an_interrupted_search_goes_on(tmp_path: Path) -> None:
    model, file = planted(1, 3), tmp_path / "search.json"
    whole = Distance(model, X)
    expected = bisect(model, (X,), whole, 0.02, op_list=["default", LISTED], dtype="float16")

    class Interrupted(Distance):
        def __call__(self, amp_model: AmpModule) -> float:
            if self.calls == 5:
                raise KeyboardInterrupt
            return super().__call__(amp_model)

    first, second = Interrupted(model, X), Distance(model, X)
    with pytest.raises(KeyboardInterrupt):
        bisect(model, (X,), first, 0.02, op_list=["default", LISTED], state=file, dtype="float16")
    assert len(json.loads(file.read_text())["known"]) == 5
    assert [path.name for path in tmp_path.iterdir()] == ["search.json"]
    found = bisect(model, (X,), second, 0.02, op_list=["default", LISTED], state=file, dtype="float16")
    assert (found.places, found.metric) == (expected.places, expected.metric)
    assert second.calls == found.evaluations == whole.calls - 5


def test_the_file_of_another_search_is_refused(tmp_path: Path) -> None:
    model, file = planted(), tmp_path / "search.json"
    metric = Distance(model, X)
    bisect(model, (X,), metric, 0.02, state=file, dtype="float16")
    with pytest.raises(
        EvaluationsError, match=r"search.json holds the evaluations of another search: its .*op list.* differ"
    ):
        bisect(
            model,
            (X,),
            metric,
            0.02,
            op_list=["default", OpList.of({"allow": ["tanh"]}, name="mine")],
            state=file,
            dtype="float16",
        )
    with pytest.raises(EvaluationsError, match="its label differ"):
        bisect(model, (X,), metric, 0.02, state=file, label="accuracy", dtype="float16")
    for text in ("[]", "{", "{}"):
        file.write_text(text)
        with pytest.raises(
            EvaluationsError, match=r"search.json holds no evaluations of a search: .* Give another file"
        ):
            bisect(model, (X,), metric, 0.02, state=file, dtype="float16")


def test_progress_is_reported() -> None:
    seen: list[tuple[int, int]] = []
    model = planted(4)
    found = bisect(
        model,
        (X,),
        Distance(model, X),
        0.02,
        op_list=["default", LISTED],
        report=lambda *n: seen.append(n),
        dtype="float16",
    )
    assert [made for made, _ in seen] == list(range(found.evaluations))
    assert max(left for _, left in seen) == math.ceil(math.log2(1 + LAYERS * 2 + 2))


@pytest.mark.parametrize("fault", range(LAYERS))
def test_never_are_more_evaluations_to_come_than_reported(fault: int) -> None:
    seen: list[int] = []
    model = planted(fault)
    bisect(
        model,
        (X,),
        Distance(model, X),
        0.02,
        op_list=["default", LISTED],
        report=lambda _, left: seen.append(left),
        dtype="float16",
    )
    assert seen[:2] == [1, 0]
    search = seen[2:-1] if seen[-1] == 0 else seen[2:]  # what the last step needs may be known from the search
    assert search[0] == math.ceil(math.log2(1 + LAYERS * 2 + 2))
    assert all(left >= len(search) - place for place, left in enumerate(search))
    assert all(after < before for before, after in itertools.pairwise(search))


def test_fewer_evaluations_are_to_come_after_each_though_the_place_stands_last() -> None:
    lists = ["default", OpList.of({"allow": ["tanh", "sin", "mul", "add"]}, name="mine")]
    model = nn.Sequential(Small(False), Small(False))
    first = autocastfx.convert(model, (X,), op_list=lists, dtype="float16")
    places = places_of(first.plan)
    last = search_order(first, places, ((X,), {}))[-1]
    seen: list[int] = []

    def metric(amp_model: AmpModule) -> float:
        return float(last in places_of(amp_model.plan))

    found = bisect(model, (X,), metric, 0.5, op_list=lists, report=lambda _, left: seen.append(left), dtype="float16")
    assert found.places == (last,)
    assert seen == [1, 0, *range(math.ceil(math.log2(len(places))), 0, -1), 0]


def test_what_float32_does_not_mend_is_an_error() -> None:
    model = planted()
    with pytest.raises(BisectError, match=r"with all \d+ places in float32 the metric is .* tolerance of -1"):
        bisect(model, (X,), Distance(model, X), -1.0, dtype="float16")


def test_other_arguments_are_those_of_convert() -> None:
    seen: list[Any] = []
    model = planted()

    def metric(amp_model: AmpModule) -> float:
        seen.append(amp_model.plan.low)
        return 0.0

    assert bisect(model, (X,), metric, 1.0, dtype=torch.bfloat16).places == ()
    assert set(seen) == {"bfloat16"}


@pytest.mark.parametrize(
    ("metric", "tolerance", "error", "said"),
    [
        (3, 0.1, TypeError, "metric is a function of the converted model, not 3"),
        (lambda _: 0.0, float("nan"), ValueError, "tolerance is a finite number, not nan"),
        (lambda _: 0.0, float("inf"), ValueError, "tolerance is a finite number, not inf"),
    ],
)
def test_what_cannot_be_searched_for_is_refused(
    metric: Any, tolerance: float, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        bisect(nn.Linear(4, 4), torch.ones(2, 4), metric, tolerance, dtype="float16")
