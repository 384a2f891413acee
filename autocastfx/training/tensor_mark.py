"""Detect that a tensor has been written to."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["TensorMark"]


class TensorMark:
    """The memory of a tensor and its version counter, at one moment.

    Writes through ``tensor.data`` (``p.data.copy_(other)``) change no counter and are not detected.
    """

    __slots__ = ("pointer", "storage", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        held: Any = getattr(tensor, "_local_tensor", tensor)  # a DTensor has no memory of its own
        self.version, self.pointer = tensor._version, held.data_ptr()
        self.storage = StorageWeakRef(held.untyped_storage())

    def fits(self, tensor: torch.Tensor) -> bool:
        """True if ``tensor`` has neither been written to nor been given other memory (``p.data = other``) since."""
        held: Any = getattr(tensor, "_local_tensor", tensor)
        if self.version != tensor._version or self.pointer != held.data_ptr():
            return False
        return not self.storage.expired()  # an expired storage's address may have been reused
