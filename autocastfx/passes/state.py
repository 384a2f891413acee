"""The interface of passes: the settings of a conversion, the state of a graph on its way, and a pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import fx

from autocastfx.dtypes import dtype_name
from autocastfx.graph.magnitude import Magnitude
from autocastfx.graph.names import op_name
from autocastfx.graph.node import dtypes
from autocastfx.passes.analysis.backward_adds import Readers
from autocastfx.passes.analysis.exact_numbers import HeldValues
from autocastfx.passes.analysis.node_errors import NodeEffectMap
from autocastfx.passes.analysis.units import Ports
from autocastfx.passes.analysis.value_ranges import Fill
from autocastfx.passes.casts import PlannedDtypes
from autocastfx.passes.patterns.patterns import chosen
from autocastfx.passes.torch_autocast.dispatch import Followed
from autocastfx.plan.edited_plan import EditedPlan
from autocastfx.plan.plan import Decision, Placement, PlannedFloat8, Precision, Prices, Recomposed, Traffic
from autocastfx.plan.ranges import Ranges
from autocastfx.policy.kernel_facts import KernelFacts
from autocastfx.policy.match import Matcher
from autocastfx.policy.op_list import OpList
from autocastfx.policy.rule import Category


@dataclass(frozen=True)
class Classification:
    """A decision per computing node.

    Attributes:
        decisions: one for each ``call_*`` node.
        wide: values that hold finite numbers beyond the low dtype's range, in float32.
        unable: the reason why a node cannot run low whoever asks for it, for those that cannot.
        fills: nodes that can, with another number.
    """

    decisions: Mapping[fx.Node, Decision]
    wide: frozenset[fx.Node]
    unable: Mapping[fx.Node, str] = field(default_factory=dict[fx.Node, str])
    fills: Mapping[fx.Node, Fill] = field(default_factory=dict[fx.Node, Fill])


@dataclass(frozen=True)
class State:
    """A graph between two passes, with all that was found out about it so far.

    Attributes:
        graph: captured at first, changed in place by the passes that rewrite.
        attributes: what its ``get_attr`` nodes read, parameters and buffers apart.
        parameters: ``get_attr`` targets.
        values: facts about the numbers that are held.
        dtypes: of what each node gives, before casts are put in.
        ops: the name of each node's op, likewise.
        measured: magnitudes from a calibration.
        errors: what 16 bits do to the target, from a measurement of sensitivity.
        classification: decisions.
        placements: precisions.
        traffic: bytes moved.
        cached: parameters that torch.autocast casts once, each with a number that tied ones share.
        parameter_ids: all parameters, likewise.
        followed: how torch.autocast runs the graph, where that is the plan.
        float8: what of the matrix products runs in float8, if the list has rules on that.
        widened: the dtypes of each node's values after the conversion of a 16-bit model; None for other models.
        planned: gives what a state's placements mean in dtypes, once casts are put in.
        prefix: of the names of its nodes in the plan.
        recomposed: nodes that stand for captured ones.
    """

    graph: fx.Graph
    attributes: Mapping[str, Any]
    parameters: frozenset[str]
    values: HeldValues
    dtypes: Mapping[fx.Node, tuple[torch.dtype, ...]]
    ops: Mapping[fx.Node, str]
    measured: Mapping[fx.Node, Magnitude] = field(default_factory=dict)
    errors: NodeEffectMap = field(default_factory=lambda: NodeEffectMap({}))
    classification: Classification = field(default_factory=lambda: Classification({}, frozenset()))
    placements: Mapping[fx.Node, Placement] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)
    cached: Mapping[str, int] = field(default_factory=dict)
    parameter_ids: Mapping[str, int] = field(default_factory=dict)
    followed: Followed | None = None
    float8: Mapping[fx.Node, PlannedFloat8] = field(default_factory=dict)
    widened: Mapping[fx.Node, tuple[torch.dtype, ...]] | None = None
    planned: Callable[[State], PlannedDtypes] | None = None
    prefix: str = ""
    recomposed: tuple[Recomposed, ...] = ()

    def with_recomposed(self, recomposed: Sequence[Recomposed]) -> State:
        """This state after nodes of its graph were replaced: a new node has the magnitude of the last one replaced."""
        names = {node.name: magnitude for node, magnitude in self.measured.items()}
        for one in recomposed:
            if one.replaced[-1] in names:
                names.setdefault(one.node, names[one.replaced[-1]])
        nodes = self.graph.nodes
        return replace(
            self,
            recomposed=tuple(recomposed),
            measured={node: names[node.name] for node in nodes if node.name in names},
            errors=self.errors.after(self.graph, recomposed),
            dtypes={node: dtypes(node) for node in nodes},
            ops={node: op_name(node) for node in nodes},
        )


@dataclass(frozen=True)
class Settings:
    """The arguments of one conversion, and the type of the device that its graphs will run on. Pickles."""

    op_list: OpList
    facts: KernelFacts
    low: torch.dtype
    keep_output_dtype: bool = True
    fold: str = "exact"
    ranges: Ranges | None = None
    headroom: float = 2.0
    plan: EditedPlan | None = None
    recompose: tuple[str, ...] = chosen(True)  # names of patterns
    weights: str = "cast"
    prices: Prices | None = None
    device: str = "cpu"
    mode: str = "train"  # of the graph; in "eval" nothing is prepared for a backward pass that seldom comes
    is_low_model: bool = False  # the model's parameters are ``low`` already: what the list denies is raised to float32

    @property
    def low_name(self) -> str:
        """The name of the 16-bit dtype."""
        return dtype_name(self.low)

    def dtype(self, precision: Precision) -> torch.dtype:
        """The dtype that float32 values have in a precision."""
        return self.low if precision is Precision.LOW else torch.float32

    @property
    def ports(self) -> Ports:
        """The inputs that a node running in 16 bits takes as they are."""
        return Ports(self.op_list, self.facts, self.device)

    @property
    def matcher(self) -> Matcher:
        """Gives the rule that decides a node."""
        return Matcher(self.op_list, self.device)

    def readers(
        self, graph: fx.Graph, decisions: Mapping[fx.Node, Decision], low: Callable[[fx.Node], bool]
    ) -> Readers:
        """The gradients that the readers of each value give it, where ``low`` is true for what reads it in 16 bits."""
        return Readers.of(
            graph,
            lambda node: node in decisions and low(node),
            lambda node: node in decisions and decisions[node].category is Category.CLEAR,
            self.op_list.backward_depth,
        )

    def category(self, node: fx.Node) -> Category | None:
        """The category of ``node`` by the list; None if no rule decides it."""
        return rule.category if (rule := self.matcher(node)) is not None else None


@dataclass(frozen=True)
class Pass(ABC):
    """One step of a conversion, which either decides or rewrites.

    A pass that decides leaves the graph as it is; one that rewrites changes it in place. ``name`` is the one of the
    design page.
    """

    settings: Settings
    name: ClassVar[str]
    rewrites: ClassVar[bool] = True

    @abstractmethod
    def __call__(self, state: State) -> State:
        """The state after this pass; ``state`` itself where there is nothing to do."""
