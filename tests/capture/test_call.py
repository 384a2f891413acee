"""Calls bound by name: one key for all ways to write a call, and the way back to one."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import autocastfx
from autocastfx import OpList
from autocastfx.capture.call import CallSignature, CallStructure, pack_spec, unpack_spec

X, Y, Z = torch.zeros(2, 3), torch.ones(4), torch.zeros(3, dtype=torch.int64)


def same(function: Callable[..., Any], *calls: tuple[tuple[Any, ...], dict[str, Any]]) -> bool:
    """Whether all calls are one: the same tensors in the same places of the same structure."""
    signature = CallSignature.of(function)
    bound = [signature.bind(args, kwargs) for args, kwargs in calls]
    return all(
        call.structure == bound[0].structure and [id(t) for t in call.tensors] == [id(t) for t in bound[0].tensors]
        for call in bound
    )


def call(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


# -- one call ---------------------------------------------------------------------------------------------------------


def ordinary(x: Any, mask: Any = None, scale: float = 0.5, dims: tuple[int, ...] = (300, 2), mode: str = "abc") -> Any:
    return x, mask, scale, dims, mode


def test_positional_keyword_and_default_forms_are_one_call() -> None:
    assert same(
        ordinary,
        call(X),
        call(x=X),
        call(X, None),
        call(X, mask=None),
        call(mask=None, x=X),
        call(X, None, 0.5),
        call(X, scale=float("0.5")),
        call(X, None, 0.5, (int("300"), 2), "".join("abc")),
    )
    assert same(ordinary, call(X, Y), call(X, mask=Y), call(mask=Y, x=X), call(X, Y, 0.5))
    assert same(ordinary, call(X, Y, 0.25), call(X, Y, scale=0.25), call(scale=0.25, x=X, mask=Y))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(call(X), call(X, Y), id="an argument more"),
        pytest.param(call(X), call(X.double()), id="dtype"),
        pytest.param(call(X), call(X[0]), id="dimensions"),
        pytest.param(call(X, scale=0.25), call(X, scale=0.75), id="number"),
        pytest.param(call(X, scale=1), call(X, scale=1.0), id="type of a number"),
        pytest.param(call(X, scale=1), call(X, scale=True), id="bool"),
        pytest.param(call(X, mask=[Y, X]), call(X, mask=(Y, X)), id="list or tuple"),
        pytest.param(call(X, mask={"a": X}), call(X, mask={"b": X}), id="key"),
        pytest.param(call(X, mask=[X, [Y]]), call(X, mask=[[X], Y]), id="nesting"),
        pytest.param(call(X, mask=[X, None]), call(X, mask=[None, X]), id="place"),
        pytest.param(call(X, mode="abc"), call(X, mode="abd"), id="word"),
    ],
)
def test_what_a_graph_bakes_in_tells_calls_apart(one: Any, other: Any) -> None:
    assert not same(ordinary, one, other)


def test_sizes_and_values_of_tensors_are_no_part_of_the_structure() -> None:
    signature = CallSignature.of(ordinary)
    assert signature.bind((X,), {}).structure == signature.bind((torch.ones(7, 1),), {}).structure


def test_zero_has_a_sign() -> None:
    def function(x: Any, by: float = 0.0) -> Any:
        return x, by

    assert same(function, call(X), call(X, function.__defaults__[0]))
    bound = CallSignature.of(function).bind((X, -0.0), {})
    assert str(bound.structure.arguments(bound.tensors)["by"]) == "-0.0"


def test_a_number_that_is_none_is_one_call_too() -> None:
    assert same(ordinary, call(X, scale=float("nan")), call(X, None, float("nan")))


def test_rest_arguments() -> None:
    def function(x: Any, *rest: Any, key: Any = None, **more: Any) -> Any:
        return x, rest, key, more

    assert same(function, call(X, Y, Z, key=X), call(X, *(Y, Z), **{"key": X}))
    assert same(function, call(X, a=Y), call(a=Y, x=X), call(X, key=None, a=Y))
    assert not same(function, call(X, Y), call(X, key=Y))
    bound = CallSignature.of(function).bind((X, Y, Z), {"key": X, "a": Y})
    assert bound.structure.tensor_names() == ["x", "rest_0", "rest_1", "key", "more_a"]
    args, kwargs = CallSignature.of(function).split(bound.structure.arguments(bound.tensors))
    assert [id(a) for a in args] == [id(X), id(Y), id(Z)]
    assert {k: id(v) for k, v in kwargs.items()} == {"key": id(X), "a": id(Y)}


def test_rest_keywords_may_be_called_as_other_parameters_are() -> None:
    def by_position(x: Any, /, **more: Any) -> Any:
        return x, more

    def starred(*rest: Any, **more: Any) -> Any:
        return rest, more

    assert round_trip(by_position, (1,), {"x": 2, "more": 3}) == (1, {"x": 2, "more": 3})
    assert round_trip(starred, (1,), {"rest": 2, "more": 3}) == ((1,), {"rest": 2, "more": 3})


# -- wrong calls ------------------------------------------------------------------------------------------------------


def keyword_only(x: Any, *, key: Any, other: Any = 1) -> Any:
    return x, key, other


def positional_only(x: Any, y: Any = 1, /, z: Any = 2) -> Any:
    return x, y, z


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "message"),
    [
        (ordinary, (), {}, "missing a required argument: 'x'"),
        (ordinary, (X,), {"x": X}, "multiple values for argument 'x'"),
        (ordinary, (X,), {"masc": X}, "got an unexpected keyword argument 'masc'"),
        (ordinary, (X, 1, 2, 3, 4, 5), {}, "too many positional arguments"),
        (keyword_only, (X,), {}, "missing a required( keyword-only)? argument: 'key'"),
        (keyword_only, (X, Y), {}, "too many positional arguments"),
        (positional_only, (), {"x": X}, "'x' parameter is positional only, but was passed as a keyword"),
        (positional_only, (X,), {"y": X}, "(positional only|unexpected keyword argument 'y')"),
    ],
)
def test_wrong_calls_raise_pythons_own_error(function: Any, args: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(TypeError):
        function(*args, **kwargs)
    with pytest.raises(TypeError, match=message):
        CallSignature.of(function).bind(args, kwargs)


# -- and back ---------------------------------------------------------------------------------------------------------


def round_trip(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``function`` gives for the call that binding and splitting make of ``function(*args, **kwargs)``."""
    signature = CallSignature.of(function)
    bound = signature.bind(args, kwargs)
    again_args, again_kwargs = signature.split(bound.structure.arguments(bound.tensors))
    assert signature.bind(again_args, again_kwargs).structure == bound.structure  # and it is the same call
    return function(*again_args, **again_kwargs)


KINDS = inspect.Parameter
VALUES = st.sampled_from([1, 1.0, True, None, "word", (1, 2), [], {}, {"k": (3,)}, -0.0, 2.5])


@st.composite
def functions(draw: st.DrawFn) -> tuple[Callable[..., Any], list[inspect.Parameter]]:
    """A function of any signature that gives all it was called with, bound by Python itself: inspect's bind differs."""
    counts = [draw(st.integers(0, 2)) for _ in range(3)]
    positional = [f"p{i}" for i in range(counts[0] + counts[1])]
    first_default = draw(st.integers(0, len(positional)))
    values = [draw(VALUES) for _ in range(sum(counts))]
    words = [p if i < first_default else f"{p}=values[{i}]" for i, p in enumerate(positional)]
    if counts[0]:
        words.insert(counts[0], "/")
    takes_rest = draw(st.booleans())
    if takes_rest or counts[2]:
        words.append("*rest" if takes_rest else "*")
    for i in range(counts[2]):
        words.append(f"k{i}=values[{len(positional) + i}]" if draw(st.booleans()) else f"k{i}")
    if draw(st.booleans()):
        words.append("**more")
    namespace: dict[str, Any] = {"values": values}
    exec(f"def function({', '.join(words)}): return locals()", namespace)
    function = namespace["function"]
    return function, list(inspect.signature(function).parameters.values())


NAMES = st.sampled_from(["p0", "p1", "p2", "p3", "k0", "k1", "rest", "more", "other"])


@settings(max_examples=400)
@given(functions(), st.lists(VALUES, max_size=5), st.dictionaries(NAMES, VALUES, max_size=4))
def test_bound_and_split_a_call_means_the_same(
    made: tuple[Callable[..., Any], Any], args: list[Any], kwargs: dict[str, Any]
) -> None:
    function, _ = made
    try:
        expected = function(*args, **kwargs)
    except TypeError:
        with pytest.raises(TypeError):
            CallSignature.of(function).bind(args, kwargs)
        return
    assert repr(round_trip(function, tuple(args), kwargs)) == repr(expected)


@settings(max_examples=100)
@given(functions(), st.data())
def test_keyword_and_positional_forms_are_one_call(
    made: tuple[Callable[..., Any], list[inspect.Parameter]], data: st.DataObject
) -> None:
    function, parameters = made
    named = [p for p in parameters if p.kind not in (KINDS.VAR_POSITIONAL, KINDS.VAR_KEYWORD)]
    values = {p.name: data.draw(VALUES) for p in named}
    calls = []
    for by_keyword in (True, False):
        positional = [
            p
            for p in named
            if p.kind is KINDS.POSITIONAL_ONLY or (p.kind is KINDS.POSITIONAL_OR_KEYWORD and not by_keyword)
        ]
        rest = {name: v for name, v in values.items() if name not in {p.name for p in positional}}
        calls.append(call(*(values[p.name] for p in positional), **rest))
    assert same(function, *calls)


def test_nested_inputs() -> None:
    Pair = namedtuple("Pair", "first second")
    nested = {"a": [X, {"b": (Y, None, 3)}], "c": OrderedDict(d=Z), "e": Pair(X, "word")}
    bound = CallSignature.of(ordinary).bind((nested,), {})
    assert [id(t) for t in bound.tensors] == [id(X), id(Y), id(Z), id(X)]
    rebuilt = bound.structure.arguments(bound.tensors)["x"]
    assert rebuilt["a"][0] is X
    assert rebuilt["a"][1]["b"] == (Y, None, 3) or rebuilt["a"][1]["b"][0] is Y
    assert isinstance(rebuilt["c"], OrderedDict)
    assert type(rebuilt["e"]).__name__ == "Pair"
    assert bound.structure.tensor_names() == ["x_a_0", "x_a_1_b_0", "x_c_d", "x_e_first"]
    assert str(bound.structure).startswith("x={a: [float32[2d], {b: (float32[1d], None, 3)}]")


# -- structures -------------------------------------------------------------------------------------------------------


def test_a_structure_says_what_it_is_of() -> None:
    structure = CallSignature.of(ordinary).bind((X,), {"mask": {"a": Z, "b": None}, "scale": 3}).structure
    assert str(structure) == "x=float32[2d], mask={a: int64[1d], b: None}, scale=3"


def test_structures_and_signatures_pickle_without_a_warning() -> None:
    signature = CallSignature.of(ordinary)
    bound = signature.bind((X,), {"mask": [Y, {"k": Z}], "mode": "w"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        structure = pickle.loads(pickle.dumps(bound.structure))
        again = pickle.loads(pickle.dumps(signature))
        copied = copy.deepcopy(bound.structure)
        spec = unpack_spec(pack_spec(bound.structure.spec))
    assert structure == copied == bound.structure
    assert isinstance(structure, CallStructure)
    assert again.bind((X,), {"mask": [Y, {"k": Z}], "mode": "w"}).structure == bound.structure
    assert spec == bound.structure.spec
    assert again == signature


def test_a_signature_holds_no_annotations() -> None:
    def function(x: torch.Tensor, y: OpList | None = None) -> torch.Tensor:
        return x

    assert all(p.annotation is inspect.Parameter.empty for p in CallSignature.of(function).parameters)


# -- through a conversion ---------------------------------------------------------------------------------------------


class Names(nn.Module):
    """Names that generated code has a meaning of its own for, and names that fall together."""

    def forward(
        self, device: Any, torch: Any, inf: Any, nan: Any, pair: Any, pair_0: Any, keys: Any, input: Any, **more: Any
    ) -> Any:
        made = nn.functional.one_hot(keys["a b"], 3).to(device.dtype).masked_fill(inf > 0, float("-inf"))
        return made + device + torch + nan + pair[0] + pair_0 + keys["a_b"] + input * more["lambda"]


def test_any_argument_name_makes_a_graph() -> None:
    values = [torch.full((3,), float(i)) for i in range(1, 9)]
    model = Names()
    inputs = (values[0], values[1], -values[2], values[3], [values[4]], values[5])
    keywords = {"keys": {"a b": torch.tensor([0, 1, 2])[:1], "a_b": values[6]}, "input": values[7], "lambda": values[0]}
    converted = autocastfx.convert(model, inputs, keywords, dtype=torch.bfloat16, op_list=OpList())
    assert torch.equal(converted(*inputs, **keywords), model(*inputs, **keywords))
    names = [str(n.target) for n in converted.graph.nodes if n.op == "placeholder"]
    assert len(set(names)) == len(names) == 10


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor, by: float = 2.5, *, plus: torch.Tensor | None = None) -> torch.Tensor:
        return x * by if plus is None else x * by + plus


def test_all_ways_to_write_a_call_mean_the_same() -> None:
    converted = autocastfx.convert(Scaled().eval(), X, dtype=torch.bfloat16, op_list=OpList())
    for captured in (4, 4):  # each way once
        for args, kwargs in (call(X), call(x=X), call(X, 2.5), call(X, by=float("2.5"), plus=None)):
            assert torch.equal(converted(*args, **kwargs), X * 2.5)
        assert len(converted.variants) <= captured
    assert torch.equal(converted(X, plus=torch.ones(3)), X * 2.5 + 1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'bye'"):
        converted(X, bye=1)
