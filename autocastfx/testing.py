"""Assertions for tests of your own op lists: check precisions and casts of a converted model."""

from __future__ import annotations

import torch

from autocastfx.errors import ArgumentError, UnknownNameError
from autocastfx.plan.plan import Precision, select
from autocastfx.report.explain import explain
from autocastfx.runtime.amp_module import AmpModule

__all__ = ["assert_casts", "assert_precision"]


def assert_precision(amp_model: AmpModule, what: str, dtype: torch.dtype) -> None:
    """Check that all nodes named by ``what`` compute in ``dtype``.

    ::

        assert_precision(amp_model, "layers.*.attn.softmax", torch.float32)

    Args:
        amp_model: a converted model. The variant of its ``plan`` is checked.
        what: a node, an op, a module, or an op inside a module; paths may be patterns.
        dtype: ``torch.float32`` or the 16-bit dtype of the conversion.

    Raises:
        AssertionError: a node computes in another dtype; the message explains the first five.
        KeyError: nothing has this name, or only nodes that run as captured.
        ValueError: ``dtype`` is neither float32 nor the conversion's 16-bit dtype.
    """
    low: torch.dtype = getattr(torch, amp_model.plan.low)
    if dtype not in (torch.float32, low):
        raise ArgumentError(f"the conversion computes in torch.float32 and {low}, never in {dtype}")
    found = [node for node in select(amp_model.plan, what) if node.placement.run is not Precision.CAPTURED]
    if not found:
        raise UnknownNameError(f"all nodes called {what!r} run as captured: the conversion chose no precision for them")
    wanted = Precision.LOW if dtype == low else Precision.FLOAT32
    wrong = [node for node in found if node.placement.run is not wanted]
    if wrong:
        reasons = "\n".join(explain(amp_model, node.name) for node in wrong[:5])
        raise AssertionError(f"{len(wrong)} of {len(found)} do not compute in {dtype}:\n{reasons}")


def assert_casts(amp_model: AmpModule, *, at_most: int, dtype: torch.dtype | None = None) -> None:
    """Check how many casts the conversion put into the graph.

    Args:
        amp_model: a converted model. The variant of its ``plan`` is checked.
        at_most: the largest number of casts allowed.
        dtype: count only casts to this dtype; None: all.

    Raises:
        AssertionError: there are more; the message names them.
    """
    casts = [c for c in amp_model.plan.casts if dtype is None or getattr(torch, c.dtype) == dtype]
    if len(casts) > at_most:
        shown = ", ".join(f"{c.name} (of {c.value})" for c in casts)
        raise AssertionError(f"{len(casts)} casts, at most {at_most} are allowed: {shown}")
