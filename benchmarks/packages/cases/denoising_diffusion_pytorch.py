"""denoising-diffusion-pytorch: U-Nets with linear attention, inside of the diffusion that gives the loss."""

from __future__ import annotations

import torch
from denoising_diffusion_pytorch import GaussianDiffusion, GaussianDiffusion1D, Unet, Unet1D
from torch import Tensor, nn

from benchmarks.packages.case import Case, Given


def _unet() -> Unet:
    return Unet(dim=16, dim_mults=(1, 2), attn_heads=2, attn_dim_head=8)


def _diffusion() -> nn.Module:
    return GaussianDiffusion(_unet(), image_size=16, timesteps=20).train()


def _diffusion1d() -> nn.Module:
    return GaussianDiffusion1D(Unet1D(dim=16, dim_mults=(1, 2), channels=4), seq_length=16, timesteps=20).train()


def _images() -> Given:
    return (torch.rand(2, 3, 16, 16),), {}


def _sequences() -> Given:
    return (torch.rand(2, 4, 16),), {}


def _noisy() -> Given:
    return (torch.randn(2, 3, 16, 16), torch.tensor([3, 11])), {}


def _loss(output: Tensor, _: Given) -> Tensor:
    return output


CASES = (
    Case("U-Net", lambda: _unet().train(), _noisy),
    Case("diffusion", _diffusion, _images, _loss),
    Case("diffusion of sequences", _diffusion1d, _sequences, _loss),
)
