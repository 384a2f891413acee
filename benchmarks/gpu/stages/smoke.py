"""Convert a small Transformer and train it for some steps: what fails here fails everywhere."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

import autocastfx
from benchmarks.gpu.sides import DTYPES
from benchmarks.gpu.stage import Given, Row


def smoke(given: Given, steps: int = 3) -> Iterator[Row]:
    """Yield the losses of each dtype.

    Raises:
        RuntimeError: losses are not finite, do not fall, or a step was skipped.
    """
    torch.manual_seed(0)
    x, target = torch.randn(4, 32, 64, device=given.device), torch.randn(4, 32, 64, device=given.device)
    for name, dtype in DTYPES.items():
        layer = nn.TransformerEncoderLayer(64, 2, 128, dropout=0.0, batch_first=True, norm_first=True)
        amp_model = autocastfx.convert(layer.to(given.device).train(), (x,), dtype=dtype)
        optimizer = autocastfx.LossScalingOptimizer(torch.optim.AdamW(amp_model.parameters(), lr=1e-2, fused=True))
        losses: list[float] = []
        for _ in range(steps):
            loss = (amp_model(x) - target).square().mean()
            optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        yield {"model": "Transformer layer", "dtype": name, "losses": [round(loss, 4) for loss in losses]}
        if not losses[-1] < losses[0]:
            raise RuntimeError(f"the losses in {name} do not fall: {losses}")
