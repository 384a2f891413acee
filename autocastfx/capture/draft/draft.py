"""Make a draft: trace a model's Python code without inputs, until the first call's inputs give the real graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autocastfx.capture.call import CallSignature, CallStructure, device_among
from autocastfx.capture.draft.guess import Guess, StandIns
from autocastfx.capture.draft.tracer import Tracer, run_through
from autocastfx.capture.export import Captured
from autocastfx.capture.leave_intact import capturing, intact
from autocastfx.capture.shape_guard import ShapeGuard
from autocastfx.capture.tidy import no_op_source
from autocastfx.errors import CaptureError
from autocastfx.graph.names import op_name

_MOST_TRACES = 4


def capture_symbolically(
    model: nn.Module,
    signature: CallSignature,
    *,
    training: Sequence[bool],
    held: Mapping[str, torch.Tensor],
    leaves: Sequence[str] = (),
) -> Captured:
    """Trace ``model`` with its required arguments only, each a tensor. The model is unchanged afterwards.

    If a trace learns more about a value after the model's code asked for it, tracing starts again.

    Args:
        model: the caller's model.
        signature: the signature of its forward.
        training: mode of each module, in the order of ``model.modules()``.
        held: parameters and buffers by name that replace the model's own.
        leaves: dotted paths of Python functions that stay whole.

    Raises:
        CaptureError: tracing cannot follow the model's code without inputs; the message says why.
    """
    optional = (2, 4)  # inspect's kinds of *args and **kwargs
    inputs = [p.name for p in signature.parameters if p.default is p.empty and p.kind not in optional]
    hints: dict[str, Guess] = {}
    for _ in range(_MOST_TRACES):
        known = dict(hints)
        tracer = Tracer(inputs, signature, StandIns(hints), device_among(held.values()))
        with capturing(), intact(model, training, held), run_through(tracer, leaves):
            result = _traced(tracer, model)
        failed = isinstance(result, Exception)
        if hints == known or not (failed or tracer.stand_ins.is_late):
            break
    else:
        raise CaptureError(
            f"{type(model).__name__} cannot be traced without inputs: their dtypes and dimensions keep changing"
        )
    if isinstance(result, Exception):
        reason = (str(result).strip() or type(result).__name__).splitlines()[0].rstrip(".")
        raise CaptureError(f"{type(model).__name__} cannot be traced without inputs: {reason}") from result
    return _captured(result, tracer, inputs, tuple(training))


def _traced(tracer: Tracer, model: nn.Module) -> fx.Graph | Exception:
    try:
        return tracer.trace(model)
    except Exception as error:  # whatever the model's own code raises on values that are no tensors
        return error


def _captured(graph: fx.Graph, tracer: Tracer, inputs: Sequence[str], training: tuple[bool, ...]) -> Captured:
    _sweep(graph)
    guesses = tracer.stand_ins.open
    given = [tracer.stand_ins.guess(node) for node in graph.nodes if node.op == "placeholder"]
    leaves = tuple(("tensor", g.dtype or "unknown", "?" if g.rank is None else g.rank) for g in given)
    return Captured(
        graph=graph,
        attributes={name: tensor.detach() for name, tensor in tracer.constants.items()},
        out_spec=tracer.out_spec,
        structure=CallStructure(pytree.tree_structure(dict.fromkeys(inputs, 0)), leaves),
        guard=ShapeGuard(),
        training=training,
        device=tracer.device,
        guesses=frozenset(
            node.name for node in graph.nodes if node in guesses and _is_taken_for_float32(guesses[node])
        ),
    )


def _is_taken_for_float32(guess: Guess) -> bool:
    return guess.dtype is None and guess.dtypes[0] == torch.float32


def _sweep(graph: fx.Graph) -> None:
    """Drop nodes that change nothing, and unread reads and sizes; remove the root's entry from module stacks."""
    for node in list(graph.nodes):
        source = no_op_source(node)
        if source is not None:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if not node.users and (node.op == "get_attr" or op_name(node) in ("sym_size", "getitem")):
            graph.erase_node(node)
    for node in graph.nodes:
        stack: dict[str, Any] = node.meta.get("nn_module_stack") or {}
        node.meta["nn_module_stack"] = {key: entry for key, entry in stack.items() if entry[0]}
