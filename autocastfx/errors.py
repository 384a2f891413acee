"""The errors and warnings of autocastfx. Each message says where, what, and what to do next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PureWindowsPath

_LONG = 256  # bits; messages do not write out longer integers


def shown(value: object) -> str:
    """Return ``repr(value)``; for an integer of more than 256 bits, only its length."""
    bits = value.bit_length() if isinstance(value, int) else 0
    return f"int of {bits} bits" if bits > _LONG else repr(value)


def listed(names: Sequence[str], most: int) -> str:
    """Return the first ``most`` names, and how many more there are."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


@dataclass(frozen=True, order=True)
class Source:
    """A place in a text file, printed as ``file:line:column`` (both counted from 1)."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"

    @property
    def portable(self) -> Source:
        """The place as it is on every machine: an absolute path is cut to the file's name."""
        path = PureWindowsPath(self.file)  # splits at both kinds of slash
        return replace(self, file=path.name) if path.root else self


@dataclass(frozen=True, order=True)
class KeyPath:
    """A place in Python data, printed as ``name:key[index].key``."""

    name: str
    path: str = ""

    def __str__(self) -> str:
        return f"{self.name}:{self.path}" if self.path else self.name

    @property
    def portable(self) -> KeyPath:
        """The same place."""
        return self

    def key(self, key: object) -> KeyPath:
        """Return the place of the value under ``key``."""
        word = key if isinstance(key, str) else shown(key)
        return KeyPath(self.name, f"{self.path}.{word}" if self.path else word)

    def index(self, index: int) -> KeyPath:
        """Return the place of the member of a list at ``index``."""
        return KeyPath(self.name, f"{self.path}[{index}]")


TextPlace = Source | KeyPath


class AutocastFXError(Exception):
    """Base of all errors of this package."""


class ArgumentError(AutocastFXError, ValueError):
    """An argument has a value that the function does not take."""


class ArgumentTypeError(AutocastFXError, TypeError):
    """An argument is of a type that the function does not take."""


class UnknownNameError(AutocastFXError, KeyError):
    """Nothing has this name: no node, op, module or measured value."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""  # a KeyError's text has quotes around it


class _PlacedError(AutocastFXError, ValueError):
    """An error with the place of the offending text, if known: its message begins with it."""

    def __init__(self, message: str, source: TextPlace | None = None) -> None:
        super().__init__(f"{source}: {message}" if source else message)
        self.source = source


class OpListError(_PlacedError):
    """An op list cannot be read, or its rules contradict each other for a node.

    ``source`` is the place of the offending text, if known.
    """


class CalibrationError(_PlacedError):
    """Ranges or gradients cannot be measured or read. ``source`` is the place in the file, if one was read."""


class PlanError(_PlacedError):
    """A plan given to a conversion cannot be read or obeyed. ``source`` is the place of the offending line."""


class LossScaleError(AutocastFXError, RuntimeError):
    """Gradients are not finite even at the smallest loss scale, or a loss scale is used out of order."""


class BisectError(AutocastFXError, RuntimeError):
    """``bisect`` cannot search: the metric exceeds the tolerance even in float32, or no output is floating-point."""


class SensitivityError(AutocastFXError, ValueError):
    """The effect of 16 bits on a model cannot be measured or read, or no plan fits a budget."""


class GpuError(AutocastFXError, ValueError):
    """A GPU is unknown, its rates are not positive numbers, or its tensor cores lack the dtype."""


class ScaledGradientsWarning(UserWarning):
    """Gradients were changed while they were multiplied by the loss scale."""


class ClippedValuesWarning(UserWarning):
    """A call's inputs hold values beyond float16's range, and their casts clip them."""


class SkippedStepWarning(UserWarning):
    """An optimizer skipped a step because a node of a watched model overflowed."""


class UnscaledStepWarning(UserWarning):
    """An optimizer steps by gradients of a float16 model whose loss nothing has scaled."""


class UnmatchedRuleWarning(UserWarning):
    """A rule of the user's own op list matched no node of the model, or has no effect."""


class UnmatchedMeasurementWarning(UserWarning):
    """Ranges or a sensitivity given to a conversion match no nodes of its model, or leave some out."""


class UnmatchedPlanWarning(UserWarning):
    """Lines of a plan given to a conversion matched no node of the model."""


class StateWarning(UserWarning):
    """Python code of the model does not run in calls: its forward changes attributes, or its modules have hooks."""


class ManyVariantsWarning(UserWarning):
    """A converted model is captured again and again for one call structure."""


class UncapturedGraphWarning(UserWarning):
    """A graph that torch.compile found could not be converted, and runs otherwise."""


class UncheckedWarning(UserWarning):
    """A conversion could not be compared with the model: no call could be made, or the comparison failed."""


class CaptureError(AutocastFXError, RuntimeError):
    """A model cannot be turned into a graph."""


class BannedOpError(AutocastFXError, RuntimeError):
    """The model uses an op that the op list bans."""


class VerifyError(AutocastFXError, RuntimeError):
    """A rewritten graph does not compute what its plan says: a pass has a bug, or the graph was edited."""


class VariantError(AutocastFXError, RuntimeError):
    """A call fits none of the captured variants, and no further one can be captured."""


class NodeError(AutocastFXError, RuntimeError):
    """A node of a graph raises when it runs, for example because its kernel has no 16-bit version."""


class EvaluationsError(BisectError):
    """A file of evaluations cannot be read, or belongs to another search."""


class NotCapturedError(VariantError):
    """The graph, code or plan of a model that was converted without inputs, and not called yet, cannot be shown."""


class MissingExtraError(AutocastFXError, ImportError):
    """An optional dependency is not installed."""


class ModelSpecError(AutocastFXError, ValueError):
    """A command line names a model or inputs that do not exist, or in a form that cannot be read."""


class UnsupportedError(AutocastFXError, NotImplementedError):
    """A reserved argument value, or an operation that this object refuses by name."""
