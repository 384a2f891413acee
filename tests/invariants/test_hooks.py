"""Hooks on a model's modules run as in the model; those of a backward inside of a graph are refused."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

import autocastfx
from autocastfx import AmpModule
from autocastfx.errors import CaptureError
from tests.helpers import relative_error

LOW = torch.bfloat16
EPS = torch.finfo(LOW).eps


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(8, 16), nn.GELU()), nn.Linear(16, 4)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y = self.head(self.body(x))
        return y if scale is None else y * scale


def made() -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net(), torch.randn(3, 8)


@pytest.fixture(autouse=True)
def _nothing_else_is_told() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
        warnings.filterwarnings("ignore", ".*weight_norm.* is deprecated", FutureWarning)
        yield


def converted(model: nn.Module, x: Tensor) -> AmpModule:
    return autocastfx.convert(model, x, dtype=LOW)


def is_near(amp_model: nn.Module, model: nn.Module, *inputs: Tensor) -> bool:
    return 0 < relative_error(amp_model(*inputs).detach(), model(*inputs).detach()) < 4 * EPS


REFUSED = r"Module-level backwards hooks(.|\n)* convert in place, with autocastfx\.enable"


def doubling(runs: list[str]) -> Callable[..., Any]:
    def double(_: nn.Module, values: Any, *results: Any) -> Any:
        runs.append("")
        return 2 * results[0] if results else (2 * values[0], *values[1:])

    return double


# ---- forward ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
@pytest.mark.parametrize("path", ["", "body", "body.0", "head"])
@pytest.mark.parametrize("side", ["original", "converted"])
def test_forward_hooks_run_in_each_call_whenever_they_come_and_until_they_go(
    path: str, register: str, side: str
) -> None:
    model, x = made()
    runs: list[str] = []
    first = getattr(model.get_submodule(path), register)(doubling(runs))
    amp_model = converted(model, x)
    later = getattr((model if side == "original" else amp_model).get_submodule(path), register)(doubling(runs))
    for expected in (2, 1, 0):
        for inputs in ((x,), (x, torch.tensor(2.0)), (x,)):
            runs.clear()
            found = amp_model(*inputs)
            assert len(runs) == expected
            assert 0 < relative_error(found.detach(), model(*inputs).detach()) < 4 * EPS
        (first if expected == 2 else later).remove()


def test_a_hook_runs_in_copies_as_in_the_model() -> None:
    model, x = made()
    amp_model = converted(model, x)
    amp_model(x)
    for twin in (copy.deepcopy(amp_model), pickle.loads(pickle.dumps(amp_model))):
        twin(x)
        twin.get_submodule("head").register_forward_hook(doubling([]))
        assert torch.equal(twin(x), 2 * amp_model(x))


def test_converted_without_inputs_the_first_call_holds_them() -> None:
    model, x = made()
    amp_model = autocastfx.convert(model, dtype=LOW)
    model.head.register_forward_hook(doubling([]))
    assert is_near(amp_model, model, x)


def test_pruning_after_the_conversion_is_followed() -> None:
    model, x = made()
    amp_model = converted(model, x)
    prune.l1_unstructured(model.head, "weight", 0.5)
    assert is_near(amp_model, model, x)
    prune.remove(model.head, "weight")
    assert is_near(amp_model, model, x)


@pytest.mark.parametrize(
    "change",
    [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        parametrizations.orthogonal,
        weight_norm,
        spectral_norm,
        partial(prune.l1_unstructured, name="weight", amount=0.5),
    ],
)
def test_what_torch_makes_of_weights_by_hooks_is_captured_and_nothing_is_told(change: Callable[..., object]) -> None:
    model, x = made()
    change(model.body[0])
    amp_model = converted(model.eval(), x)
    assert is_near(amp_model, model, x)
    assert is_near(amp_model.train(), model.eval(), x)


@pytest.fixture
def every(request: pytest.FixtureRequest) -> Iterator[str]:
    """The function of torch that registers a hook on every module of the process; no hook of it is left."""
    yield request.param
    for table in ("forward_pre", "forward", "backward_pre", "backward"):
        getattr(torch.nn.modules.module, f"_global_{table}_hooks").clear()


def register_on_every(name: str, hook: Callable[..., Any]) -> Any:
    return getattr(torch.nn.modules.module, name)(hook)


@pytest.mark.parametrize(
    "every", ["register_module_forward_hook", "register_module_forward_pre_hook"], indirect=["every"]
)
def test_forward_hooks_on_every_module_run_whenever_they_come(every: str) -> None:
    model, x = made()
    runs: list[str] = []
    handle = register_on_every(every, doubling(runs))
    amp_model = converted(model, x)
    assert is_near(amp_model, model, x)
    handle.remove()
    assert is_near(amp_model, model, x)
    register_on_every(every, doubling(runs))
    assert is_near(amp_model, model, x)
    runs.clear()
    amp_model(x)
    assert len(runs) == len(list(model.modules()))


# ---- backward --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_of_the_model_itself_run(register: str) -> None:
    model, x = made()
    runs: list[str] = []
    getattr(model, register)(lambda *_: runs.append("first"))
    amp_model = converted(model, x.requires_grad_())
    getattr(amp_model, register)(lambda *_: runs.append("second"))
    amp_model(x).sum().backward()
    assert sorted(runs) == ["first", "second"]


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
@pytest.mark.parametrize("path", ["body", "body.0"])
def test_backward_hooks_inside_are_refused(path: str, register: str) -> None:
    model, x = made()
    handle = getattr(model.get_submodule(path), register)(lambda *_: None)
    with pytest.raises(CaptureError, match=REFUSED):
        converted(model, x)
    handle.remove()
    amp_model = converted(model, x)
    assert is_near(amp_model, model, x)
    handle = getattr(amp_model.get_submodule(path), register)(lambda *_: None)
    with pytest.raises(CaptureError, match=REFUSED):
        amp_model(x)
    handle.remove()
    assert is_near(amp_model, model, x)


@pytest.mark.parametrize(
    "every", ["register_module_full_backward_hook", "register_module_full_backward_pre_hook"], indirect=["every"]
)
def test_backward_hooks_on_every_module_are_refused(every: str) -> None:
    model, x = made()
    handle = register_on_every(every, lambda *_: None)
    with pytest.raises(CaptureError, match=REFUSED):
        converted(model, x)
    handle.remove()
    amp_model = converted(model, x)
    register_on_every(every, lambda *_: None)
    with pytest.raises(CaptureError, match=REFUSED):
        amp_model(x)


# ---- neither ---------------------------------------------------------------------------------------------------------


def test_other_hooks_are_no_concern() -> None:
    model, x = made()
    amp_model = converted(model, x)
    other, _ = made()
    other.head.register_forward_hook(lambda *_: None)
    model.head.weight.register_hook(lambda grad: grad)
    model.head.register_forward_hook(lambda *_: None).remove()
    amp_model(x).sum().backward()
    assert len(amp_model.variants) == 1


def test_a_model_that_stores_16_bits_holds_no_original_for_it() -> None:
    model, x = made()
    low = autocastfx.convert(model.eval(), x, dtype=LOW, weights="low")
    x.requires_grad_().register_hook(lambda grad: grad)
    low(x.detach())
    held = weakref.ref(model)
    del model
    gc.collect()
    assert held() is None


def test_a_compiled_call_makes_nothing_of_hooks() -> None:
    model, x = made()
    amp_model = converted(model, x)
    compiled = torch.compile(amp_model, backend="eager", fullgraph=True)
    found = compiled(x)
    x.clone().requires_grad_().register_hook(lambda grad: grad)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(compiled(x), found)


def test_hooks_by_which_transformers_gives_hidden_states_are_no_concern() -> None:
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, use_cache=False
    )
    torch.manual_seed(0)
    llama, ids = LlamaModel(config).eval(), torch.arange(6)[None]
    amp_model = autocastfx.convert(llama, (ids,), dtype=LOW)
    assert llama(ids, output_hidden_states=True).hidden_states is not None
    assert llama.layers[0]._forward_hooks
    amp_model(ids)
    assert amp_model(ids, output_hidden_states=True).hidden_states is not None
