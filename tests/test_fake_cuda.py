"""The models of ``benchmarks.gpu`` are captured and converted on a CUDA device, without one."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from autocastfx.graph.node import tensors
from benchmarks.gpu import sides
from benchmarks.gpu.plan import ALIGNED, STEPS
from benchmarks.models.families import FullModel, bert, gpt2, llama, t5, vit
from benchmarks.models.gpu import MODELS
from benchmarks.training import DEFAULT, FASTEST, SIDES
from tests.fake_cuda import on_fake_cuda

# Of full width, which costs nothing here, but of few layers.
FEW_LAYERS = {
    "BERT, padded": FullModel(partial(bert, 1024, 1, 16), MODELS["BERT-large b32 s512, padded"].inputs),
    "GPT-2": FullModel(partial(gpt2, 1024, 1, 16), MODELS["GPT-2 medium b8 s1024"].inputs),
    "Llama": FullModel(partial(llama, 2048, 1, 32, 5632, num_key_value_heads=4), MODELS["Llama 1.1B b2 s2048"].inputs),
    "ViT": FullModel(partial(vit, 1024, 1, 16), MODELS["ViT-L b64"].inputs),
    "ResNet": MODELS["ResNet tiny"],
    "T5, padded": FullModel(partial(t5, 768, 1, 12), MODELS["T5-base b16 s512, padded"].inputs),
}
FULL = (*STEPS, *ALIGNED, "GPT-2 b8 s1024", "BERT-base b8 s512")
LARGE = [pytest.param(MODELS[name], marks=pytest.mark.slow, id=name) for name in FULL]


@pytest.mark.parametrize("full", [*(pytest.param(full, id=name) for name, full in FEW_LAYERS.items()), *LARGE])
def test_a_model_is_converted_on_a_cuda_device(full: FullModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def built(name: str, device: str, *, dropout: bool = True) -> tuple[nn.Module, Any]:
        return on_fake_cuda(full)

    monkeypatch.setattr(sides, "built", built)
    found = sides.source("", "cuda")
    assert found.captures.graphs[0].captured.device == torch.device("cuda", 0)
    for dtype, side in zip(sides.DTYPES.values(), (DEFAULT, FASTEST), strict=True):
        options = SIDES[side].convert
        assert options is not None
        amp_model = found.converted(dtype, options["weights"], options["fold"])
        values = [value for node in amp_model.graph.nodes for value in tensors(node)]
        elsewhere = [value for value in values if value.device.type != "cuda"]
        assert not [value for value in elsewhere if value.ndim], "numbers alone may be on the CPU"
        assert sum(value.dtype == dtype for value in values) > len(values) / 4
