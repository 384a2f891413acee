"""Every error that autocastfx raises on purpose. Each says where, what, and what to do next."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "AutocastFXError",
    "BannedOpError",
    "CalibrationError",
    "CaptureError",
    "EvaluationsError",
    "GpuError",
    "KeyPath",
    "MissingExtraError",
    "ModelSpecError",
    "NodeError",
    "NotCapturedError",
    "OpListError",
    "Place",
    "PlanError",
    "Source",
    "StateWarning",
    "UnmatchedPlanWarning",
    "UnmatchedRuleWarning",
    "UnsupportedError",
    "VariantError",
    "VerifyError",
    "shown",
]

_LONG = 256  # bits of an integer that no message writes out


def shown(value: object) -> str:
    """``repr(value)``, but for integers so long that Python refuses to write them, of which it says how long."""
    bits = value.bit_length() if isinstance(value, int) else 0
    return f"int of {bits} bits" if bits > _LONG else repr(value)


@dataclass(frozen=True, order=True)
class Source:
    """A place in a text file, printed as ``file:line:column`` (both counted from 1)."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True, order=True)
class KeyPath:
    """A place in Python data, printed as ``name:key[index].key``."""

    name: str
    path: str = ""

    def __str__(self) -> str:
        return f"{self.name}:{self.path}" if self.path else self.name

    def key(self, key: object) -> KeyPath:
        """The place of the value under ``key``."""
        word = key if isinstance(key, str) else shown(key)
        return KeyPath(self.name, f"{self.path}.{word}" if self.path else word)

    def index(self, index: int) -> KeyPath:
        """The place of a member of a list."""
        return KeyPath(self.name, f"{self.path}[{index}]")


Place = Source | KeyPath


class AutocastFXError(Exception):
    """Base of all errors of this package."""


class OpListError(AutocastFXError, ValueError):
    """An op list cannot be read, or its rules contradict each other for a node.

    ``source`` is the place of the offending text, if there is one.
    """

    def __init__(self, message: str, source: Place | None = None) -> None:
        super().__init__(f"{source}: {message}" if source else message)
        self.source = source


class CalibrationError(AutocastFXError, ValueError):
    """Ranges or gradients cannot be measured or read. ``source`` is the place in the file, if there is one."""

    def __init__(self, message: str, source: Source | None = None) -> None:
        super().__init__(f"{source}: {message}" if source else message)
        self.source = source


class PlanError(AutocastFXError, ValueError):
    """A plan given to a conversion cannot be read or obeyed. ``source`` is the place of the offending line."""

    def __init__(self, message: str, source: Place | None = None) -> None:
        super().__init__(f"{source}: {message}" if source else message)
        self.source = source


class LossScaleError(AutocastFXError, RuntimeError):
    """Gradients that are not finite even at the smallest loss scale, or a loss scale used out of order."""


class BisectError(AutocastFXError, RuntimeError):
    """No choice of what runs in float32 makes a metric hold."""


class GpuError(AutocastFXError, ValueError):
    """A GPU is not known, its rates are none, or its tensor cores cannot take the dtype."""


class UnmatchedRuleWarning(UserWarning):
    """A rule of the user's own op list matched no node of the model."""


class UnmatchedPlanWarning(UserWarning):
    """Lines of a plan given to a conversion matched no node of the model."""


class StateWarning(UserWarning):
    """The model's forward changes attributes that the converted model does not change."""


class CaptureError(AutocastFXError, RuntimeError):
    """A model cannot be turned into a graph."""


class BannedOpError(AutocastFXError, RuntimeError):
    """The model uses an op that the op list bans."""


class VerifyError(AutocastFXError, RuntimeError):
    """A rewritten graph does not compute what its plan says. Always a defect of a pass or of an edited graph."""


class VariantError(AutocastFXError, RuntimeError):
    """A call fits none of the captured variants, and no further one can be captured."""


class NodeError(AutocastFXError, RuntimeError):
    """A node of a graph raises when it runs, as does a kernel that does not take 16 bits."""


class EvaluationsError(BisectError):
    """A file of evaluations cannot be read, or is that of another search."""


class NotCapturedError(VariantError):
    """The graph, code or plan of a model that was converted without inputs, and not called yet, cannot be shown."""


class MissingExtraError(AutocastFXError, ImportError):
    """An optional dependency is not installed."""


class ModelSpecError(AutocastFXError, ValueError):
    """A command line names a model or inputs that are not there, or in a form that cannot be read."""


class UnsupportedError(AutocastFXError, NotImplementedError):
    """A reserved argument value, or an operation that this object refuses by name."""
