"""Converted models as ONNX: valid, and onnxruntime gives their outputs, with its default optimisation."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import autocastfx
from autocastfx import AmpModule
from autocastfx.errors import MissingExtraError, UnsupportedError
from autocastfx.runtime.operators.casts import saturating_cast
from benchmarks.models.zoo import ZOO
from tests.golden.readme import INTEGRATIONS, outputs, run, section
from tests.helpers import Function, Net, sampled, unchecked

pytest.importorskip("onnxruntime", reason="needs onnxruntime: make integrations")
pytest.importorskip("onnxscript", reason="needs onnxscript: make integrations")

import onnx
import onnxruntime

from autocastfx.integrations.onnx import export

pytestmark = [
    pytest.mark.filterwarnings("ignore:float16 convolutions on a CPU:UserWarning"),
]
HALF, BRAIN = torch.float16, torch.bfloat16


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(20, 16), kind(16, 16, 2, batch_first=True), nn.Linear(16, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.inner(self.embed(tokens))[0])


class UNet(nn.Module):
    """Convolutions with batch norms, down and up again beside a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.down, self.after = _convolution(3, 8), _convolution(8, 16), _convolution(16, 8)
        self.up, self.head = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.before(x)
        low = self.down(nn.functional.max_pool2d(skip, 2))
        return self.head(self.after(torch.cat([skip, self.up(low)], 1)))


def _convolution(before: int, after: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())


def cnn() -> nn.Module:
    """All norms that take float32 parameters beside 16-bit values."""
    first = nn.Sequential(_convolution(3, 8), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.SiLU())
    return nn.Sequential(first, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4), nn.LayerNorm(4), nn.Softmax(-1))


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False)


Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def settled(build: Callable[[], nn.Module], *args: Tensor) -> Made:
    """The model with running statistics of its inputs, and the call."""
    torch.manual_seed(0)
    model = build().train()
    if any(isinstance(module, nn.BatchNorm2d) for module in model.modules()):
        model(*args)
    return model.eval(), args, {}


# Of the zoo, a model of each kind: encoders, decoders, both, images, sound. All parameters are float32.
OF_THE_ZOO = (
    *("bert", "roberta", "deberta", "fnet", "gpt2", "gpt2-eager", "llama", "mistral", "qwen3", "opt", "bloom", "mamba"),
    *("t5", "bart", "whisper", "vit", "beit", "swin", "resnet", "convnext", "efficientnet", "segformer", "ast"),
)
OWN: dict[str, Callable[[], Made]] = {
    "CNN": lambda: settled(cnn, torch.randn(2, 3, 16, 16)),
    "U-Net": lambda: settled(UNet, torch.randn(2, 3, 16, 16)),
    "LSTM": lambda: settled(lambda: Recurrent(nn.LSTM), torch.randint(20, (2, 7))),
    "GRU": lambda: settled(lambda: Recurrent(nn.GRU), torch.randint(20, (2, 7))),
    "encoder": lambda: settled(encoder, torch.randn(2, 7, 16)),
}
DEFAULT = [("CNN", HALF), ("CNN", BRAIN), ("LSTM", BRAIN), ("gpt2", HALF), ("t5", BRAIN), ("resnet", HALF)]


def made(name: str) -> Made:
    if name in OWN:
        return OWN[name]()
    model = next(one for one in ZOO if one.name == name)
    inputs = {
        key: value for key, value in model.inputs(2, 16).items() if key != "labels" or name in ("t5", "bart", "whisper")
    }
    return model.build().eval(), (), inputs


def tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def session(path: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def in_onnxruntime(path: Path, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    loaded = session(path)
    names = [one.name for one in loaded.get_inputs()]
    feeds = {name: kwargs[name] for name in names} if kwargs else dict(zip(names, args, strict=True))
    return [torch.from_numpy(one) for one in loaded.run(None, {name: value.numpy() for name, value in feeds.items()})]


def norm(x: Tensor) -> float:
    return float(x.detach().double().norm())


CASES = [(name, low) for name in (*OWN, *OF_THE_ZOO) for low in (HALF, BRAIN)]


@pytest.mark.parametrize("case", sampled(CASES, lambda _, case: case in DEFAULT), ids=str)
def test_onnxruntime_gives_the_same(case: tuple[str, torch.dtype], tmp_path: Path) -> None:
    """No further from float32 than twice the converted model, plus the dtype's epsilon."""
    name, low = case
    model, args, kwargs = made(name)
    amp_model = autocastfx.convert(model, args, kwargs, dtype=low)
    path = tmp_path / "model.onnx"
    program = export(amp_model, args, path, kwargs=kwargs, emulate=low is BRAIN)
    onnx.checker.check_model(str(path), full_check=True)
    assert {node.domain for node in program.model.graph.all_nodes()} == {""}, "operators of ours are written out"
    with torch.no_grad():
        exact, ours = tensors(model(*args, **kwargs)), tensors(amp_model(*args, **kwargs))
    theirs = in_onnxruntime(path, args, kwargs)
    assert [(t.dtype, t.shape) for t in theirs] == [(t.dtype, t.shape) for t in ours]
    for their, our, one in zip(theirs, ours, exact, strict=True):
        assert norm(their - one) <= 2 * norm(our - one) + torch.finfo(low).eps * norm(one)


def written(amp_model: AmpModule, args: tuple[Any, ...], **options: Any) -> onnx.ModelProto:
    """What is exported, checked, with the dtype of each value."""
    proto = export(amp_model, args, **options).model_proto
    onnx.checker.check_model(proto, full_check=True)
    return onnx.shape_inference.infer_shapes(proto)


def read(proto: onnx.ModelProto, op: str) -> set[str]:
    """The dtypes that operators of this type read."""
    values = (*proto.graph.input, *proto.graph.value_info, *proto.graph.output)
    dtypes = {value.name: value.type.tensor_type.elem_type for value in values}
    dtypes |= {weight.name: weight.data_type for weight in proto.graph.initializer}
    nodes = [node for node in proto.graph.node if node.op_type == op]
    return {onnx.TensorProto.DataType.Name(dtypes[name]) for node in nodes for name in node.input if name}


@pytest.mark.parametrize("low", [HALF, BRAIN])
@pytest.mark.parametrize("opset", [18, 22, 24])
def test_norms_beside_float32_parameters_are_float32_between_casts(low: torch.dtype, opset: int) -> None:
    model, args, _ = settled(cnn, torch.randn(2, 3, 16, 16))
    proto = written(autocastfx.convert(model, args, dtype=low), args, opset_version=opset)
    kind = "FLOAT" if low is BRAIN and opset < 22 else "FLOAT16" if low is HALF else "BFLOAT16"
    assert read(proto, "Conv") == {kind}, "before opset 22 no convolution takes bfloat16"
    assert read(proto, "BatchNormalization") == {"FLOAT"}
    assert read(proto, "GroupNormalization") <= {"FLOAT"}


@unchecked
@pytest.mark.parametrize("low", [HALF, BRAIN])
def test_a_saturating_cast_gives_the_same_bits(low: torch.dtype, tmp_path: Path) -> None:
    """Of every 16411th number of float32, infinities and NaN."""
    x = torch.arange(-(2**31), 2**31, 16411).to(torch.int32).view(torch.float32)
    x = torch.cat([x, torch.tensor([0.0, -0.0, 70000.0, math.inf, -math.inf, math.nan])])
    bound = torch.finfo(low).max / 2
    amp_model = autocastfx.convert(Function(lambda x: saturating_cast(x, low, bound).float()), (x,), dtype=low).eval()
    export(amp_model, (x,), tmp_path / "model.onnx")
    (theirs,), ours = in_onnxruntime(tmp_path / "model.onnx", (x,), {}), amp_model(x)
    assert torch.equal(theirs.isnan(), ours.isnan())
    some = ~ours.isnan()
    assert torch.equal(theirs[some].view(torch.int32), ours[some].view(torch.int32))


@pytest.mark.parametrize("low", [HALF, BRAIN])
def test_sizes_are_dynamic_and_inputs_named_where_asked(low: torch.dtype, tmp_path: Path) -> None:
    model, args, _ = settled(cnn, torch.randn(2, 3, 16, 16))
    amp_model = autocastfx.convert(model, args, dtype=low)
    options: dict[str, Any] = {"dynamic_shapes": [{0: "batch"}], "input_names": ["pixels"]}
    export(amp_model, args, tmp_path / "model.onnx", emulate=low is BRAIN, **options)
    (pixels,) = session(tmp_path / "model.onnx").get_inputs()
    assert (pixels.name, pixels.shape) == ("pixels", ["batch", 3, 16, 16])
    for batch in (1, 5):
        x = torch.randn(batch, 3, 16, 16)
        (theirs,) = in_onnxruntime(tmp_path / "model.onnx", (x,), {})
        assert norm(theirs - amp_model(x)) <= 2 * torch.finfo(low).eps * norm(theirs)


def test_keyword_arguments_come_in_any_order(tmp_path: Path) -> None:
    given = {"b": torch.randn(2, 4), "a": torch.randn(2, 4)}
    amp_model = autocastfx.convert(Net(lambda m, a, b: torch.relu(a) - b).eval(), (), given, dtype=HALF)
    export(amp_model, path=tmp_path / "model.onnx", kwargs=given)
    assert torch.equal(in_onnxruntime(tmp_path / "model.onnx", (), given)[0], amp_model(**given))


def test_each_call_is_exported_with_its_own_graph(tmp_path: Path) -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor, mask: Tensor | None = None, *, twice: bool = False) -> Tensor:
            y = torch.relu(x) if mask is None else torch.relu(x) * mask
            return 2 * y if twice else y

    x, mask = torch.randn(2, 4), torch.rand(2, 4)
    amp_model = autocastfx.convert(Masked().eval(), (x,), dtype=HALF)
    for given in ({"x": x}, {"x": x, "mask": mask}, {"mask": mask, "x": x, "twice": True}):
        export(amp_model, path=tmp_path / "model.onnx", kwargs=given)
        (theirs,) = in_onnxruntime(tmp_path / "model.onnx", (), given)
        assert torch.equal(theirs, amp_model(**given))


def test_a_call_that_was_not_captured_is_captured_first() -> None:
    amp_model = autocastfx.convert(nn.Linear(4, 4).eval(), dtype=HALF)
    export(amp_model, (torch.ones(2, 4),))
    assert len(amp_model.variants) == 1


def test_emulated_bfloat16_computes_in_float32_and_rounds_each_result(tmp_path: Path) -> None:
    x = torch.randn(4, 16)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)).eval()
    amp_model = autocastfx.convert(model, (x,), dtype=BRAIN)
    assert read(written(amp_model, (x,)), "Gemm") == {"BFLOAT16"}
    assert read(written(amp_model, (x,), emulate=True), "Gemm") == {"FLOAT"}
    export(amp_model, (x,), tmp_path / "model.onnx", emulate=True)
    (theirs,) = in_onnxruntime(tmp_path / "model.onnx", (x,), {})
    assert torch.equal(theirs, theirs.to(BRAIN).float())
    export(amp_model, (x,), tmp_path / "model.onnx")
    with pytest.raises(Exception, match="Could not find an implementation for Gemm"):
        session(tmp_path / "model.onnx")


def test_what_cannot_be_exported_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2, 4)
    with pytest.raises(UnsupportedError, match=r"Linear is not a converted model: give it to autocastfx\.convert"):
        export(nn.Linear(4, 4), (x,))  # type: ignore[arg-type]
    amp_model = autocastfx.convert(nn.Linear(4, 4), (x,), dtype=HALF)
    with pytest.raises(UnsupportedError, match=r"the model is in training mode: call amp_model\.eval\(\)"):
        export(amp_model, (x,))
    with pytest.raises(TypeError, match=r"takes path=\.\.\., not f="):
        export(amp_model.eval(), (x,), f="model.onnx")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(MissingExtraError, match="pip install onnx onnxscript"):
        export(amp_model.eval(), (x,))


def test_nothing_of_onnx_is_imported_before_it_is_asked_for() -> None:
    code = "import sys, autocastfx.integrations.onnx; print([n for n in sys.modules if n.startswith('onnx')])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_the_code_of_the_page_prints_what_is_shown(tmp_path: Path) -> None:
    text = section(INTEGRATIONS.read_text(encoding="utf-8"), "ONNX")
    printed, shown = run(text, tmp_path), list(outputs(text))
    assert len(shown) == text.count("```text\n") > 0
    assert {code.start: output.text for code, output in shown} == {
        start: said for start, said in printed.items() if said
    }
