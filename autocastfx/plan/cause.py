"""The cause of a node's placement as a value: a kind, and the nodes that it names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

__all__ = ["Cause", "Why"]


class Why(str, Enum):
    """The kind of a cause. Its value is the text, with ``{}`` for each node."""

    ALLOW = "allow"
    DENY = "deny"
    KEEP = "keep"
    PROMOTE = "promote"
    AFTER = "after {}"  # a node that runs in float32
    UPDATES = "updates {}"  # in plans of earlier versions: a buffer, parameter or input, which stays float32
    SHARES_STORAGE = "shares storage that stays float32"
    NO_ALLOW_BEFORE = "no allow op before it"
    INPUT_IS_FLOAT32 = "an input is float32"
    FEWEST_BYTES = "fewest bytes moved"
    FOLDED = "folded"
    MEASURED = "measured: fewest bytes for its error"
    VIEW_OF_WEIGHT = "a view of a 16-bit weight"
    EDITED = "the plan"
    AS_CAPTURED = "as the model has it"  # of a model that is 16-bit already
    # TensorFlow's rule, ``placement: simple``.
    BETWEEN = "between {} and {}"
    NEXT_TO = "next to {}"
    NOT_ENCLOSED = "no two allow ops enclose it"
    ALL_LOW = "all its inputs are low"
    # Nothing that could be cast.
    NO_FLOAT32 = "no float32 value"
    CROSSES_BORDER = "values cross the border of a sub-graph as captured"
    # torch.autocast's dispatch, ``placement: follow``.
    INPUTS_CROSS_BORDER = "its inputs cross a border as captured"
    NO_TENSOR = "gives no tensor"
    NOTHING_TO_CAST = "no input that is cast"
    AS_INPUTS = "as its inputs come"
    FIRST_NOT_CAST = "its first input is not cast"
    NAMES_DTYPE = "the call names its dtype"


# The clause of a sentence, where the value is none.
_CLAUSES = {
    **{why: f"its category is {why.value}" for why in (Why.ALLOW, Why.DENY, Why.KEEP, Why.PROMOTE)},
    Why.AFTER: "it comes after {}, which does",
    Why.UPDATES: "it updates {}",
    Why.SHARES_STORAGE: "it shares memory that stays float32",
    Why.NO_ALLOW_BEFORE: "there is no allow op before it",
    Why.FEWEST_BYTES: "this moves the fewest bytes",
    Why.FOLDED: "it is folded: its kernel computes in float32 inside",
    Why.MEASURED: "this moves the fewest bytes for the error that was measured",
    Why.VIEW_OF_WEIGHT: "it is a view of a 16-bit weight",
    Why.EDITED: "the plan given to convert says so",
    Why.BETWEEN: "it lies between {} and {}",
    Why.NEXT_TO: "it lies next to {}",
}


@dataclass(frozen=True)
class Cause:
    """A kind of cause, with the name of a node for each ``{}`` in its text."""

    why: Why
    nodes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.why.value.format(*self.nodes)

    @property
    def clause(self) -> str:
        """The cause as a clause of a sentence that says how the node runs."""
        return _CLAUSES.get(self.why, self.why.value).format(*self.nodes)

    def inside(self, prefix: str) -> Cause:
        """The same cause in a sub-graph, whose nodes have ``prefix`` before their names in a plan."""
        return Cause(self.why, tuple(prefix + node for node in self.nodes))

    @classmethod
    def from_text(cls, text: str) -> Cause:
        """The cause whose text is ``text``.

        Raises:
            ValueError: no cause has this text.
        """
        for why in Why:
            found = re.fullmatch(r"(\S+)".join(map(re.escape, why.value.split("{}"))), text)
            if found is not None:
                return cls(why, found.groups())
        raise ValueError(f"{text!r} is no cause of a placement")
