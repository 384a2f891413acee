"""Run one of two graphs side by side, node by node, without changing the caller's tensors and random numbers."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_arg

from autocastfx.capture.call import Call
from autocastfx.capture.measure import apart, written_outside
from autocastfx.numerics.flat_graph import FlatGraph
from autocastfx.numerics.tape import Tape

__all__ = ["Side", "random_state", "set_random_state"]


class Side(fx.Interpreter):
    """Runs a graph node by node, with its own random numbers, and frees values after their last use.

    Attributes:
        flat: the graph.
        ahead: its nodes that have not run yet.
        tape: records autograd's functions by node, to run backwards; None without gradients.
    """

    def __init__(self, flat: FlatGraph, call: Call, tape: Tape | None) -> None:
        super().__init__(nn.Module(), graph=flat.graph)
        self.extra_traceback = False
        self.flat, self.ahead = flat, iter(list(flat.graph.nodes))
        self.tape = tape
        tensors = {name: one for name, one in flat.held.items() if isinstance(one, torch.Tensor)}
        written = written_outside(flat.graph, flat.held)
        buffers = {name for name, one in tensors.items() if not isinstance(one, nn.Parameter)}
        names = [n.name for n in flat.graph.nodes if n.op == "placeholder"]
        inputs = dict(zip(names, call.tensors, strict=True))
        own = apart(tensors, written | buffers)  # batch_norm writes, but its schema does not say so
        self._held: Mapping[str, Any] = {**flat.held, **self._leaves(tensors, own, frozenset())}
        self.args_iter = iter({**inputs, **self._leaves(inputs, apart(inputs, written), written)}.values())
        self._random = random_state()

    @classmethod
    def of(cls, flat: FlatGraph, call: Call, gradients: bool) -> Side:
        """Prepare a run; with ``gradients`` it has a tape."""
        with torch.inference_mode(False):  # backward cannot use tensors made in inference mode
            return cls(flat, call, Tape() if gradients else None)

    def _leaves(
        self, tensors: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor], written: frozenset[str]
    ) -> dict[str, torch.Tensor]:
        """Return ``own``; with gradients, also leaves in place of the caller's tensors, which must not get any."""
        if self.tape is None:
            return dict(own)
        found, leaves = dict(own), dict[int, torch.Tensor]()
        for name, tensor in tensors.items():
            if tensor.requires_grad:
                leaf = leaves.setdefault(id(tensor), own.get(name, tensor).detach().requires_grad_())
                self.tape.leaf(name, leaf)
                found[name] = leaf.clone() if name in written else leaf  # a leaf cannot be written into
        return found

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return the value of a ``get_attr`` node: the caller's tensor, a copy of it, or a leaf in its place."""
        return self._held[str(target)]

    def run_one(self, node: fx.Node) -> Any:
        """Run ``node`` in the modes of its regions, and return its value."""
        with ExitStack() as modes:
            for region in self.flat.regions.get(node, ()):
                modes.enter_context(region())
            if self.tape is not None:
                self.tape.start(node)
            self.env[node] = self.run_node(node)
            if self.tape is not None:
                self.tape.end(node, self.env[node])
        return self.env[node]

    def release(self, node: fx.Node) -> None:
        """Free the values that ``node`` was the last to read, and its own value if no node reads it."""
        for read in (*self.user_to_last_uses.get(node, ()), *(() if node.users else (node,))):
            self.env.pop(read, None)

    def run_up_to(self, last: fx.Node) -> None:
        """Run the nodes up to ``last``; the values that ``last`` reads are kept for now."""
        with self.random():
            for node in self.ahead:
                self.run_one(node)
                if node is last:
                    return
                self.release(node)

    def outputs(self) -> Any:
        """Run the remaining nodes, free all values, and return the graph's output."""
        with self.random():
            for node in self.ahead:
                if node.op != "output":
                    self.run_one(node)
                    self.release(node)
        found = map_arg(self.flat.graph.output_node().args[0], self.env.__getitem__)
        self.env.clear()
        return found

    @contextmanager
    def random(self) -> Generator[None]:
        """While open, random numbers continue from this graph's last state."""
        set_random_state(self._random)
        yield
        self._random = random_state()


def random_state() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the state of torch's random numbers on all devices in use."""
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []


def set_random_state(state: tuple[torch.Tensor, list[torch.Tensor]]) -> None:
    """Restore a state that :func:`random_state` returned."""
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])
