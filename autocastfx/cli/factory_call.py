"""Import what ``package.module:name`` names, and call it with the literal arguments that may follow."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autocastfx.capture.leave_intact import random_numbers_kept
from autocastfx.errors import CaptureError, ModelSpecError
from autocastfx.policy.yaml_tree import nearest

__all__ = ["FactoryCall", "is_factory_call"]

_FORM = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*)*):([^\W\d]\w*(?:\.[^\W\d]\w*)*)(\(.*\))?", re.DOTALL)


def is_factory_call(spec: str) -> bool:
    """True for ``package.module:name`` and ``package.module:name(…)``."""
    return _FORM.fullmatch(spec) is not None


@dataclass(frozen=True)
class FactoryCall:
    """A ``package.module:name``, with or without arguments in brackets.

    Attributes:
        spec: its text.
        module, path: where it is found.
        args, kwargs: literals; nothing in them is evaluated as code.
        has_arguments: False without brackets.
    """

    spec: str
    module: str
    path: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    has_arguments: bool = False

    @classmethod
    def of(cls, spec: str, form: str) -> FactoryCall:
        """Read a text.

        Args:
            spec: the text.
            form: what it should be, for the error.

        Raises:
            ModelSpecError: it is no such text, or an argument is no literal.
        """
        found = _FORM.fullmatch(spec)
        if found is None:
            raise ModelSpecError(f"cannot read {spec!r}: {form}.")
        args, kwargs = _literals(spec, found[3]) if found[3] is not None else ((), {})
        return cls(spec, found[1], found[2], args, kwargs, found[3] is not None)

    def result(self) -> Any:
        """Import the module and call what it holds, each with seed 0. A model that stands there ready is not called.

        Raises:
            ModelSpecError: there is no such module or name, or it cannot be called.
            CaptureError: the module or the call raises.
        """
        value = self._value()
        if isinstance(value, nn.Module) and not self.has_arguments:
            return value
        if isinstance(value, nn.Module):
            raise ModelSpecError(f"{self.module}:{self.path} is a model itself: leave the arguments out.")
        if not callable(value):
            raise ModelSpecError(f"{self.spec} is a {type(value).__name__}: name a model, or something to call.")
        try:
            with random_numbers_kept():
                torch.manual_seed(0)
                return value(*self.args, **self.kwargs)
        except Exception as error:
            raise CaptureError(f"{self.spec} raised {_error_text(error)}") from error

    def _value(self) -> Any:
        try:
            with random_numbers_kept():
                torch.manual_seed(0)
                value: Any = importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            if error.name is not None and f"{self.module}.".startswith(f"{error.name}."):
                raise ModelSpecError(
                    f"{self.spec}: there is no module {error.name!r} here{_nearest_module(error.name)}. It is looked "
                    "for in the current directory and where Python looks."
                ) from error
            raise CaptureError(f"importing {self.module} raised {_error_text(error)}") from error
        except Exception as error:
            raise CaptureError(f"importing {self.module} raised {_error_text(error)}") from error
        for name in self.path.split("."):
            if not hasattr(value, name):
                raise ModelSpecError(f"{self.module} has no {self.path!r}{nearest(name, dir(value))}.")
            value = getattr(value, name)
        return value


def _literals(spec: str, brackets: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    try:
        call = ast.parse(f"f{brackets}", mode="eval").body
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
            raise ValueError("it is not a single call")
        named = [(word.arg, ast.literal_eval(word.value)) for word in call.keywords]
        kwargs = {name: value for name, value in named if name is not None}
        if len(kwargs) < len(named):
            raise ValueError("** holds no names")
        return tuple(ast.literal_eval(one) for one in call.args), kwargs
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise ModelSpecError(
            f"cannot read the arguments in {spec!r}: they are literals, as in module:factory(2, name='tiny', "
            "sizes=[3, 4]); nothing is evaluated."
        ) from error


def _nearest_module(name: str) -> str:
    """Suggest a module beside the one that is missing."""
    around, _, last = name.rpartition(".")
    paths = getattr(importlib.import_module(around), "__path__", []) if around else None
    hint = nearest(last, (found.name for found in pkgutil.iter_modules(paths)))
    return hint.replace("'", f"'{around}.", 1) if around else hint


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
