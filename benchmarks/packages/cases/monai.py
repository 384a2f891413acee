"""monai: networks for volumes, with the package's losses, on tensors that carry meta data too."""

from __future__ import annotations

from typing import Any

import torch
from monai.data import MetaTensor
from monai.losses import DiceCELoss
from monai.networks.nets import DynUNet, SegResNet, SwinUNETR, UNet
from torch import Tensor, nn

from benchmarks.packages.case import Case, Given

_LOSS = DiceCELoss(to_onehot_y=True, softmax=True)
SIZE = 16


def _unet() -> nn.Module:
    return UNet(3, 1, 2, channels=(8, 16, 32), strides=(2, 2), num_res_units=1, norm="batch").train()


def _dynamic() -> nn.Module:
    return DynUNet(
        3, 1, 2, [3, 3, 3], [1, 2, 2], [2, 2], filters=[8, 16, 32], deep_supervision=True, deep_supr_num=1
    ).train()


def _swin(**options: bool) -> nn.Module:
    sizes = {"patch_size": 2, "depths": (1,) * 4, "num_heads": (1, 1, 2, 2), "feature_size": 12, "spatial_dims": 2}
    return SwinUNETR(1, 2, **sizes, **options).train()


def _volumes() -> Given:
    return (torch.randn(2, 1, SIZE, SIZE, SIZE),), {}


def _with_meta_data() -> Given:
    return (MetaTensor(torch.randn(2, 1, SIZE, SIZE, SIZE)),), {}


def _pictures() -> Given:
    return (torch.randn(2, 1, 64, 64),), {}


def _loss(output: Any, given: Given) -> Tensor:
    x = given[0][0]
    target = (torch.arange(x[0].numel()).view(1, *x.shape[1:]) % 2).expand(2, *x.shape[1:])
    outputs = output.unbind(1) if output.ndim > x.ndim else (output,)
    return torch.stack([_LOSS(one, target) for one in outputs]).sum()


CASES = (
    Case("UNet", _unet, _volumes, _loss),
    Case("UNet on MetaTensor", _unet, _with_meta_data, _loss),
    Case("DynUNet", _dynamic, _volumes, _loss),
    Case("SegResNet", lambda: SegResNet(init_filters=8, in_channels=1, out_channels=2).train(), _volumes, _loss),
    Case("SwinUNETR", _swin, _pictures, _loss, lambda: _swin(use_checkpoint=True)),
)
