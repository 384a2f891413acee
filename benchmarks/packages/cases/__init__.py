"""Models of packages from the registry, a module for each package. Nothing is downloaded.

Several packages import torchvision, whose kernels do not load beside a torch for another device. Its Python code
declares two operators that the kernels define, and is imported where these have names. No model here uses a kernel of
it.
"""

from __future__ import annotations

import os

import torch

os.environ["HF_HUB_OFFLINE"] = "1"
LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
