"""Numbers between devices, on abstract CUDA tensors where there is no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from autocastfx.training import gradients
from autocastfx.training.loss_scale import DynamicLossScale, HostCopy, Seen, moved
from autocastfx.training.loss_scaler import LossScaler

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class Copies(TorchDispatchMode):
    """Notes to which kind of device each copy goes, and whether the host goes on before it is there."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            self.seen.append((kwargs["device"].type, bool(kwargs.get("non_blocking"))))
        return func(*args, **(kwargs or {}))


def test_the_host_waits_for_a_copy_to_itself_alone() -> None:
    with FakeTensorMode(), Copies() as copies:
        moved(torch.ones((), device=CUDA), CPU)
        moved(torch.ones(()), CUDA)
    assert copies.seen == [("cpu", False), ("cuda", True)]


def test_a_loss_on_a_cpu_beside_a_scale_on_a_gpu() -> None:
    with FakeTensorMode(), Copies() as copies:
        scaler = LossScaler(DynamicLossScale())
        scaler.state(CUDA)
        scaler.scale(torch.ones((), device=CPU))
    assert copies.seen[-1] == ("cpu", False)


def test_gradients_on_another_device_than_the_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    def noted(number: torch.Tensor, device: torch.device) -> torch.Tensor:
        asked.append(device)
        return torch.full((), 0.5)

    monkeypatch.setattr(gradients, "moved", noted)
    grads = [torch.full((2,), 4.0)]
    gradients.unscale_(grads, torch.ones((), device="meta"), torch.zeros((), device="meta"))
    assert asked == [CPU]
    assert grads[0].tolist() == [2.0, 2.0]


def test_the_event_is_recorded_where_the_copy_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current device may be another one."""
    recorded: list[Any] = []

    class Event:
        def record(self, stream: Any = None) -> None:
            recorded.append(stream)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: f"stream of {device}")
    with FakeTensorMode():
        copy = HostCopy()
        copy._pinned = torch.empty(())
        copy.start(torch.ones((), device=torch.device("cuda", 1)))
    assert recorded == ["stream of cuda:1"]


def test_what_has_arrived_is_the_number_and_how_many_were_asked_for_before() -> None:
    class Event:
        is_complete = False

        def query(self) -> bool:
            return self.is_complete

    copy, event = HostCopy(), Event()
    copy._pinned, copy.event = torch.tensor(3.0), event  # type: ignore[assignment]
    assert copy.arrived() is None
    event.is_complete = True
    assert copy.arrived() == Seen(3.0, 2)
    assert copy.arrived() is None, "it is told once"
