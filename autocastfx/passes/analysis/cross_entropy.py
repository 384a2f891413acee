"""A cross entropy over classes that widens 16-bit logits itself."""

from __future__ import annotations

import torch
from torch import fx

from autocastfx.graph.node import argument, dtypes
from autocastfx.runtime.operators.cross_entropy_loss import cross_entropy_loss

__all__ = ["is_over_classes", "read_low"]


def is_over_classes(node: fx.Node) -> bool:
    """True for a ``cross_entropy_loss`` that PyTorch computes as ``nll_loss_nd`` of a ``log_softmax``.

    It is where the target holds class indices and no label is smoothed (``aten/src/ATen/native/LossNLL.cpp``).
    """
    if node.target is not torch.ops.aten.cross_entropy_loss.default:
        return False
    target = argument(node, "target")
    indexes = isinstance(target, fx.Node) and any(not (d.is_floating_point or d.is_complex) for d in dtypes(target))
    return indexes and not argument(node, "label_smoothing")


def read_low(node: fx.Node, *, rounds: bool, recomputes: bool) -> None:
    """Make of ``node``, in place, the operator that reads 16-bit logits and gives float32.

    Args:
        node: a cross entropy over classes.
        rounds: whether what it keeps for backward may be rounded. Else its numbers are those of the cross entropy of
            float32 logits, and so are the gradients.
        recomputes: whether the logits are in backward what they were.
    """
    given = {key: argument(node, key) for key in ("weight", "reduction", "ignore_index")}
    options = {**({"rounds": True} if rounds else {}), **({} if recomputes else {"recomputes": False})}
    node.target = cross_entropy_loss
    node.args = argument(node, "self"), argument(node, "target")
    node.kwargs = {**{key: held for key, held in given.items() if held is not None}, **options}
