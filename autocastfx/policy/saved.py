"""The forms in which values are kept for backward, and what ``convert``'s ``saved`` stands for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from autocastfx.errors import ArgumentError


class Keep(str, Enum):
    """The form in which a value is kept for backward, with its word in op lists."""

    COMPUTED = "computed"
    BFLOAT16 = "low"
    FLOAT8 = "float8"
    RECOMPUTE = "recompute"

    def __str__(self) -> str:
        return self.value

    @property
    def in_words(self) -> str:
        """The form in words."""
        words = {Keep.COMPUTED: "as computed", Keep.BFLOAT16: "in bfloat16", Keep.FLOAT8: "in float8"}
        return words.get(self, "recomputed")


KEEPS: Mapping[str, str] = {
    "computed": "kept as it was computed",
    "low": "float32 values are kept in bfloat16, rows far from 0 without their middle; others as computed",
    "float8": "kept in float8 (e4m3), with a float32 scale and a middle for each row in memory",
    "recompute": "not kept where cheap ops give it again, to the bit, from what is kept: the choice that keeps the "
    "fewest bytes",
}
SAVED_KEYS: Mapping[str, str] = {
    "keep": "how the values that these ops give are kept for backward; forward does not change",
    "ops": "these ops; by default all",
    "path": "only inside of these modules, by a pattern as under `modules`; by default everywhere",
    "devices": "the device type or types that the rule is for; by default all",
    "reason": "text that plans and dumps show",
}
_AS_COMPUTED = "as computed"
_SAVED = (_AS_COMPUTED, *(keep.value for keep in (Keep.RECOMPUTE, Keep.BFLOAT16, Keep.FLOAT8)))  # words of ``saved``


def rules_of(saved: str | Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The entries that an argument ``saved`` stands for.

    Raises:
        ValueError: it is no word for a form.
    """
    if isinstance(saved, Sequence) and not isinstance(saved, str) and all(isinstance(one, Mapping) for one in saved):
        return list(saved)
    if not isinstance(saved, str) or saved not in _SAVED:
        words = ", ".join(map(repr, _SAVED))
        raise ArgumentError(
            f"saved is {words}, or a list of entries as under 'saved' of an op list, not {saved!r}; a factor of the "
            "error is for tune"
        )
    return [] if saved == _AS_COMPUTED else [{"keep": saved}]
