"""``freeze`` makes one graph of a converted model a plain GraphModule, which refuses calls that do not fit it."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import autocastfx
from autocastfx.errors import NotCapturedError, UnsupportedError, VariantError

LOW = torch.bfloat16
X = torch.linspace(-2, 2, 8 * 16).reshape(8, 16)


class Net(nn.Module):
    """Two layers, a buffer that is not saved, and a layer that forward does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)
        self.unread = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.softmax(self.norm(self.fc1(x)), -1)) * self.scale


class Nested(Net):
    """Takes and returns more than tensors."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, given: dict[str, Tensor], *rest: Tensor, factor: float = 2.0, mask: Tensor | None = None, **more: Tensor
    ) -> dict[str, Any]:
        result = super().forward(given["x"]) * factor
        for one in (*rest, *more.values()):
            result = result + one
        result = result if mask is None else result * mask
        return {"result": result, "others": (result.sum(), given["x"], None, 3)}


@pytest.fixture(autouse=True)
def _views(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)


def converted(net: nn.Module, **options: Any) -> Any:
    """Return the view of a model."""
    return autocastfx.convert(net, (X,), check=False, **{"dtype": LOW, **options})


def gradients(module: Any) -> dict[str, list[float]]:
    """Return the gradients of a sum of squares, by the names of parameters."""
    module.zero_grad()
    module(X).square().sum().backward()
    names = {name.removeprefix("_orig_mod."): p.grad for name, p in module.named_parameters()}
    return {name: grad.flatten().tolist() for name, grad in names.items() if grad is not None}


def test_is_a_plain_graph_module() -> None:
    """It computes the same, with the model's own parameters."""
    net = Net()
    amp = converted(net)
    frozen = amp.freeze(X)
    assert type(frozen).__mro__[1] is fx.GraphModule
    assert torch.equal(frozen(X), amp(X))
    assert torch.equal(frozen(x=X), amp(X))
    assert list(frozen.state_dict()) == list(net.state_dict())
    assert frozen.fc1.weight is net.fc1.weight
    frozen(X).sum().backward()
    assert net.fc1.weight.grad is not None


class Halved(nn.Module):
    """Half of a weight, as a parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


def _parametrize(frozen: Any) -> dict[str, Tensor]:
    nn.utils.parametrize.register_parametrization(frozen.fc2, "weight", Halved())
    return {"fc2.weight": frozen.fc2.weight}


def _load(frozen: Any) -> dict[str, Tensor]:
    frozen.fc2.load_state_dict({"weight": torch.ones(4, 16), "bias": torch.ones(4)}, assign=True)
    return {"fc2.weight": torch.ones(4, 16), "fc2.bias": torch.ones(4)}


def _replace_tables(frozen: Any) -> dict[str, Tensor]:
    frozen.fc2._parameters["bias"] = nn.Parameter(torch.ones(4))
    frozen._buffers["scale"] = torch.zeros(4)
    return {"fc2.bias": torch.ones(4), "scale": torch.zeros(4)}


def _hold_plain_tensor(frozen: Any) -> dict[str, Tensor]:
    del frozen.fc2.bias
    frozen.fc2.bias = torch.ones(4)
    return {"fc2.bias": torch.ones(4)}


@pytest.mark.parametrize("change", [_parametrize, _load, _replace_tables, _hold_plain_tensor])
@pytest.mark.parametrize("of", [nn.Module.train, copy.deepcopy, fx.symbolic_trace])
def test_reads_what_its_modules_hold_now(change: Callable[[Any], dict[str, Tensor]], of: Callable[[Any], Any]) -> None:
    """Code reads weights in tables of modules; what is replaced, or is in no table any more, is read as well."""
    frozen = of(converted(Net(), dtype=LOW).freeze(X))
    with torch.no_grad():
        now = change(frozen)
        net = Net()
        net.load_state_dict(frozen.state_dict(), strict=False)
        expected = torch.func.functional_call(converted(net).freeze(X), now, (X,))
        assert torch.equal(frozen(X), expected)


def test_reads_weights_in_tables() -> None:
    """Each read through ``nn.Module`` takes ten times as long; a table is looked up once for all that it holds."""
    code, _, as_attributes = converted(Net()).freeze(X).code.partition("except")
    assert (code.count("._parameters"), code.count('"weight"]'), code.count('"bias"]')) == (3, 3, 3)
    assert (code.count("._buffers"), code.count('"scale"]')) == (1, 1)
    assert "_parameters" not in as_attributes


REFUSED: dict[str, Callable[[Any], Any]] = {
    "dtype": lambda frozen: frozen(X.double()),
    "size": lambda frozen: frozen(X[:3]),
    "dimensions": lambda frozen: frozen(X[None]),
    "device": lambda frozen: frozen(X.to("meta")),
    "structure": lambda frozen: frozen([X]),
    "mode": lambda frozen: frozen.eval()(X),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    """A call that the graph does not fit is an error that says what to do."""
    frozen = converted(Net()).freeze(X)
    for one in (frozen, copy.deepcopy(frozen)):
        with pytest.raises(VariantError, match=r"(F|f)reeze the converted model"):
            REFUSED[name](one)


def test_refuses_autocast() -> None:
    """A region around the call would cast again."""
    frozen = converted(Net()).freeze(X)
    with torch.autocast("cpu", LOW), pytest.raises(UnsupportedError, match=r"torch\.autocast"):
        frozen(X)


def test_sizes_that_the_graph_knows_vary() -> None:
    """A graph captured for any size is frozen for any size that it is for."""
    amp = converted(Net())
    amp(X[:5])
    frozen = amp.freeze(X[:6])
    assert torch.equal(frozen(X[:7]), amp(X[:7]))
    with pytest.raises(VariantError, match=r"x\.shape\[1\] is 8, and the graph takes 16"):
        frozen(X[:, :8])


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), {}), ((X[:, :4],) * 2, {}), ((), {"factor": 3.0}), ((), {"mask": X[:, :4]}), ((), {"more": X[:, :4]})],
)
def test_nested_calls(args: Any, kwargs: Any) -> None:
    """Arguments and outputs of any nesting, in the one structure of the call."""
    amp = autocastfx.convert(Nested(), dtype=LOW, check=False)
    frozen = amp.freeze({"x": X}, *args, **kwargs)
    result, expected = frozen({"x": X}, *args, **kwargs), amp({"x": X}, *args, **kwargs)
    assert torch.equal(result["result"], expected["result"])
    assert result["others"][1] is X
    assert result["others"][2:] == (None, 3)
    with pytest.raises(VariantError, match="takes the call"):
        frozen({"x": X}, factor=5.0, mask=None)
    with pytest.raises(VariantError, match="takes the call"):
        frozen({"x": X, "y": X}, *args, **kwargs)


@pytest.mark.parametrize("options", [{}, {"weights": "cached"}, {"dtype": torch.float16}], ids=str)
def test_pickled(options: dict[str, Any]) -> None:
    """What is pickled computes the same, and refuses the same."""
    amp = converted(Net(), **options)
    frozen = pickle.loads(pickle.dumps(amp.freeze(X)))
    assert torch.equal(frozen(X), amp(X))
    assert gradients(frozen) == gradients(amp)
    with pytest.raises(VariantError):
        frozen(X.double())
    with pytest.raises(VariantError):
        frozen.eval()(X)


@pytest.mark.parametrize(
    "of", [fx.symbolic_trace, copy.deepcopy, lambda frozen: torch.compile(frozen, backend="eager")]
)
def test_what_is_made_of_it_trains(of: Callable[[Any], Any]) -> None:
    """Gradients reach all weights of a trace, a copy and what Dynamo compiles."""
    amp = converted(Net())
    assert gradients(of(amp.freeze(X))) == gradients(amp)


def test_loads_without_the_class(tmp_path: Path) -> None:
    """A process that has imported autocastfx alone loads it."""
    amp = converted(Net())
    torch.save(amp.freeze(X), tmp_path / "frozen.pt")
    torch.save((X, amp(X).detach()), tmp_path / "values.pt")
    lines = (
        "import sys, torch, autocastfx",
        "frozen = torch.load(sys.argv[1], weights_only=False)",
        "given, expected = torch.load(sys.argv[2])",
        "assert torch.equal(frozen(given), expected)",
    )
    paths = [str(tmp_path / name) for name in ("frozen.pt", "values.pt")]
    subprocess.run([sys.executable, "-c", "\n".join(lines), *paths], check=True)


EXPORTERS: dict[str, Callable[[Any], Any]] = {
    "torch.jit.trace": lambda frozen: torch.jit.trace(frozen, (X,)),
    "torch.export": lambda frozen: torch.export.export(frozen, (X,)).module(),
    "torch.export, strict": lambda frozen: torch.export.export(frozen, (X,), strict=True).module(),
    "symbolic_trace": fx.symbolic_trace,
    "torch.compile": lambda frozen: torch.compile(frozen, backend="eager", fullgraph=True),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("name", EXPORTERS)
def test_exporters(name: str) -> None:
    """All tools take it that take a GraphModule."""
    amp = converted(Net())
    assert torch.equal(EXPORTERS[name](amp.freeze(X))(X), amp(X))


def test_a_part() -> None:
    """A part is frozen under the names that it has in itself."""
    net = nn.Sequential(Net(), nn.ReLU())
    amp = converted(net)
    frozen = amp[0].freeze(X)
    assert list(frozen.state_dict()) == list(net[0].state_dict())
    assert torch.equal(frozen(X), amp[0](X))


def test_a_region_without_gradients() -> None:
    """Graphs inside the graph go with it."""

    class Partly(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                y = self.fc1(x)
            return super().forward(x + y)

    amp = converted(Partly())
    for frozen in (amp.freeze(X), pickle.loads(pickle.dumps(amp.freeze(X)))):
        assert torch.equal(frozen(X), amp(X))


def test_numbers_that_change_are_refused() -> None:
    """A number that the graph takes as an input would stay as it is."""

    class Scaled(Net):
        factor = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.factor

    net = Scaled()
    amp = converted(net)
    for factor in (2.0, 3.0):
        net.factor = factor
        amp(X)
    with pytest.raises(UnsupportedError, match="factor"):
        amp.freeze(X)


def test_which_graph() -> None:
    """Without inputs it is the only one of the mode."""
    amp = autocastfx.convert(Net(), dtype=LOW)
    with pytest.raises(NotCapturedError, match="inputs of a call"):
        amp.freeze()
    amp(X)
    assert torch.equal(amp.freeze()(X), amp(X))
    amp(X[:3])
    with pytest.raises(VariantError, match="2 graphs"):
        amp.freeze()


class Sized(nn.Module):
    """Returns a number that is a size."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return self.first(x), len(x)


def test_a_number_that_depends_on_sizes_is_given_for_these_alone() -> None:
    x, other = torch.ones(3, 4), torch.ones(5, 4)
    amp = autocastfx.convert(Sized(), x, dtype=LOW)
    frozen = amp.freeze(x)
    assert frozen(x)[1] == 3
    with pytest.raises(VariantError, match="sizes"):
        frozen(other)
    assert [amp(one)[1] for one in (x, other, torch.ones(7, 4))] == [3, 5, 7]
    with pytest.raises(UnsupportedError, match="returns the number 5, which may depend on sizes"):
        amp.freeze(other)
    low = autocastfx.convert(Sized(), x, dtype=LOW, weights="low")
    assert low(x)[1] == 3
    with pytest.raises(VariantError, match="sizes"):
        low(other)
