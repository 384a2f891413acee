"""The converted model: a GraphModule that picks the variant which fits a call, and else behaves as the original."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import fx

from autocastfx.graph.node import Observer
from autocastfx.plan.plan import Plan

if TYPE_CHECKING:
    from autocastfx.runtime.variant import Variant


class AmpModule(fx.GraphModule):
    """A converted model."""

    _observers: tuple[Observer, ...]
    _active: Any
    _shown: tuple[Variant, ...]

    @contextmanager
    def _observed_by(self, observer: Observer) -> Generator[None]:
        """While open, calls run node by node and show their values to ``observer``; not those in compiled code."""
        self._observers = (*self._observers, observer)
        try:
            yield
        finally:
            self._observers = tuple(one for one in self._observers if one is not observer)

    @property
    def _working_copies(self) -> Any:
        """The 16-bit copies that graphs read by this name, once in each call."""
        copies = self.__dict__.get("_autocastfx_copies")
        return None if copies is None else copies.fresh()

    @property
    def _is_low(self) -> bool:
        return False

    @property
    def plan(self) -> Plan:
        """Every decision of the variant that ``graph`` shows, with its reason."""
        return self._active.plan

    @property
    def _code(self) -> str:
        return self._active.code

    def __str__(self) -> str:
        return super().__str__() if self._shown else repr(self)
