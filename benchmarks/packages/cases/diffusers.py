"""diffusers: a U-Net with cross-attention, an autoencoder and a transformer, with activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers import AutoencoderKL, DiTTransformer2DModel, UNet2DConditionModel
from torch import Tensor, nn

from benchmarks.packages.case import Case, Given


def _unet() -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        cross_attention_dim=16,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )


def _autoencoder() -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=8,
    )


def _transformer() -> DiTTransformer2DModel:
    return DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        num_layers=2,
        sample_size=8,
        num_embeds_ada_norm=10,
        dropout=0.0,
        norm_num_groups=4,
    )


def _noisy() -> Given:
    given = {"sample": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([3, 500])}
    return (), {**given, "encoder_hidden_states": torch.randn(2, 5, 16)}


def _images() -> Given:
    return (torch.randn(2, 3, 16, 16),), {}


def _latents() -> Given:
    return (torch.randn(2, 4, 8, 8),), {"timestep": torch.tensor([3, 7]), "class_labels": torch.tensor([1, 2])}


def _loss(output: Any, _: Given) -> Tensor:
    return output.sample.float().square().mean()


def _checkpointed(build: Callable[[], Any]) -> nn.Module:
    model = build()
    model.enable_gradient_checkpointing()
    return model.train()


def _case(name: str, build: Callable[[], Any], inputs: Callable[[], Given]) -> Case:
    return Case(name, lambda: build().train(), inputs, _loss, lambda: _checkpointed(build))


CASES = (
    _case("UNet2DConditionModel", _unet, _noisy),
    _case("AutoencoderKL", _autoencoder, _images),
    _case("DiTTransformer2DModel", _transformer, _latents),
)
