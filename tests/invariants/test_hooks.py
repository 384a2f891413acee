"""Hooks on a model's modules: a graph holds what they do to tensors, and what it lacks is told or refused by name."""

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
from autocastfx.errors import CaptureError, StateWarning
from autocastfx.runtime.variant_table import HookWatch
from tests.helpers import relative_error

LOW = torch.bfloat16
CAPTURED = r"hooks on 'body\.0', 'head' ran while the model was captured\. .* autocastfx\.enable converts in place"
LATE = "came after the model was converted, and its calls do not run them: a graph calls no modules"
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


# ---- at conversion ---------------------------------------------------------------------------------------------------


def test_forward_hooks_are_in_the_graph_and_it_is_told_once_that_calls_run_none() -> None:
    model, x = made()
    runs: list[str] = []

    def double(name: str, _: nn.Module, values: Any, *results: Any) -> Any:
        runs.append(name)
        return 2 * results[0] if results else (2 * values[0],)

    model.body[0].register_forward_pre_hook(partial(double, "before"))
    model.head.register_forward_hook(partial(double, "after"))
    with pytest.warns(StateWarning, match=CAPTURED) as told:
        amp_model = converted(model, x)
    assert len(told) == 1  # of two captured variants
    assert set(runs) == {"before", "after"}
    assert is_near(amp_model, model, x)
    runs.clear()
    amp_model(x)
    amp_model(x, torch.tensor(2.0))  # captured now, with the same hooks
    assert set(runs) == {"before", "after"}
    runs.clear()
    amp_model(x, torch.tensor(2.0))
    assert runs == []


def test_hooks_on_the_model_itself_are_told_and_find_its_arguments() -> None:
    model, x = made()
    model.register_forward_pre_hook(lambda _, values: (2 * values[0], *values[1:]))
    with pytest.warns(StateWarning, match="hooks on the model ran while the model was captured"):
        amp_model = converted(model, x)
    assert is_near(amp_model, model, x)
    assert is_near(amp_model, model, x, torch.tensor(3.0))
    assert torch.equal(amp_model(x, scale=torch.tensor(3.0)), amp_model(x, torch.tensor(3.0)))


def test_converted_without_inputs_the_first_call_tells() -> None:
    model, x = made()
    amp_model = autocastfx.convert(model, dtype=LOW)
    model.head.register_forward_hook(lambda *_: None)  # before the capture: the graph holds it
    with pytest.warns(StateWarning, match="hooks on 'head' ran while the model was captured") as told:
        amp_model(x)
    assert len(told) == 1
    amp_model(x)
    other = autocastfx.convert(made()[0], dtype=LOW)
    other.get_submodule("head").register_forward_hook(lambda *_: None)
    with pytest.warns(StateWarning, match=f"hooks on 'head' {LATE}"):
        other(x)


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
@pytest.mark.parametrize("path", ["", "body.0"])
def test_backward_hooks_are_refused_by_name(path: str, register: str) -> None:
    model, x = made()
    handle = getattr(model.get_submodule(path), register)(lambda *_: None)
    name = r"'body\.0'" if path else "the model"
    with pytest.raises(CaptureError, match=rf"backward hooks on {name} would not run: .* with autocastfx\.enable"):
        converted(model, x)
    handle.remove()
    assert is_near(converted(model, x), model, x)


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
def test_forward_hooks_on_every_module_are_in_the_graph_and_told(every: str) -> None:
    model, x = made()
    handle = register_on_every(every, lambda *_: None)
    with pytest.warns(StateWarning, match="hooks on every module of the process ran while the model was captured"):
        amp_model = converted(model, x)
    handle.remove()
    assert is_near(amp_model, model, x)
    register_on_every(every, lambda *_: None)
    with pytest.warns(StateWarning, match=f"hooks on every module of the process {LATE}") as told:
        amp_model(x)
    assert len(told) == 1
    amp_model(x)


@pytest.mark.parametrize(
    "every", ["register_module_full_backward_hook", "register_module_full_backward_pre_hook"], indirect=["every"]
)
def test_backward_hooks_on_every_module_are_refused(every: str) -> None:
    model, x = made()
    handle = register_on_every(every, lambda *_: None)
    with pytest.raises(CaptureError, match="backward hooks on every module of the process would not run"):
        converted(model, x)
    handle.remove()
    amp_model = converted(model, x)
    register_on_every(every, lambda *_: None)
    with pytest.warns(StateWarning, match=f"hooks on every module of the process {LATE}"):
        amp_model(x)


# ---- later -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("register", ["register_forward_hook", "register_full_backward_hook"])
@pytest.mark.parametrize("side", ["original", "converted"])
def test_a_hook_that_comes_later_is_told_by_name_at_the_next_call(side: str, register: str) -> None:
    model, x = made()
    amp_model = converted(model, x)
    root = model if side == "original" else amp_model
    getattr(root.get_submodule("head"), register)(lambda *_: None)
    with pytest.warns(StateWarning, match=f"hooks on 'head' {LATE}") as told:
        amp_model(x)
    assert len(told) == 1
    getattr(root.get_submodule("head"), register)(lambda *_: None)  # a second one on the same module
    amp_model(x)
    getattr(root.get_submodule("body.0"), register)(lambda *_: None)
    with pytest.warns(StateWarning, match=rf"hooks on 'body\.0' {LATE}"):
        amp_model(x)


def test_a_hook_on_the_original_itself_is_told_and_one_on_the_converted_model_runs() -> None:
    model, x = made()
    amp_model = converted(model, x.requires_grad_())
    amp_model(x)
    runs: list[str] = []
    amp_model.register_forward_hook(lambda *_: runs.append("forward"))
    amp_model.register_full_backward_hook(lambda *_: runs.append("backward"))
    amp_model(x).sum().backward()
    assert runs == ["forward", "backward"]
    model.register_forward_hook(lambda *_: None)
    with pytest.warns(StateWarning, match=f"hooks on the model {LATE}"):
        amp_model(x)


def test_pruning_after_the_conversion_is_told() -> None:
    model, x = made()
    amp_model = converted(model, x)
    prune.l1_unstructured(model.head, "weight", 0.5)
    with pytest.warns(StateWarning, match=f"hooks on 'head' {LATE}"):
        amp_model(x)


def test_other_hooks_are_no_concern() -> None:
    model, x = made()
    amp_model = converted(model, x)
    other, _ = made()
    other.head.register_forward_hook(lambda *_: None)
    model.head.weight.register_hook(lambda grad: grad)
    model.head.register_forward_hook(lambda *_: None).remove()
    amp_model(x).sum().backward()


def test_there_is_one_look_for_all_hooks_since_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = made()
    amp_model = converted(model, x)
    amp_model(x)
    looks: list[object] = []
    monkeypatch.setattr(HookWatch, "tell_late", lambda *_: looks.append(None))
    amp_model(x)
    assert looks == []
    x.requires_grad_().register_hook(lambda grad: grad)
    amp_model(x)
    assert len(looks) == 1


def test_a_copy_tells_of_its_own_and_without_the_original_there_is_its_side_alone() -> None:
    model, x = made()
    amp_model = converted(model, x)
    for twin in (copy.deepcopy(amp_model), pickle.loads(pickle.dumps(amp_model))):
        twin(x)
        twin.get_submodule("head").register_forward_hook(lambda *_: None)
        with pytest.warns(StateWarning, match=f"hooks on 'head' {LATE}"):
            twin(x)
    amp_model(x)


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
