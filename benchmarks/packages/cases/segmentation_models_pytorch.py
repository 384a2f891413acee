"""segmentation-models-pytorch: decoders on random encoders, with the package's own losses."""

from __future__ import annotations

from typing import Any

import segmentation_models_pytorch as smp
import torch
from torch import Tensor, nn

from benchmarks.packages.case import Case, Given

SIZE = 64


def _images() -> Given:
    return (torch.randn(2, 3, SIZE, SIZE),), {}


def _dice(output: Tensor, _: Given) -> Tensor:
    target = (torch.arange(SIZE * SIZE).view(1, SIZE, SIZE) % 3).expand(2, -1, -1)
    return smp.losses.DiceLoss("multiclass")(output, target) + smp.losses.FocalLoss("multiclass")(output, target)


def _case(name: str, model: Any, encoder: str = "resnet18", **options: Any) -> Case:
    def build() -> nn.Module:
        return model(encoder, encoder_weights=None, classes=3, **options).train()

    return Case(name, build, _images, _dice)


CASES = (
    _case("Unet", smp.Unet, decoder_attention_type="scse"),
    _case("FPN, MobileNet", smp.FPN, "timm-mobilenetv3_small_minimal_100"),
    _case("DeepLabV3Plus", smp.DeepLabV3Plus),
    _case("Segformer, MiT", smp.Segformer, "mit_b0"),
)
