"""Calls that stay whole: custom autograd functions with their backward, and Python functions that a list names."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import checkpoint

import autocastfx
from autocastfx import AmpModule, OpList
from autocastfx.capture.kept_whole import AutogradCall
from autocastfx.errors import BannedOpError, CaptureError, UnmatchedRuleWarning
from tests.helpers import Net, Straight, op_list, relative_error


class TwoOutputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, by: float, name: str, flag: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.by = by
        assert (name, flag) == ("n", False)
        return x * by, x.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, other: torch.Tensor) -> Any:
        return grad * ctx.by * 5 + other, None, None, None


class WithContext(torch.autograd.Function):
    """In the newer style, with a parameter and a saved tensor."""

    @staticmethod
    def forward(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x * w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad * w * 2, (grad * x * 7).sum(0)


class Masked(torch.autograd.Function):
    """One output is not differentiable."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mask = x > 0
        ctx.mark_non_differentiable(mask)
        ctx.save_for_backward(mask)
        return x * mask, mask

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> torch.Tensor:
        return grad * ctx.saved_tensors[0] * 4


class Outer(torch.autograd.Function):
    """Calls another one inside."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return Straight.apply(x) * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 11


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 13


class WithNone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, other: torch.Tensor | None) -> tuple[torch.Tensor, None]:
        return x * 2, None

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        return grad * 17, None


class WithText(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        return x * 2, "doubled", {"times": 2, "again": x * 3}

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> Any:
        return grad * 19


def with_text(m: Between, x: torch.Tensor) -> torch.Tensor:
    doubled, text, rest = WithText.apply(x)
    assert text == "doubled"
    return doubled * rest["times"]


class Between(nn.Module):
    """Something between two linear layers."""

    def __init__(self, function: Callable[[Between, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor([1.0, -2.0, 0.5, 3.0]))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.function(self, self.a(x)))


def total(outputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return outputs[0] + outputs[1]


FUNCTIONS: dict[str, Callable[[Between, torch.Tensor], torch.Tensor]] = {
    "straight-through": lambda m, x: Straight.apply(x),
    "twice": lambda m, x: Straight.apply(Straight.apply(x * 3) + x),
    "two outputs": lambda m, x: total(TwoOutputs.apply(x, 2.0, "n", False)),
    "a size": lambda m, x: total(TwoOutputs.apply(x, x.shape[0], "n", False)),
    "parameter": lambda m, x: WithContext.apply(x, m.scale),
    "constant": lambda m, x: WithContext.apply(x, torch.tensor([1.0, 2.0, 3.0, 4.0])),
    "not differentiable": lambda m, x: (lambda y, mask: y * mask)(*Masked.apply(x)),
    "nested": lambda m, x: Outer.apply(x),
    "in place": lambda m, x: InPlace.apply(x * 1),
    "text": with_text,
    "None": lambda m, x: WithNone.apply(x, None)[0],
    "a view of its output": lambda m, x: Straight.apply(x).view(-1).view(x.shape),
}
X = torch.linspace(-4, 4, 12).view(3, 4)


class Named:
    """A function of a table, which pickles by its name."""

    def __init__(self, table: str, name: str) -> None:
        self.table, self.name = table, name
        found = globals()[table][name]
        self.function = found[0] if isinstance(found, tuple) else found

    def __call__(self, m: Between, x: torch.Tensor) -> torch.Tensor:
        return self.function(m, x)

    def __reduce__(self) -> Any:
        return Named, (self.table, self.name)


def gradients(call: Callable[[torch.Tensor], torch.Tensor], module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """An output, and the gradients of the input and of the parameters."""
    x = x.clone().requires_grad_()
    parameters = list(module.parameters())
    y = call(x)
    found = torch.autograd.grad(
        (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum(), [x, *parameters], allow_unused=True
    )
    return [y.detach(), *(g if g is not None else torch.zeros(()) for g in found)]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def convert(module: nn.Module, lists: Any = (), dtype: torch.dtype = torch.bfloat16) -> AmpModule:
    return autocastfx.convert(module, X, dtype=dtype, op_list=lists or OpList())


def leaves(model: AmpModule) -> list[tuple[str, str, str]]:
    """(op, category, precision) of the nodes that stand for Python calls."""
    found = [n for n in model.plan.nodes if "." in n.op]
    return [
        (
            n.op.removeprefix(f"{__name__}.").removeprefix("tests.helpers."),
            str(n.decision.category),
            str(n.placement.run),
        )
        for n in found
    ]


@functools.cache
def kept(name: str) -> tuple[Between, AmpModule]:
    """A module and its conversion by an empty list, which changes no dtype."""
    module = Between(Named("FUNCTIONS", name))
    return module, convert(module)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_custom_backward_is_kept(name: str) -> None:
    module, model = kept(name)
    assert leaves(model)
    for training in (True, False):
        module.train(training)
        model.train(training)
        assert equal(gradients(model, module, X), gradients(module, module, X))
        other = torch.linspace(-3, 5, 20).view(5, 4)
        assert equal(gradients(model, module, other), gradients(module, module, other))
    assert len(model.variants) <= 4  # of each mode, one for the first size and one for all others


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * (10 * torch.ones_like(x) if grad is None else grad)


@pytest.mark.parametrize("way", ["convert", "enable"])
def test_a_gradient_of_the_gradient_goes_through_a_custom_backward(way: str) -> None:
    """As a gradient penalty asks for it."""
    plain = Between(lambda m, x: Cubed.apply(x))
    module = copy.deepcopy(plain)
    options = {"dtype": "bfloat16", "op_list": OpList.of({"deny": ["linear"]})}
    model = getattr(autocastfx, way)(module, **options)

    def penalties(run: Callable[..., torch.Tensor], module: nn.Module) -> list[torch.Tensor]:
        x = X.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
        return list(torch.autograd.grad(gradient.square().sum(), [module.a.weight, module.b.weight]))

    assert equal(penalties(model, module), penalties(plain, plain))


class Counting(torch.autograd.Function):
    count, seen = 0, list[int]()

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Counting.count += 1
        Counting.seen.append(Counting.count)
        return x * Counting.count

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


@pytest.mark.parametrize("way", ["convert", "enable"])
def test_what_a_custom_function_counts_are_the_calls_of_the_model(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counting, "count", 0)
    monkeypatch.setattr(Counting, "seen", [])
    module = nn.Sequential(nn.Linear(4, 4), Counted())
    model = getattr(autocastfx, way)(module, dtype="bfloat16", op_list=OpList.of({"deny": ["linear"]}))
    for count in range(1, 4):
        assert torch.allclose(model(X), count * module[0](X))
    assert Counting.seen == [1, 2, 3]


class Counted(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Counting.apply(x)


def test_what_export_alone_does_to_it() -> None:
    """The reason for all this: a straight-through gradient is lost without a word."""
    module = Between(FUNCTIONS["straight-through"])
    exported = torch.export.export(module, (X,), strict=False).module()
    assert not gradients(exported, module, X)[1].any()
    assert gradients(module, module, X)[1].any()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_model_with_custom_functions_copies_and_pickles(name: str) -> None:
    module, model = kept(name)
    expected = gradients(model, module, X)
    for again in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        pickle.loads(pickle.dumps(copy.deepcopy(model))),
    ):
        assert equal(gradients(again, again, X), expected)
        assert leaves(again) == leaves(model)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own doing
def test_a_model_with_a_custom_function_compiles() -> None:
    module, model = kept("straight-through")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert equal(gradients(compiled, module, X), gradients(model, module, X))
    assert "Straight(" in model.code


def test_a_custom_function_can_be_allowed_and_denied(tmp_path: Path) -> None:
    module = Between(FUNCTIONS["straight-through"])
    rules = f"extends: bfloat16\n%s: [{Straight.__module__}.Straight]"
    kept = convert(module, "bfloat16")
    assert leaves(kept) == [("Straight", "keep", "float32")]
    denied = convert(module, op_list(tmp_path, rules % "deny"))
    assert leaves(denied) == [("Straight", "deny", "float32")]
    allowed = convert(module, op_list(tmp_path, rules % "allow"))
    assert leaves(allowed) == [("Straight", "allow", "low")]
    for model in (kept, denied, allowed):
        result, expected = gradients(model, module, X * 2), gradients(module, module, X * 2)
        assert [g.dtype for g in result] == [torch.float32] * len(result)
        # away from ties of round(), bfloat16 moves a value by at most 2 ** -8 of itself
        assert all(relative_error(r, e) < 0.05 for r, e in zip(result[1:], expected[1:], strict=True) if e.any())


def test_a_custom_function_can_be_banned(tmp_path: Path) -> None:
    lists = op_list(tmp_path, f"ban: [{{reason: no rounding, ops: [{Straight.__module__}.Straight]}}]")
    with pytest.raises(BannedOpError, match=r"Straight.*no rounding"):
        convert(Between(FUNCTIONS["straight-through"]), lists)


def test_an_autograd_call_is_its_function() -> None:
    call = AutogradCall(Straight)
    x = torch.tensor([0.4, 1.6], requires_grad=True)
    call(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 3.0]
    assert call == AutogradCall(Straight) == pickle.loads(pickle.dumps(call))
    assert call != AutogradCall(Masked)
    assert len({call, AutogradCall(Straight)}) == 1
    assert (call.__module__, call.__qualname__) == (Straight.__module__, "Straight")


# -- Python functions that a list names -------------------------------------------------------------------------------


def fused(x: torch.Tensor, by: Any = 1.0, *, name: str | None = None) -> torch.Tensor:
    return torch.sin(x) * by


def pair(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    return x + y, {"product": x * y, "list": [x, 3]}


def calls_fused(x: torch.Tensor) -> torch.Tensor:
    return fused(x) + 1


class Holder:
    @staticmethod
    def static(x: torch.Tensor) -> torch.Tensor:
        return x.cos()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Another module, which imported ``fused`` by a name of its own."""
    module = types.ModuleType("autocastfx_library")
    module.__dict__["renamed"] = fused
    monkeypatch.setitem(sys.modules, "autocastfx_library", module)
    return module


WHOLE: dict[str, tuple[Callable[[Between, torch.Tensor], torch.Tensor], str]] = {
    "plain": (lambda m, x: fused(x), "fused"),
    "arguments": (lambda m, x: fused(x, 2.0, name="n"), "fused"),
    "a size": (lambda m, x: fused(x, x.shape[0]), "fused"),
    "a parameter": (lambda m, x: fused(x, by=m.scale), "fused"),
    "nested outputs": (lambda m, x: (lambda s, d: s + d["product"] + d["list"][0])(*pair(x, x * 2)), "pair"),
    "static method": (lambda m, x: Holder.static(x), "Holder.static"),
    "imported elsewhere": (lambda m, x: sys.modules["autocastfx_library"].renamed(x), "fused"),
    "inside another": (lambda m, x: calls_fused(x), "fused"),
}


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("name", WHOLE)
def test_a_listed_function_stays_one_node(name: str, tmp_path: Path) -> None:
    path = WHOLE[name][1]
    module = Between(Named("WHOLE", name))
    before = (fused, pair, calls_fused, vars(Holder)["static"], library_function())
    allowed = convert(module, op_list(tmp_path, f"extends: bfloat16\nallow: [{__name__}.{path}]"))
    assert (fused, pair, calls_fused, vars(Holder)["static"], library_function()) == before
    assert leaves(allowed) == [(path, "allow", "low")]
    result, expected = gradients(allowed, module, X), gradients(module, module, X)
    assert all(relative_error(r, e) < 0.05 for r, e in zip(result, expected, strict=True) if e.any())
    assert torch.equal(pickle.loads(pickle.dumps(allowed))(X), allowed(X))
    denied = convert(module, op_list(tmp_path, f"deny: [{__name__}.{path}]"))
    assert leaves(denied) == [(path, "deny", "float32")]
    assert equal(gradients(denied, module, X), gradients(module, module, X))


def test_a_function_that_no_list_names_is_traced() -> None:
    model = convert(Between(WHOLE["plain"][0]), "bfloat16")
    assert leaves(model) == []
    assert "sin" in model.code


def library_function() -> Any:
    return sys.modules["autocastfx_library"].__dict__["renamed"]


@pytest.mark.usefixtures("library")
def test_any_path_to_a_function_names_it(tmp_path: Path) -> None:
    model = convert(Between(WHOLE["plain"][0]), op_list(tmp_path, "allow: [autocastfx_library.renamed]"))
    assert leaves(model) == [("fused", "allow", "low")]


def test_a_listed_function_that_is_not_there_does_no_harm(tmp_path: Path) -> None:
    lists = op_list(tmp_path, f"allow: [not_loaded.function, {__name__}.missing, {__name__}.Between, torch.nn.Linear]")
    with pytest.warns(UnmatchedRuleWarning) as caught:
        assert leaves(convert(Between(lambda m, x: x), lists)) == []
    assert [str(w.message).rpartition("is ")[2].split("'")[1] for w in caught] == [
        "not_loaded.function",
        f"{__name__}.missing",
    ]


def test_functions_of_torch_can_stay_whole(tmp_path: Path) -> None:
    class Loss(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(x, torch.zeros(3, dtype=torch.int64))

    model = convert(Loss(), op_list(tmp_path, "deny: [torch.nn.functional.cross_entropy]"))
    assert leaves(model) == [("torch.nn.functional.cross_entropy", "deny", "float32")]
    assert torch.equal(model(X), Loss()(X))


# -- what a graph cannot hold -----------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool, only_in_training: bool = False) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.use_reentrant, self.only_in_training = use_reentrant, only_in_training

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.only_in_training and not self.training:
            return self.inner(x)
        return checkpoint.checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_checkpointing_is_kept(training: bool) -> None:
    module = Checkpointed(False).train(training)
    model = convert(module)
    for x in (X, torch.linspace(-3, 5, 20).view(5, 4)):
        assert equal(gradients(model, module, x), gradients(module, module, x))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_reentrant_checkpointing_is_kept(training: bool) -> None:
    """It takes ``backward``, and no ``torch.autograd.grad``."""
    module = Checkpointed(True).train(training)
    found: list[list[torch.Tensor]] = []
    model = autocastfx.convert(module, X, dtype=torch.bfloat16, op_list=OpList(), check=False)
    for call in (model, module):
        x = X.clone().requires_grad_()
        module.zero_grad()
        y = call(x)
        y.sum().backward()
        found.append([y.detach(), *(one.grad for one in (x, *module.parameters()) if one.grad is not None)])
    assert len(found[0]) == 4
    assert equal(*found)


def test_checkpointing_of_a_sequence_is_refused_with_the_line() -> None:
    with pytest.raises(CaptureError, match=r"(?s)checkpoint_sequential.*test_whole_calls\.py:\d+.*enable"):
        convert(
            Net(
                lambda m, x: checkpoint.checkpoint_sequential(m.inner, 2, x, use_reentrant=False),
                inner=nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)),
            )
        )


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_in_training_alone(use_reentrant: bool) -> None:
    module = Checkpointed(use_reentrant, only_in_training=True).eval()
    model = autocastfx.convert(module, X, dtype=torch.bfloat16, op_list=OpList(), check=False)
    assert torch.equal(model(X), module(X))
    assert torch.equal(model.train()(X), module(X))


def test_a_function_of_modules_is_no_node() -> None:
    class Runs(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, module: nn.Module) -> torch.Tensor:
            return module(x)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return grad, None

    module = Between(lambda m, x: Runs.apply(x, m.b))
    model = convert(module)
    assert not [op for op, *_ in leaves(model) if "Runs" in op]
    assert equal(gradients(model, module, X), gradients(module, module, X))


# -- the patches ------------------------------------------------------------------------------------------------------


def patched() -> list[Any]:
    return [
        vars(torch.autograd.Function).get("apply"),
        fused,
        vars(Holder)["static"],
        inspect.getattr_static(Straight, "apply"),
    ]


PATHS = [f"{__name__}.fused", f"{__name__}.Holder.static"]


def test_the_patches_are_undone_after_an_error() -> None:
    before = patched()

    def fails(m: Between, x: torch.Tensor) -> torch.Tensor:
        raise ValueError(str(Straight.apply(x).shape))

    with pytest.raises(CaptureError):
        convert(Between(fails))
    assert all(now is was for now, was in zip(patched(), before, strict=True))


def test_functions_of_torch_itself_are_kept_with_their_backward() -> None:
    """torch implements some of its own operators as autograd functions."""
    members = {"forward": staticmethod(lambda ctx, x: x * 2), "backward": staticmethod(lambda ctx, g: g * 3)}
    inside = type("Inside", (torch.autograd.Function,), {**members, "__module__": "torch.somewhere"})
    module = Between(lambda m, x: inside.apply(x))
    assert equal(gradients(convert(module), module, X), gradients(module, module, X))
