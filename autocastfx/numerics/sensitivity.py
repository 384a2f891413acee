"""``sensitivity``: measure what 16 bits would cost each node of a model in accuracy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from torch import nn

from autocastfx.capture.call import CallSignature, arguments_of, batches_of, refuse_scripted
from autocastfx.capture.captured import Captured
from autocastfx.capture.leave_intact import random_numbers_kept
from autocastfx.capture.progress import Progress, counted
from autocastfx.conversion import convert
from autocastfx.errors import ArgumentError, SensitivityError, UnsupportedError
from autocastfx.graph.names import op_name
from autocastfx.graph.walk import mode_of
from autocastfx.numerics.compare import TargetDistance
from autocastfx.numerics.flat_graph import flatten
from autocastfx.numerics.logprob_gap import Inputs, LossFunction, loss_of
from autocastfx.numerics.node_effects import NodeEffects, Replay, errors_at, write_out_of_place
from autocastfx.numerics.probe_run import ProbeRun
from autocastfx.numerics.segments import derivable
from autocastfx.options import DType, refuse_unpredicted
from autocastfx.passes.pipeline import Converter
from autocastfx.plan.plan import Prices
from autocastfx.plan.sensitivity import TARGETS, Sensitivity, shared_directions
from autocastfx.policy.float8 import recipe_of
from autocastfx.policy.op_list import OpListLike
from autocastfx.runtime.amp_module import AmpModule
from autocastfx.runtime.variant import Variant

_LEAST_FOR_JUMPS = 4  # projections: a pair of new directions for jumps, and others


def sensitivity(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFunction | None = None,
    *,
    of: str = "gradient",
    probes: int = 8,
    dtype: DType | None = None,
    op_list: OpListLike = "default",
    float8: str | bool | None = None,
    inputs: Inputs | None = None,
    progress: Progress = None,
) -> Sensitivity:
    """Measure, for each op and each value of ``model``, what 16 bits would do to its gradient or its output.

    Each node is run in 16 bits and in float32 on the same inputs; the difference, and the rounding of each of its
    reads, is carried to the target by derivatives: to first order, for all nodes at once. For the gradient this takes
    ``probes`` backward passes through the backward pass. The graph runs in segments, each several times, and what is
    inside of a segment is freed before the next. The model is unchanged: it runs on copies of its buffers, in its own
    modes.

    Args:
        model: a float32 model, not a converted one.
        batches: as for :func:`calibrate`; read once, one at a time.
        loss_fn: of the model's output and the batch, one number; by default the output itself, its ``loss``, or its
            first member, if that is one number.
        of: ``"gradient"``, of the loss by all parameters; or ``"output"``, all floating-point outputs, for inference.
        probes: the number of random projections per batch. An error is estimated within about 1/√(2·probes·batches).
        dtype: the 16-bit dtype, as for :func:`convert`.
        op_list: the op list of the conversion; it says which inputs stay float32.
        float8: a recipe of op lists, or True for ``"rowwise"``: also measure what float8 would do in each of the three
            matrix products of an op (output, input gradient, weight gradient; of the output alone for
            ``of="output"``), whatever the list says of float8.
        inputs: gives the part of a batch that the model takes, where a batch holds targets too:
            ``lambda batch: batch[0]``.
        progress: as for :func:`calibrate`.

    Returns:
        The effects of all nodes, for :func:`convert` (``sensitivity=``) and :func:`tune`.

    Raises:
        SensitivityError: there are no batches, one does not fit the model, the loss is no single number or does not
            depend on a parameter, or the target is zero or not finite.
        CaptureError: the model cannot be captured.
        UnsupportedError: the model is converted already, or is 16-bit; or the list follows torch.autocast's dispatch,
            or asks for float8, which is not measured.
        ValueError: ``of`` is no target, ``probes`` is less than 1, or ``float8`` is no recipe.
    """
    check_choices(of, probes)
    recipe = recipe_of(float8)
    if isinstance(model, AmpModule):
        raise UnsupportedError("the model is converted already: measure the original.")
    rest = batches_of(batches)
    first = next(rest, None)
    if first is None:
        raise SensitivityError("there are no batches to measure on. An iterator can be read only once.")
    args, kwargs = arguments_of(first if inputs is None else inputs(first))
    check_fits(model, args, kwargs)
    amp_model = convert(model, args, kwargs or None, dtype=dtype, op_list=op_list)
    measuring = Measuring(amp_model, loss_fn, of, probes, inputs, float8=recipe)
    with counted(progress, "measuring sensitivity") as show:
        for done, batch in enumerate(itertools.chain([first], rest), 1):
            measuring.add(batch)
            show(done)
    return cast("Sensitivity", measuring.found)


def check_choices(of: str, probes: int) -> None:
    """Check arguments of a measurement.

    Raises:
        ValueError: one has no such value.
    """
    if of not in TARGETS:
        raise ArgumentError(f"of is one of {', '.join(map(repr, TARGETS))}, not {of!r}")
    if isinstance(probes, bool) or not isinstance(probes, int) or probes < 1:
        raise ArgumentError(f"probes is a count of at least 1, not {probes!r}")


def captured_of(variant: Variant) -> Captured:
    """Return the float32 graph that a variant was made from.

    Raises:
        SensitivityError: it is not at hand.
    """
    if variant.captured is None:
        raise SensitivityError("the captured graph is not at hand: convert the model again.")
    return variant.captured


@dataclass
class Measuring:
    """The measurement of a model that was converted, batch by batch.

    Attributes:
        amp_model: the converted model, from whose captured graphs everything is measured.
        loss_fn, of, probes, inputs: as for :func:`sensitivity`.
        found: what was measured so far.
        float8: the name of a recipe; empty: products are not measured in float8.
    """

    amp_model: AmpModule
    loss_fn: LossFunction | None
    of: str
    probes: int
    inputs: Inputs | None
    found: Sensitivity | None = field(default=None)
    float8: str = ""

    def add(self, batch: Any) -> None:
        """Measure one more batch."""
        converter = cast("Converter", self.amp_model._original.converter)
        refuse_unpredicted(converter, self.float8)
        args, kwargs = arguments_of(batch if self.inputs is None else self.inputs(batch))
        check_fits(self.amp_model, args, kwargs)
        variant, call, outside = self.amp_model._given_to(args, kwargs)
        captured = captured_of(variant)
        attributes: Mapping[str, Any] = {**captured.attributes, **outside, **self.amp_model._held()}
        ports = replace(converter, device=variant.plan.device).ports
        # Held for a value between segments: itself, its gradient and its tangents, and the projections' derivatives by
        # it; tangents and derivatives in bfloat16.
        kept, passed = (2 + self.probes / 2 if self.of == "gradient" else 1.0), self.probes / 2
        with random_numbers_kept():
            switches = ports.facts.switches if self.of == "gradient" else frozenset[str]()
            errors = errors_at(switches, self.amp_model, args, kwargs)
            flat = flatten(captured.graph, attributes.__getitem__)
            write_out_of_place(flat)
            run = ProbeRun(flat, call, ports.stays_float32, kept=kept, passed=passed)
            may_jump = any(op_name(node) in switches for node in flat.graph.nodes)
            seeds = self._seeds(paired=may_jump)
            effects = NodeEffects(
                *(run, Replay(ports, converter.low), mode_of(captured.training), seeds, errors), float8=self.float8
            )
            try:
                if self.of == "output":
                    measured = effects.of_output()
                elif run.parameters:
                    output = variant.output(run.output, call.tensors)
                    with derivable():
                        loss = loss_of(output, batch, self.loss_fn)
                    measured = effects.of_gradient(loss)
                else:
                    raise SensitivityError("no parameter requires a gradient: unfreeze those trained, or of='output'.")
            finally:
                run.close()
        one = Sensitivity(
            *(self.of, variant.plan.low, self.probes, 1, measured, effects.unmeasured), float8=self.float8
        )
        if any(effects.jumped) and self.probes >= _LEAST_FOR_JUMPS:
            share = sum(effects.jumped) / len(effects.jumped)
            one = self._with_jumps(one, variant, batch, share)
        self.found = one if self.found is None else self.found.merged(one)

    def _with_jumps(self, one: Sensitivity, variant: Variant, batch: Any, share: float) -> Sensitivity:
        """Add the errors of the converted model on ``batch``, predicted and true, as if its changes had been as large
        as ours.

        ``share`` is by how much it changes what jumps, over by how much that was changed to see jumps, squared.
        """
        original = self.amp_model._original
        converter = replace(cast("Converter", original.converter), prices=Prices(one))
        plan = self.amp_model._plan_by(converter, variant)
        true = 0.0
        if original.model is not None:
            judge = TargetDistance(original.model, [batch], self.loss_fn, self.of, self.inputs)
            true = judge(self.amp_model, converter.low)
        return replace(
            one,
            jumps_at=(plan.error or 0.0) / math.sqrt(share),
            jumps_true=true / share**0.25 if math.isfinite(true) else 0.0,
        )

    def _seeds(self, *, paired: bool) -> list[int]:
        """Some directions are the same in all batches, and the others new, to tell more.

        The last two are one direction if ``paired``.
        """
        done = self.found.batches if self.found is not None else 0
        shared = shared_directions(self.probes)
        seeds = [i if i < shared else self.probes * (done + 1) + i for i in range(self.probes)]
        return [*seeds[:-1], seeds[-2]] if paired and self.probes >= _LEAST_FOR_JUMPS else seeds


def check_fits(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Check that a batch's arguments are those of the model's forward.

    Raises:
        SensitivityError: they are not.
        UnsupportedError: the model is TorchScript, whose forward has no signature.
    """
    refuse_scripted(model)
    try:
        CallSignature.of(model.forward).describe(args, kwargs)
    except TypeError as error:
        raise SensitivityError(
            f"a batch does not fit {type(model).__name__}.forward: {error}. Where a batch holds targets too, say which "
            "part the model takes: inputs=lambda batch: batch[0]."
        ) from None
