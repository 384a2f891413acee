"""torch.autocast's dispatch of one op: which rule decides, which inputs are cast, and to what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from autocastfx.errors import UnsupportedError
from autocastfx.graph.names import op_name
from autocastfx.graph.node import argument, tensors
from autocastfx.graph.sizes import abstract_call, in_dtype_of
from autocastfx.plan.plan import Placement, Precision, Why
from autocastfx.policy.match import Matcher
from autocastfx.policy.op_list import OpList
from autocastfx.policy.rule import Category, Rule, Runs


@dataclass(frozen=True)
class Dispatch:
    """The dispatch of one conversion.

    Attributes:
        op_list: with ``placement: follow``.
        low: ``torch.float16`` or ``torch.bfloat16``.
        device: type of the device whose values are cast.
    """

    op_list: OpList
    low: torch.dtype
    device: str

    def rule(self, node: fx.Node) -> Rule[Runs] | None:
        """The rule that decides ``node``."""
        return Matcher(self.op_list, self.device)(node)

    def eligible(self, leaf: Any) -> bool:
        """True for a value that may be cast: a floating tensor, not float64, on the device."""
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point() or leaf.dtype == torch.float64:
            return False
        return leaf.device.type == self.device

    def decide(self, category: Category, node: fx.Node, values: Mapping[fx.Node, Any]) -> tuple[Precision, Why]:
        """The precision that ``node`` runs in, and why.

        Args:
            category: what the list says of it.
            node: to decide.
            values: abstract values, of the dtypes that they have at this point, of what it reads.

        Raises:
            UnsupportedError: the inputs of a ``promote`` op have dtypes that torch.autocast refuses.
        """
        if (
            category is not Category.PROMOTE
            and not category.is_low
            and not category.is_float32
            and not self.is_operator(node)
        ):
            return Precision.CAPTURED, Why.INPUTS_CROSS_BORDER
        leaves = pytree.tree_leaves(map_arg((node.args, node.kwargs), lambda n: values[n]))
        read = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tensors(node):
            return Precision.CAPTURED, Why.NO_TENSOR
        if not any(self.eligible(t) for t in read):
            return Precision.CAPTURED, Why.NOTHING_TO_CAST
        if category.is_low:
            return Precision.LOW, Why.ALLOW
        if category is Category.PROMOTE:
            return self._widest(node, read)
        if not category.is_float32:
            return Precision.GIVEN, Why.AS_INPUTS
        if op_name(node) in self.op_list.set_dtype:
            if not self.eligible(read[0]):
                return Precision.GIVEN, Why.FIRST_NOT_CAST
            if argument(node, "dtype") is not None:
                return Precision.GIVEN, Why.NAMES_DTYPE
        return Precision.FLOAT32, Why.DENY

    def takes_captured(self, node: fx.Node, precision: Precision) -> bool:
        """True if ``node``, run in ``precision``, gets its inputs in the dtypes that the captured graph has."""
        return precision is Precision.CAPTURED and not self.is_operator(node)

    def is_operator(self, node: fx.Node) -> bool:
        """True if ``node`` takes values as they come. A sub-graph, or a Python call that stays whole, does not."""
        if isinstance(node.target, (OpOverload, HigherOrderOperator)):
            return isinstance(node.target, OpOverload)
        return getattr(node.target, "__module__", "") in ("_operator", "math", "torch", "builtins")

    def _widest(self, node: fx.Node, read: list[torch.Tensor]) -> tuple[Precision, Why]:
        widest = self.low
        for dtype in (t.dtype for t in read if self.eligible(t)):
            if torch.float32 in (widest, dtype):
                widest = torch.float32
            elif dtype != self.low:
                raise UnsupportedError(
                    f"node {node.name!r} ({op_name(node)}) reads {dtype}, and torch.autocast with {self.low} refuses "
                    "to mix the two. Cast the value in the model, or convert to the dtype that it has."
                )
        is_low = widest == self.low
        return (Precision.LOW, Why.ALL_LOW) if is_low else (Precision.FLOAT32, Why.INPUT_IS_FLOAT32)

    def dtype(self, precision: Precision) -> torch.dtype | None:
        """The dtype that inputs are cast to; None where they come as they are."""
        return {Precision.LOW: self.low, Precision.FLOAT32: torch.float32}.get(precision)

    def asks(self, node: fx.Node, precision: Precision) -> bool:
        """True if ``node``, run in ``precision``, is asked for float32 by its dtype argument instead of by casts."""
        return precision is Precision.FLOAT32 and op_name(node) in self.op_list.set_dtype

    def value(self, node: fx.Node, precision: Precision, values: Mapping[fx.Node, Any], captured: Any) -> Any:
        """The abstract result of ``node`` run in ``precision``: of the sizes that it has in ``captured``.

        Sizes that depend on data have symbols, which another run would not give again. Raises what the operator raises.
        """
        if self.takes_captured(node, precision) or not any(
            isinstance(t, torch.Tensor) for t in pytree.tree_leaves(captured)
        ):
            return captured
        return in_dtype_of(captured, self._run(node, precision, values))

    def _run(self, node: fx.Node, precision: Precision, values: Mapping[fx.Node, Any]) -> Any:
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: values[n])
        to = self.dtype(precision)
        target: Any = node.target
        if self.asks(node, precision):
            target, args, kwargs = asked(target, args, kwargs)
        elif to is not None:
            cast = self._cast(to)
            args, kwargs = pytree.tree_map(cast, args), pytree.tree_map(cast, kwargs)
        try:
            return abstract_call(target, args, kwargs)
        except RuntimeError as error:
            given = (t for n in node.all_input_nodes for t in pytree.tree_leaves(values[n]) if self.eligible(t))
            runs_in = {to or t.dtype for t in given}
            if runs_in <= {torch.float32}:
                raise  # as in the model
            raise self._refusal(node, error) from error

    def _refusal(self, node: fx.Node, error: RuntimeError) -> UnsupportedError:
        op, rule = op_name(node), self.rule(node)
        line = "no rule names it" if rule is None else f"the rule at {rule.source}" if rule.source else "its rule"
        said = str(error).partition("\n")[0]
        return UnsupportedError(
            f"node {node.name!r} ({op}) cannot run in {str(self.low).removeprefix('torch.')} on {self.device}, as "
            f"{self.op_list.name} has it ({line}): {said}. Put a list of your own after it that has {op} under deny, "
            f"or take the list for this device."
        )

    def _cast(self, to: torch.dtype) -> Callable[[Any], Any]:
        return lambda leaf: leaf.to(to) if self.eligible(leaf) else leaf


@dataclass(frozen=True)
class Followed:
    """A graph as torch.autocast runs it: a placement per computing node, and the dtypes of every value."""

    dispatch: Dispatch
    placements: Mapping[fx.Node, Placement]
    dtypes: Mapping[fx.Node, tuple[torch.dtype, ...]]


def asked(target: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """The call ``target(*args, **kwargs)`` with dtype=float32; by another overload where this one takes no dtype."""
    given = {a.name: value for a, value in zip(target._schema.arguments, args, strict=False)} | dict(kwargs)
    names = [a.name for a in target._schema.arguments]
    if "dtype" not in names:
        given = {a.name: a.default_value for a in target._schema.arguments if a.has_default_value()} | given
        packet = target.overloadpacket
        overloads = (getattr(packet, name) for name in packet.overloads())
        target = next(o for o in overloads if [a.name for a in o._schema.arguments] == [*names, "dtype"])
    given.pop("dtype", None)
    positional = [a.name for a in target._schema.arguments if not a.kwarg_only and a.name in given]
    first = tuple(given.pop(name) for name in positional) if names[: len(positional)] == positional else ()
    return target, first, {**given, "dtype": torch.float32}
