"""The backend converts what Dynamo captures: the same numbers as ``convert``, in the user's own model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autocastfx
from autocastfx import CompileBackend
from autocastfx.errors import UncapturedGraphWarning, VariantError
from autocastfx.plan.plan import Precision
from autocastfx.report.compiled_graph import CompiledGraph
from tests.helpers import Net, op_list, relative_error, sampled, saved_bytes
from tests.nearness import assert_as_near_as_autocast

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

LOW = torch.bfloat16
INNER = ("eager", "aot_eager")


class Layers(nn.Module):
    """Layers in a list, a batch norm, a region without gradients, dropout, a buffer and a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.register_buffer("scale", torch.full((8,), 3.0))
        self.plain = torch.ones(8)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        for layer in self.layers:
            x = torch.relu(layer(x))
        with torch.no_grad():
            still = x * 2
        return self.dropout(self.norm(x)) + still * self.scale + self.plain, x.shape[0]


class Tied(nn.Module):
    """An embedding whose weight is the head's, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.LayerNorm(8)

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.norm(self.embedding(tokens)))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Cube(torch.autograd.Function):
    """Its backward is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        return gradients[0] * 100 * ctx.saved_tensors[0]


class WithCube(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Cube.apply(self.first(x)))


class Island(nn.Module):
    """A layer in a region that switches torch.autocast off, and one of two branches by a value."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.yes, self.no = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.autocast("cpu", enabled=False):
            x = self.yes(x.float())
        return torch.cond(x.sum() > 0, lambda y: self.yes(y), lambda y: self.no(y) * 2, (x,))


class Average(nn.Module):
    """Writes into a buffer that it then reads, and returns a value without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x)
        with torch.no_grad():
            self.average.mul_(0.9).add_(0.1 * y.mean(0))  # torch 2.11 would round alpha=0.1 apart
            still = self.layer(y)
        return y + self.average, still


def tokens(batch: int = 2) -> tuple[Tensor, Tensor]:
    ids = torch.arange(batch * 6).reshape(batch, 6) % 16
    return ids, ids


MODELS: dict[str, tuple[type[nn.Module], Callable[[int], tuple[Tensor, ...]]]] = {
    "layers": (Layers, lambda n: (torch.randn(n, 8, generator=torch.Generator().manual_seed(n)),)),
    "tied": (Tied, tokens),
    "regions": (Island, lambda n: (torch.ones(n, 8),)),
    "buffer": (Average, lambda n: (torch.ones(n, 8),)),
    "autograd function": (WithCube, lambda n: (torch.ones(n, 8),)),
}


def step(model: nn.Module, called: Callable[..., Any], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Results, gradients and buffers of a training step."""
    torch.manual_seed(0)
    model.zero_grad()
    results = [t for t in torch.utils._pytree.tree_leaves(called(*inputs)) if isinstance(t, Tensor)]
    sum(t.sum() for t in results if t.requires_grad).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [*(t.detach() for t in results), *grads, *(b.clone() for b in model.buffers())]


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_the_one_of_convert_to_the_bit_for_any_size(name: str, inner: str) -> None:
    kind, inputs = MODELS[name]
    torch.manual_seed(0)
    ours = kind().train()
    theirs = copy.deepcopy(ours)
    amp_model = autocastfx.convert(theirs, inputs(2), dtype=LOW)
    backend = CompileBackend(dtype=LOW, inner=inner)
    compiled = torch.compile(ours, backend=backend)
    for size in (3, 5, 4):
        found, wanted = step(ours, compiled, inputs(size)), step(theirs, amp_model, inputs(size))
        assert len(found) == len(wanted)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert len(backend.graphs) == 2, "one for the first size, one for all"
    assert all(graph.plan is not None and not graph.failure for graph in backend.graphs)


def test_evaluation_is_a_graph_of_its_own_and_the_model_keeps_its_class() -> None:
    model, x = Layers(), torch.randn(3, 8)
    amp_model = autocastfx.convert(copy.deepcopy(model), (x,), dtype=LOW).eval()
    backend = CompileBackend(dtype=LOW, inner="eager")
    state = list(model.state_dict())
    model.eval().compile(backend=backend)
    with torch.no_grad():
        assert torch.equal(model(x)[0], amp_model(x)[0])
    assert type(model) is Layers
    assert list(model.state_dict()) == state
    model.train()(x)
    assert len(backend.graphs) == 2


def placements(backend: CompileBackend) -> dict[str, Precision]:
    plans = [graph.plan for graph in backend.graphs]
    return {node.name: node.placement.run for plan in plans if plan is not None for node in plan.nodes}


def test_each_graph_can_be_shown() -> None:
    backend = CompileBackend(dtype=LOW, inner="eager")
    compiled = torch.compile(Layers(), backend=backend)
    for size in (3, 4):
        compiled(torch.randn(size, 8))
    text = backend.graphs[-1].dump()
    assert "variant: a graph of torch.compile" in text
    assert "casts: " in text
    (row,) = [" ".join(line.split()) for line in text.splitlines() if line.startswith("  linear_1 ")]
    assert row.startswith("linear_1 layers.1 bfloat16 ")
    assert " low weight, bias → bfloat" in row
    assert autocastfx.Plan.from_json(backend.graphs[-1].dump("json")) == backend.graphs[-1].plan
    for format in ("dot", "graphml", "python"):
        assert "linear_1" in backend.graphs[-1].dump(format)
    with pytest.raises(ValueError, match="format is 'text', 'json', 'dot', 'graphml', 'python', not 'html'"):
        backend.graphs[-1].dump("html")


def test_rules_by_module_hold(tmp_path: Any) -> None:
    text = "modules:\n  - {path: layers.1, category: float32, ops: [linear]}\n"
    backend = CompileBackend(dtype=LOW, op_list=["bfloat16", op_list(tmp_path, text)], inner="eager")
    torch.compile(Layers(), backend=backend)(torch.randn(3, 8))
    found = placements(backend)
    assert (found["linear"], found["linear_1"]) == (Precision.LOW, Precision.FLOAT32)


def test_a_region_of_torch_autocast_around_the_call_decides_nothing() -> None:
    model, x = Layers().eval(), torch.randn(3, 8)
    backend = CompileBackend(dtype=LOW, inner="aot_eager")
    compiled = torch.compile(model, backend=backend)
    alone = compiled(x)[0]
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(compiled(x)[0], alone)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # which the float32 model makes
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["encoder", "attention"])
def test_attention_of_torchs_own_is_converted_in_evaluation(kind: str, masked: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2) if kind == "encoder" else nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(3, 5, 16)
    mask = torch.arange(5)[None] >= torch.tensor([5, 3, 4])[:, None] if masked else None
    model.eval()

    def call() -> torch.Tensor:
        with torch.no_grad():
            return model(x, src_key_padding_mask=mask) if kind == "encoder" else model(x, x, x, mask)[0]

    exact = call()
    autocastfx.enable(model, dtype=LOW)
    found = call()
    kept = slice(None) if mask is None else ~mask
    assert 0 < relative_error(found[kept], exact[kept]) < 4 * torch.finfo(LOW).eps
    assert torch.backends.mha.get_fastpath_enabled()
    backend = autocastfx.backend_of(model)
    assert backend is not None
    assert not backend.skipped
    runs = {(node.op, str(node.placement.run)) for g in backend.graphs if g.plan is not None for node in g.plan.nodes}
    assert ("linear", "low") in runs
    assert {op for op, _ in runs} & {"scaled_dot_product_attention", "matmul", "bmm", "baddbmm"}


def test_a_layer_that_runs_as_one_operator_is_warned_of() -> None:
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    compiled = torch.compile(model, backend=CompileBackend(dtype=LOW, inner="eager"))
    told = r"runs as one operator in float32 \(_transformer_encoder_layer_fwd\)\. To convert it, use autocastfx\.enable"
    with torch.no_grad(), pytest.warns(UncapturedGraphWarning, match=told):
        compiled(torch.randn(3, 5, 16))


# ---- graphs that cannot be converted ---------------------------------------------------------------------------------


def refuse(*_: Any) -> None:
    raise RuntimeError("no graph of this")


def test_models_do_not_share_a_limit_of_graphs() -> None:
    """Dynamo compiles one piece of code 8 times at most."""
    for size in range(1, 13):
        backend = CompileBackend(dtype=LOW, inner="eager")
        backend.compile(nn.Linear(8, size))(torch.ones(3, 8))
        assert len(backend.graphs) == 1
        assert not backend.skipped


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("uncaptured", ["autocast", "float32"])
def test_a_graph_that_cannot_be_converted_runs_otherwise_and_is_told(
    uncaptured: str, inner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autocastfx.capture.dynamo_graph.make_fx", lambda *_, **__: refuse)
    model, x = WithCube(), torch.ones(3, 8)
    other = copy.deepcopy(model)
    seen: list[CompiledGraph] = []
    backend = CompileBackend(dtype=LOW, inner=inner, uncaptured=uncaptured, report=seen.append)
    runs = {"autocast": "under torch.autocast, in bfloat16", "float32": "in float32"}[uncaptured]
    with pytest.warns(UncapturedGraphWarning, match=f"cannot be converted and runs {runs}: RuntimeError: no graph of"):
        found = step(model, torch.compile(model, backend=backend), (x,))
    with torch.autocast("cpu", LOW, enabled=uncaptured == "autocast"):
        wanted = other(x)
    wanted.sum().backward()
    assert torch.equal(found[0], wanted)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    assert seen == backend.graphs
    assert [(graph.plan, graph.failure) for graph in seen] == [(None, "RuntimeError: no graph of this")]
    with pytest.raises(VariantError, match="no plan of a graph that could not be converted: RuntimeError"):
        seen[0].dump()


def test_it_can_be_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autocastfx.capture.dynamo_graph.make_fx", lambda *_, **__: refuse)
    compiled = torch.compile(WithCube(), backend=CompileBackend(dtype=LOW, inner="eager", uncaptured="error"))
    with pytest.raises(Exception, match=r"CaptureError: a graph of torch\.compile cannot be converted: RuntimeError"):
        compiled(torch.ones(3, 8))


def test_a_banned_op_is_refused(tmp_path: Any) -> None:
    lists = ["bfloat16", op_list(tmp_path, "ban:\n  - {ops: [linear], reason: not here}\n")]
    compiled = torch.compile(WithCube(), backend=CompileBackend(dtype=LOW, op_list=lists, inner="eager"))
    with pytest.raises(Exception, match=r"BannedOpError: .*not here"):
        compiled(torch.ones(3, 8))


# ---- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.float32}, "dtype is torch.float16 or torch.bfloat16"),
        ({"fold": "always"}, "fold is one of"),
        ({"uncaptured": "quietly"}, "uncaptured is one of 'autocast', 'float32', 'error', not 'quietly'"),
        ({"recompose": ["gelu"]}, "gelu"),
    ],
)
def test_a_wrong_argument_is_said(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CompileBackend(**options)


def test_a_function_of_torch_that_a_list_names_stays_whole() -> None:
    backend = CompileBackend(dtype=LOW, op_list=["apex_o1"], inner="eager")
    torch.compile(Net(lambda m, x: nn.functional.normalize(x @ x.t())), backend=backend)(torch.randn(4, 4))
    (graph,) = backend.graphs
    assert "torch.nn.functional.normalize(" in graph.module.code


# ---- recomputation ---------------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.second, self.use_reentrant = nn.Linear(8, 8), nn.Linear(8, 8), use_reentrant

    def block(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(torch.relu(self.first(x))))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_block_is_converted(use_reentrant: bool, inner: str) -> None:
    torch.manual_seed(0)
    model, x = Checkpointed(use_reentrant), torch.randn(3, 8, requires_grad=True)
    backend = CompileBackend(dtype=LOW, inner=inner)
    found = step(model, torch.compile(model, backend=backend), (x,))
    with torch.autocast("cpu", LOW):
        wanted = step(model, model, (x,))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    ((first, *rest),) = (graph.plan.nodes for graph in backend.graphs if graph.plan is not None)
    assert {node.op: node.placement.run for node in rest}["linear"] is Precision.LOW
    assert first.op.endswith("tag_activation_checkpoint")


def test_a_checkpointed_block_keeps_its_input_alone_for_backward() -> None:
    blocks, x = nn.Sequential(*(Checkpointed(False) for _ in range(4))), torch.randn(512, 8)
    compiled = torch.compile(blocks, backend=CompileBackend(dtype=LOW, inner="aot_eager"))
    compiled(x)
    kept, inputs = saved_bytes(lambda: compiled(x)), 4 * x.nbytes
    low_weights = sum(2 * p.numel() for p in blocks.parameters())
    assert inputs <= kept <= inputs + 2 * low_weights < 2 * inputs


# ---- transformers ----------------------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
SMALL: dict[str, Any] = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
DECODERS: dict[str, Callable[[], nn.Module]] = {
    "Llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2)),
    "Qwen3": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8)
    ),
    "Mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4)
    ),
    "GPT-2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**SMALL, bos_token_id=1, eos_token_id=None, loss_type="ForCausalLM")
    ),
}


def test_a_model_of_transformers_is_saved_as_it_is_and_recomputes_its_blocks(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model: Any = DECODERS["Llama"]().train()
    ids = torch.randint(1, 64, (2, 32))
    other: Any = copy.deepcopy(model)
    other.activation_checkpointing_enable()
    saved: dict[bool, int] = {}
    grads: dict[bool, list[Tensor]] = {}
    for recomputes, one in ((False, model), (True, other)):
        backend = CompileBackend(dtype=LOW, inner="aot_eager")
        backend.compile(one)
        one(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        assert backend.skipped == []
        grads[recomputes] = [p.grad for p in one.parameters()]
        saved[recomputes] = saved_bytes(lambda one=one: one(input_ids=ids, labels=ids, use_cache=False).loss)
    assert saved[True] < 0.7 * saved[False]
    for a, b in zip(grads[True], grads[False], strict=True):
        assert float((a - b).norm()) <= 4 * torch.finfo(LOW).eps * float(b.norm())
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert all(torch.equal(p, q) for p, q in zip(loaded.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("name", sampled(DECODERS, lambda _, name: name in ("Mixtral", "GPT-2")))
def test_a_training_step_is_as_near_to_float32_as_under_autocast(name: str) -> None:
    torch.manual_seed(0)
    model: Any = DECODERS[name]().train()
    ids = torch.randint(1, 64, (2, 8))

    def step(called: Any) -> dict[str, Tensor]:
        model.zero_grad()
        torch.manual_seed(0)
        loss = called(input_ids=ids, labels=ids).loss
        with torch.autocast("cpu", enabled=False):
            loss.backward()
        return {"all gradients": torch.cat([p.grad.flatten() for p in model.parameters()])}

    backend = CompileBackend(dtype=LOW, inner="aot_eager")
    assert_as_near_as_autocast(step, model, torch.compile(model, backend=backend), LOW, slack=0.0)
    assert all(graph.plan is not None for graph in backend.graphs)


class ReadsData(nn.Module):
    """Reads the values of a tensor past autograd, as quantization and normalization code does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        return hidden / hidden.data.abs().max()


def test_the_data_of_a_tensor_is_its_values_without_a_gradient() -> None:
    torch.manual_seed(0)
    model, x = ReadsData(), torch.randn(4, 8)
    exact = ReadsData()
    exact.load_state_dict(model.state_dict())
    backend = CompileBackend(dtype=LOW, inner="eager")
    backend.compile(model)
    found, wanted = model(x), exact(x)
    found.square().sum().backward()
    wanted.square().sum().backward()
    assert type(found) is Tensor
    assert 0 < relative_error(found.detach(), wanted.detach()) < 4 * torch.finfo(LOW).eps
    for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert relative_error(ours.grad, theirs.grad) < 8 * torch.finfo(LOW).eps


class ReadsNumber(nn.Module):
    """Makes a number of sizes by operators of torch, as Longformer does."""

    def forward(self, x: Tensor) -> Tensor:
        half: Any = torch.div(x.size(1), 2, rounding_mode="trunc")
        y = x.view(x.size(0), 2, half)[:, 0]
        return y @ y.mT


def test_a_number_made_of_sizes_is_no_obstacle() -> None:
    torch.manual_seed(0)
    model, x = ReadsNumber(), torch.randn(4, 32)
    backend = CompileBackend(dtype=LOW, inner="eager")
    backend.compile(model)
    assert 0 < relative_error(model(x), ReadsNumber()(x)) < 4 * torch.finfo(LOW).eps
    assert all(graph.plan is not None for graph in backend.graphs)


def test_constants_without_values_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autocastfx.capture.dynamo_graph.REPAIRS", {})
    torch.manual_seed(0)
    model, x = ReadsData(), torch.randn(4, 8)
    with torch.autocast("cpu", LOW):
        wanted = model(x)
    CompileBackend(dtype=LOW, inner="eager").compile(model)
    with pytest.warns(UncapturedGraphWarning, match="come from code that is not recorded"):
        found = model(x)
    assert torch.equal(found, wanted)


class KeepsItsLast(nn.Module):
    _keep_in_fp32_modules_strict = ("last",)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.last(self.first(x))
        torch._dynamo.graph_break()
        return hidden.softmax(-1)  # a graph without parameters


class KeepsNothing(KeepsItsLast):
    _keep_in_fp32_modules_strict = ()


def test_each_model_of_a_backend_has_its_own_rules_and_dtype() -> None:
    backend = autocastfx.CompileBackend(dtype=torch.bfloat16, inner="eager")
    kept, plain = backend.compile(KeepsItsLast()), backend.compile(KeepsNothing().bfloat16())
    runs: list[list[tuple[str, str]]] = []
    for model, dtype in ((kept, torch.float32), (plain, torch.bfloat16)):
        backend.graphs.clear()
        model(torch.randn(2, 8, dtype=dtype))
        plans = [graph.plan for graph in backend.graphs]
        runs.append([(n.op, str(n.placement.run)) for plan in plans if plan is not None for n in plan.nodes])
    assert runs[0] == [("linear", "low"), ("linear", "float32"), ("softmax", "float32")]
    assert runs[1][:2] == [("linear", "low"), ("linear", "low")]


def test_a_graph_without_parameters_of_a_16_bit_model_is_raised() -> None:
    backend = autocastfx.CompileBackend(dtype=torch.bfloat16, inner="eager")
    backend.compile(KeepsNothing().bfloat16())(torch.randn(2, 8, dtype=torch.bfloat16))
    last = backend.graphs[-1].plan
    assert last is not None
    assert [(n.op, str(n.placement.run)) for n in last.nodes] == [("softmax", "float32")]


@pytest.mark.parametrize("name", ["example_inputs", "opp_list"])
def test_arguments_that_enable_does_not_take_are_named(name: str) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(TypeError, match=f"enable takes no '{name}', but dtype, op_list, .* inner, uncaptured"):
        autocastfx.enable(model, **{name: "cached"})
    assert autocastfx.backend_of(model) is None
