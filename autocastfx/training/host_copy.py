"""Move a number between devices, and read it from one without making the host wait."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["HostCopy", "Seen", "is_capturing", "moved"]


class Seen(NamedTuple):
    """A number, and its age in calls of ``arrived``."""

    number: float
    age: int


class HostCopy:
    """Copies a number from a CUDA device to the host in the background."""

    def __init__(self) -> None:
        self._pinned: torch.Tensor | None = None
        self.event: torch.cuda.Event | None = None  # of the copy in progress
        self._age = 0

    def start(self, number: torch.Tensor) -> None:
        """Start copying ``number`` (float32, no dimensions). Does nothing off CUDA, or while a copy is in progress."""
        if not number.is_cuda or self.event is not None:
            return
        if self._pinned is None:
            self._pinned = torch.empty((), dtype=torch.float32, pin_memory=True)
        self._pinned.copy_(number, non_blocking=True)
        self.event = torch.cuda.Event()
        self.event.record(torch.cuda.current_stream(number.device))  # by default it is that of the current device
        self._age = 0

    def arrived(self) -> Seen | None:
        """Return the number if its copy is complete, else None."""
        self._age += 1
        if self.event is None or self._pinned is None or not self.event.query():
            return None
        self.event = None
        return Seen(float(self._pinned.item()), self._age)

    def read(self, number: torch.Tensor) -> Seen:
        """Return the number as it is now. Waits for the device."""
        self.event = None
        return Seen(float(number.item()), 0)


def moved(number: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ``number`` on ``device``. The host waits for a copy to a CPU, which may be read at once."""
    return number.to(device, non_blocking=device.type != "cpu")


def is_capturing(tensor: torch.Tensor) -> bool:
    """True while work on the device of ``tensor`` is being captured into a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
