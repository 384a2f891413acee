"""None, kwargs, nested and 0-d arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.invariants.pair import LOW, Named, Net, Pair, Record, inserted_casts, net

pytestmark = pytest.mark.filterwarnings("ignore:float16 convolutions on a CPU")


class Flexible(nn.Module):
    """All kinds of parameters that a forward can have."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(
        self,
        x: Tensor,
        *rest: Tensor,
        scale: Any = None,
        flag: bool = True,
        config: Mapping[str, Any] | None = None,
        **named: Tensor,
    ) -> Tensor:
        y = self.a(x)
        for other in rest:
            y = y + other
        if scale is not None:
            y = y * scale
        if flag:
            y = torch.tanh(y)
        if config:
            y = y + config["items"][0]
        for key in sorted(named):
            y = y - named[key]
        return self.b(y)


class Positional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor, /, mask: Tensor | None = None, *, k: float = 1) -> Tensor:
        y = self.a(x) * k
        return y if mask is None else y.masked_fill(mask, 0.0)


@pytest.mark.parametrize("low", LOW)
def test_call_structures_of_all_kinds(low: torch.dtype) -> None:
    x, v = torch.randn(3, 8), torch.randn(8)
    pair = Pair.of(Flexible(), (x,), low)
    calls: list[tuple[Any, ...]] = [
        (x,),
        (Named(x=x),),
        (x, v),
        (x, v, x),
        (x, v, Named(flag=False)),
        (x, Named(scale=2.0)),
        (x, Named(scale=2)),
        (x, Named(scale=True)),
        (x, Named(scale=torch.tensor(0.5))),
        (x, Named(scale=None, flag=True, config=None)),
        (x, Named(config={"items": [v], "other": None})),
        (x, Named(config={"items": (v, None)})),
        (x, Named(z=v, y=2 * v)),
        (x, Named(y=2 * v, z=v)),
    ]
    for call in calls:
        pair.agree(*call)
    known = len(pair.amp_model.variants)
    for call in calls:
        pair.agree(*call)
    assert len(pair.amp_model.variants) == known
    assert known == 1 + 12, "besides one for eval: x by keyword and defaults spelled out are no calls of their own"


@pytest.mark.parametrize("low", LOW)
def test_positional_only_and_keyword_only_arguments(low: torch.dtype) -> None:
    x = torch.randn(3, 8)
    pair = Pair.of(Positional(), (x,), low)
    for call in [(x, x > 0), (x, Named(mask=x > 0)), (x, None, Named(k=2)), (x, Named(k=2.5)), (x, None)]:
        pair.agree(*call)
    for args, kwargs in [((), {"x": x}), ((x, None, 2), {}), ((x,), {"q": 1}), ((x, None), {"mask": None}), ((), {})]:
        with pytest.raises(TypeError) as ours:
            pair.amp_model(*args, **kwargs)
        with pytest.raises(TypeError):
            pair.eager(*args, **kwargs)
        assert re.search("argument|parameter", str(ours.value))


@pytest.mark.parametrize("low", LOW)
def test_nested_and_0d_arguments(low: torch.dtype) -> None:
    x = torch.randn(3, 8)

    def run(m: Net, data: Any, record: Record, t: Tensor) -> Any:
        return {"a": m.a(data["x"][0]) * t, "b": m.b(record.values), "t": t * 2, "n": data["x"][1]}

    call = ({"x": [x, None], "unused": (torch.tensor(1),)}, Record(x, "note"), torch.tensor(0.25))
    pair = Pair.of(net(run), call, low)
    pair.agree(*call)
    pair.agree({"x": [x * 2, None], "unused": (torch.tensor(7),)}, Record(x, "other note"), torch.tensor(3.0))


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("exponent", [17, -20])
def test_a_0d_argument_beyond_the_range_keeps_its_value(exponent: int, low: torch.dtype) -> None:
    """torch multiplies a 16-bit tensor by the exact value of a 0-d float32 one, and so does torch.autocast."""
    x, scalar = torch.randn(3, 8) * 2.0 ** (-exponent // 2), torch.tensor(1.1 * 2.0**exponent)
    Pair.of(net(lambda m, x, t: m.b(x @ m.a.weight * t)), (x, scalar), low).agree(x, scalar, backward=False)


def test_integer_and_boolean_arguments_are_never_cast() -> None:
    i, keep = torch.tensor([1, 2, 5000]), torch.tensor([True, False, True])
    model = Net(
        lambda m, i, keep: (m.a(m.e(i)) * keep[:, None], i + 1, ~keep), e=nn.Embedding(5001, 8), a=nn.Linear(8, 8)
    )
    pair = Pair.of(model, (i, keep), torch.float16)
    pair.agree(i, keep)
    assert not [c for c in inserted_casts(pair.amp_model) if c.all_input_nodes[0].name in ("args_0", "args_1")]
