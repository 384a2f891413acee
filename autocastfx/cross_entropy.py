"""A cross entropy over classes that widens 16-bit logits itself: as the two ops that it is made of, or as one."""

from __future__ import annotations

import torch
from torch import fx
from torch._ops import OpOverload

from autocastfx.graph import Origin, argument, dtypes, set_origin, tensors
from autocastfx.narrow_cross_entropy import DIMENSIONS, narrow_cross_entropy

__all__ = ["PART", "is_separable", "narrow", "separate"]

PART = "part"  # the rule that marks the node made for one


def is_separable(node: fx.Node) -> bool:
    """Whether ``node`` is a ``cross_entropy_loss`` that PyTorch computes as ``nll_loss_nd`` of a ``log_softmax``.

    It is where the target holds class indices and no label is smoothed (``aten/src/ATen/native/LossNLL.cpp``).
    """
    if node.target is not torch.ops.aten.cross_entropy_loss.default:
        return False
    target = argument(node, "target")
    indexes = isinstance(target, fx.Node) and any(not (d.is_floating_point or d.is_complex) for d in dtypes(target))
    return indexes and not argument(node, "label_smoothing")


def separate(node: fx.Node) -> None:
    """Make of ``node``, in place, the ``nll_loss_nd`` of a ``log_softmax`` that gives float32, which is put before it.

    The numbers are those of the cross entropy of float32 logits, to the bit, and so are the gradients.
    """
    logits, target = argument(node, "self"), argument(node, "target")
    classes = min(tensors(logits)[0].ndim, 2) - 1
    with node.graph.inserting_before(node):
        name = f"{node.name}_log_softmax"
        part = node.graph.create_node(
            "call_function", torch.ops.aten.log_softmax.int, (logits, classes, torch.float32), {}, name
        )
    part.meta.update({key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta})
    set_origin(part, Origin("rewrite", PART, node.name))
    _become(node, torch.ops.aten.nll_loss_nd.default, part, target)


def narrow(node: fx.Node) -> None:
    """Make of ``node``, in place, the operator that keeps 16 bits for backward; its parts where that takes no such
    sizes.
    """
    if tensors(argument(node, "self"))[0].ndim in DIMENSIONS:
        _become(node, narrow_cross_entropy, argument(node, "self"), argument(node, "target"))
    else:
        separate(node)


def _become(node: fx.Node, op: OpOverload, logits: fx.Node, target: fx.Node) -> None:
    given = {key: argument(node, key) for key in ("weight", "reduction", "ignore_index")}
    node.target = op
    node.args, node.kwargs = (logits, target), {key: held for key, held in given.items() if held is not None}
