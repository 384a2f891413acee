"""Capture assignments to buffers in forward (``self.average = …``) as writes into the old tensor."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from autocastfx.capture.failure import AgainError
from autocastfx.errors import CaptureError
from autocastfx.graph.alias import reachable
from autocastfx.graph.names import op_name
from autocastfx.graph.node import draws_random_numbers, example

__all__ = ["buffers_written_back"]

Table = dict[str, Any]


@contextmanager
def buffers_written_back(model: nn.Module, known: set[str]) -> Generator[None, None, None]:
    """Run the code of ``model`` in the block; at the end, write reassigned buffers' new values into the old tensors.

    During the block the code reads a copy of such a buffer, because values read before the assignment, or saved for
    backward, must not change. The reassigned buffers are known only at the end: then the attempt is made again.

    Args:
        model: the model, as torch.export runs it.
        known: names of the buffers found so far; new ones are added.

    Raises:
        AgainError: new buffers were found.
        CaptureError: forward reassigns a parameter; or changes a buffer's sizes or dtype, removes it, or creates one
            from data. A buffer created from sizes alone is allowed: the graph computes it in each call.
    """
    before = {path: (table, name, table[name]) for path, table, name in _slots(model)}
    for path in known:
        table, name, tensor = before[path]
        table[name] = tensor.clone()
    yield
    after = {path: (table, name, table[name]) for path, table, name in _slots(model)}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found: set[str] = set()
    for path in {**before, **after}:
        old, new = (slots[path][2] if path in slots else None for slots in (before, after))
        if old is new:
            continue
        if isinstance(old, nn.Parameter) or path in parameters:
            raise CaptureError(
                f"forward assigns the parameter {path!r} anew, which a graph cannot hold. Write into it, with "
                "torch.no_grad(): parameter.copy_(new)."
            )
        if old is None or new is None or _kind(old) != _kind(new):
            if new is not None and _is_table(new):
                continue
            raise CaptureError(
                f"forward replaces the buffer {path!r}: {_said(old)} becomes {_said(new)}, but a graph holds "
                "buffers of fixed sizes and dtypes. Register it in its final size and write a part of it in each call, "
                "or pass it in as an argument and return it."
            )
        if sum(old is other for _, _, other in before.values()) > 1:
            raise CaptureError(
                f"forward assigns the buffer {path!r} anew, which is registered under several names: write into it "
                "(buffer.copy_(new)), or register it once."
            )
        found.add(path)
    if not found <= known:
        known |= found
        raise AgainError
    for path in known:
        before[path][2].copy_(after[path][2].detach())


def _slots(model: nn.Module) -> Iterator[tuple[str, Table, str]]:
    """Yield the path, the table and the name of each parameter and buffer."""
    for prefix, module in model.named_modules():
        for table in (cast("Table", module._parameters), cast("Table", module._buffers)):
            yield from ((f"{prefix}.{name}" if prefix else name, table, name) for name in list(table))


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _said(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "none"
    sizes = [example(size) for size in tensor.shape]
    return f"{str(tensor.dtype).removeprefix('torch.')} {sizes}"


def _is_table(tensor: torch.Tensor) -> bool:
    """True if a tensor depends on no input, parameter, buffer or random number, except by sizes."""
    mode = get_proxy_mode()
    proxy: Any = tensor if mode is None else mode.tracer.unwrap_proxy(tensor)
    if not isinstance(proxy, fx.Proxy):
        return False
    made_of = reachable([proxy.node], lambda n: () if op_name(n).startswith("sym_") else n.all_input_nodes)
    return not any(n.op == "placeholder" or draws_random_numbers(n) for n in made_of)
