"""torch's attention layers in evaluation without gradients: fused, and without the padded places of a sequence."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autocastfx.capture.patch import patched_here

__all__ = ["attention_written_out", "padding_noted"]


@contextmanager
def attention_written_out() -> Generator[None]:
    """Let torch's attention layers call the operators that lists know, as under torch.compile and in training."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def padding_noted() -> Generator[list[nn.TransformerEncoder]]:
    """Note the encoders that are called with a padding mask, and may leave 0 in the padded places of their output."""
    found: list[nn.TransformerEncoder] = []
    forward: Any = nn.TransformerEncoder.forward

    def noted(self: Any, src: Any, mask: Any = None, src_key_padding_mask: Any = None, is_causal: Any = None) -> Any:
        if src_key_padding_mask is not None and mask is None and self.use_nested_tensor and not self.training:
            found.append(self)
        return forward(self, src, mask, src_key_padding_mask, is_causal)

    with patched_here(nn.TransformerEncoder, "forward", noted):
        yield found
