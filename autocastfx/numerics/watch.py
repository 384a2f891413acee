"""``watch``: count overflow and underflow in a converted model while it trains, and explain skipped steps."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autocastfx.errors import LossScaleError, SkippedStepWarning
from autocastfx.numerics.find_overflow import find_overflow
from autocastfx.numerics.node_counts import NodeCounts, check_nodes
from autocastfx.numerics.one_graph import random_state, set_random_state
from autocastfx.numerics.overflow import Overflow
from autocastfx.numerics.watched_node import SkippedStep, WatchedNode, report
from autocastfx.runtime.amp_module import AmpModule
from autocastfx.training.grad_scaler import GradScaler
from autocastfx.training.optimizer import LossScalingOptimizer

__all__ = ["Watch", "watch"]


_MOST_CALLS = 64  # whose inputs are kept, in a step of more


@dataclass(frozen=True)
class _Call:
    """A call of the present step, to be run again if the step is skipped."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    random: tuple[torch.Tensor, list[torch.Tensor]]


@dataclass(frozen=True)
class _Hook:
    """A hook on the watched model. Copies of the model carry one that does nothing."""

    watch: Watch
    is_before: bool

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        if torch.compiler.is_compiling() or module is not self.watch._model:
            return
        if self.is_before:
            self.watch._before(args, rest[0])
        else:
            self.watch._after()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (_not_watched,)


def _not_watched(*_: Any) -> None: ...


class Watch:
    """Counts of the values of a converted model while it trains; :func:`watch` makes one."""

    def __init__(self, amp_model: AmpModule, every: int, nodes: Sequence[str] | None) -> None:
        self.every = every
        self._model = amp_model
        self._calls: deque[_Call] = deque(maxlen=_MOST_CALLS)  # of the present step
        self._finished, self._counted = 0, 0  # steps, as step() tells; calls
        self._is_told = False
        self._observed: dict[int, None] = {}  # steps
        self._counts = NodeCounts(amp_model, nodes)
        self._skipped: list[SkippedStep] = []
        self._warned: set[str] = set()
        self._open = ExitStack()  # while an observed call runs
        self._hooks = ExitStack()
        before = amp_model.register_forward_pre_hook(_Hook(self, True), with_kwargs=True)
        self._hooks.callback(before.remove)
        after = amp_model.register_forward_hook(_Hook(self, False), always_call=True)
        self._hooks.callback(after.remove)

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        calls = tuple(self._calls)
        self.stop()
        if isinstance(error, LossScaleError) and calls and (found := self._search(calls)):  # at the scale's floor
            number = self._present
            self._finished += self._is_told
            self._explain(number, found)

    def stop(self) -> None:
        """Watch no more, and drop the inputs of the last call. What was seen can still be read."""
        self._hooks.close()
        self._open.close()
        self._calls.clear()

    # ---- steps ------------------------------------------------------------------------------------------------------

    def step(self, scaler: LossScalingOptimizer | GradScaler | None = None) -> None:
        """End a step. Call it after each step of the optimizer, from the first one on, or never.

        If the step was skipped, its calls run again, node by node, with the random numbers that they had. If a node
        overflows, a warning names it, once for each node, and :meth:`report` has the rule that mends it. A
        ``LossScaleError`` that leaves the ``with`` block is explained so too.

        Args:
            scaler: what has decided whether to skip: the ``LossScalingOptimizer``, or the ``autocastfx.GradScaler``.
                Asking it waits for the device. None: nothing scales losses, and no step is skipped.

        Raises:
            TypeError: ``scaler`` is another object, of which it is not known whether it skipped.
            LossScaleError: the optimizer has not stepped yet.
            NodeError: a node raised while the step's batch ran again.
        """
        if isinstance(scaler, LossScalingOptimizer):
            is_skipped = bool(scaler.last_step.skipped)
        elif isinstance(scaler, GradScaler):
            is_skipped = scaler.step_was_skipped
        elif scaler is None:
            is_skipped = False
        else:
            raise TypeError(
                f"step takes the LossScalingOptimizer or the autocastfx.GradScaler, which know whether a step was "
                f"skipped, not {type(scaler).__module__}.{type(scaler).__name__}. Without loss scaling, call step()."
            )
        if not self._is_told:  # steps are not calls, then: all calls up to now were of the first one
            self._counts.join_steps()
            self._is_told = True
            self._observed = dict.fromkeys(self._observed and (1,))
        self._finished += 1
        calls = tuple(self._calls)
        self._calls.clear()
        if is_skipped:
            self._explain(self._finished, self._search(calls))

    def _explain(self, step: int, found: Overflow | None) -> None:
        """Note that ``step`` was skipped because of ``found``, and warn of it."""
        self._skipped.append(SkippedStep(step, found))
        if found is None:
            return
        self._counts.note_overflow(found.name, step)
        if found.name not in self._warned:
            self._warned.add(found.name)
            says = "print the watch for the rule that mends it" if found.fix else found.advice
            warnings.warn(
                f"step {step} was skipped: {found.headline} {says[0].upper()}{says[1:]}".rstrip(".") + ".",
                SkippedStepWarning,
                stacklevel=3,
            )

    def _search(self, calls: Sequence[_Call]) -> Overflow | None:
        now = random_state()
        try:
            for call in calls:
                set_random_state(call.random)
                if found := find_overflow(self._model, *call.args, **call.kwargs):
                    return found
        finally:
            set_random_state(now)
        return None

    @property
    def _present(self) -> int:
        """The number of the present step, from 1."""
        return self._finished + 1 if self._is_told else self._counted

    # ---- calls ------------------------------------------------------------------------------------------------------

    def _before(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not torch.is_grad_enabled() or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            return
        self._counted += 1
        if not self._is_told:
            self._calls.clear()
        args, kwargs = pytree.tree_map_only(torch.Tensor, _alone, (args, dict(kwargs)))
        self._calls.append(_Call(args, kwargs, random_state()))
        now = self._present
        if (now - 1) % self.every:
            return
        self._counts.read(before=now)
        self._observed[now] = None
        self._open.enter_context(self._model._observed_by(partial(self._counts.see, now)))

    def _after(self) -> None:
        self._open.close()

    # ---- what was seen ----------------------------------------------------------------------------------------------

    @property
    def rows(self) -> tuple[WatchedNode, ...]:
        """The nodes, in graph order. Reading it waits for the device."""
        return self._counts.rows()

    @property
    def skipped(self) -> tuple[SkippedStep, ...]:
        """The skipped steps that :meth:`step` was told of, in order."""
        return tuple(self._skipped)

    def report(self, most: int = 20) -> str:
        """Write the nodes as a table, those that overflowed first, and the causes of skipped steps with their rules.

        Args:
            most: the number of nodes to show. Next come those of which the largest share underflowed.
        """
        steps = self._finished if self._is_told else self._counted
        return report(self.rows, self._skipped, steps, len(self._observed), self.every, most)

    def __str__(self) -> str:
        return self.report()


def watch(amp_model: AmpModule, every: int = 100, nodes: Sequence[str] | None = None) -> Watch:
    """Watch a converted model while it trains.

    ::

        with autocastfx.watch(amp_model) as watch:
            for x, y in batches:
                optimizer.zero_grad()
                optimizer.backward(loss_of(amp_model(x), y))
                optimizer.step()
                watch.step(optimizer)
        print(watch)

    One step in ``every`` is observed, beginning with the first: its calls run node by node, and the values of nodes are
    counted on their device. The counts are read at the next observed step, or when somebody asks, with one transfer.
    An observed call gives the same result to the bit. In between, an overflow is seen only if it persists until the
    next observed step, or if it makes the optimizer skip a step that :meth:`Watch.step` is told of: references to the
    inputs of the step's calls (the last 64) are kept, and searched with :func:`find_overflow`. Leave these tensors as
    they are until the step has ended.

    A step ends with ``watch.step(...)``. If that is never called, each call is a step, and skipped steps are not
    explained. Calls without gradients, as in evaluation, are neither counted nor observed; neither is what
    ``torch.compile`` compiles or a CUDA graph captures. Sub-graphs (``no_grad`` regions, ``cond``, loops) are not
    observed inside, but :func:`find_overflow` looks into regions. Copies of the model are not watched.

    Args:
        amp_model: what ``convert`` returned; under DistributedDataParallel, its ``module``.
        every: the distance of observed steps.
        nodes: names of nodes or of ops to observe (``"cast"``: the casts that the conversion inserted). None: the
            results of the nodes that run in 16 bits, views left out, and of casts to 16 bits.

    Returns:
        The watch: a context manager that stops it, with ``stop()``, ``step()``, ``rows``, ``skipped`` and ``report()``.

    Raises:
        TypeError: ``amp_model`` is not a converted model, or ``nodes`` is a single text.
        ValueError: ``every`` is not a whole number above 0, or the captured graphs have none of a name in ``nodes``.
    """
    if not isinstance(amp_model, AmpModule):
        raise TypeError(
            f"watch takes what convert() returned, not a {type(amp_model).__name__}: convert the model first"
        )
    if isinstance(nodes, str):
        raise TypeError(f"nodes is a sequence of names: write [{nodes!r}]")
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every is a whole number of steps above 0, not {every!r}")
    if nodes is not None and amp_model.variants:
        check_nodes(nodes, [variant.plan for variant in amp_model.variants])
    return Watch(amp_model, every, nodes)


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Return an input without its autograd graph, which would keep what is saved for backward alive."""
    return tensor.detach() if tensor.grad_fn is not None else tensor
