"""Load models and weights from files of ``torch.save``. A whole model's file can run any code; weights cannot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autocastfx.errors import CaptureError, ModelSpecError
from autocastfx.policy.yaml_tree import nearest

__all__ = ["is_model_file", "load_pickled", "load_weights"]

_SUFFIXES = (".pt", ".pth")
_MOST = 3


def is_model_file(spec: str) -> bool:
    """True if a MODEL is a file rather than ``package.module:factory``."""
    parts = spec.split(":")
    is_factory = len(parts) == 2 and all(name.isidentifier() for part in parts for name in part.split("."))
    return spec.lower().endswith(_SUFFIXES) and not is_factory


def load_pickled(spec: str, *, trust: bool) -> nn.Module:
    """Load a whole model from a file.

    Args:
        spec: path of the file.
        trust: True if the user accepts that reading the file can run any code.

    Raises:
        ModelSpecError: ``trust`` is false, the file does not exist, or holds no ``nn.Module``.
        CaptureError: reading it raises, for example because the code of its classes is missing.
    """
    path = Path(spec)
    _check_is_file(path, "model")
    if not trust:
        raise ModelSpecError(
            f"{spec} is a file of a whole model, and reading one runs whatever the file says. If you know where it "
            "comes from, add --trust; else name package.module:factory, with --weights FILE, which runs nothing."
        )
    try:
        made: Any = torch.load(path, map_location=_place(), weights_only=False)
    except Exception as error:  # whatever the file's own code raises
        raise CaptureError(
            f"reading {spec} raised {_first_line(error)}. The code of the model's classes must be importable from here."
        ) from error
    if isinstance(made, torch.jit.ScriptModule):
        raise ModelSpecError(f"{spec} holds a TorchScript module, which has no Python code to capture.")
    if not isinstance(made, nn.Module):
        way = "; a state_dict is given by --weights" if isinstance(made, Mapping) else ""
        raise ModelSpecError(f"{spec} holds a {type(made).__name__}, not an nn.Module{way}.")
    return made


def load_weights(model: nn.Module, spec: str, path: Path) -> None:
    """Load a complete state_dict into ``model``, without running code from the file.

    Args:
        model: the model to load into.
        spec: the model's name in messages.
        path: the file.

    Raises:
        ModelSpecError: the file cannot be read, holds anything but tensors by name, or does not fit the model.
    """
    _check_is_file(path, "weights")
    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's own message advises to run the file's code
        raise ModelSpecError(
            f"{path} holds more than tensors, or is no file of torch.save ({type(error).__name__}). --weights takes a "
            "state_dict and runs nothing, with --trust or without: save model.state_dict() by itself."
        ) from error
    _check_fits(_state_dict(found, path), model.state_dict(), path, spec)
    model.load_state_dict(found, strict=True)


def _state_dict(found: Any, path: Path) -> Mapping[str, torch.Tensor]:
    if not isinstance(found, Mapping):
        raise ModelSpecError(f"{path} holds a {type(found).__name__}: --weights takes a state_dict, tensors by name.")
    other = next((name for name, value in found.items() if not isinstance(value, torch.Tensor)), None)
    if other is not None:
        inner = next((name for name, value in found.items() if _is_state_dict(value)), None)
        way = f" One seems to be under {inner!r}: save it by itself." if inner is not None else ""
        kind = type(found[other]).__name__
        raise ModelSpecError(
            f"{path}: {other!r} is a {kind}, and --weights takes a state_dict alone, tensors by name.{way}"
        )
    return found


def _is_state_dict(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(isinstance(v, torch.Tensor) for v in value.values())


def _check_fits(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], path: Path, spec: str) -> None:
    missing, unknown = [n for n in wanted if n not in found], [n for n in found if n not in wanted]
    shapes = [
        f"{name} is {list(found[name].shape)}, here {list(tensor.shape)}"
        for name, tensor in wanted.items()
        if name in found and found[name].shape != tensor.shape
    ]
    hint = nearest(unknown[0], missing) if unknown else ""
    prefix = next((p for p in _prefixes(unknown) if all(n.removeprefix(p) in wanted for n in unknown)), "")
    hint = f" (all begin with {prefix!r}: save the state_dict of the model inside)" if prefix else hint
    problems = [
        f"it lacks {_listed(missing)}" if missing else "",
        f"the model has no {_listed(unknown)}{hint}" if unknown else "",
        f"other sizes: {_listed(shapes)}" if shapes else "",
    ]
    if any(problems):
        raise ModelSpecError(f"the weights {path} do not fit {spec}: {'; '.join(p for p in problems if p)}.")


def _prefixes(names: Iterable[str]) -> list[str]:
    """Return the prefixes of the first name, up to each of its dots."""
    parts = next(iter(names), "").split(".")[:-1]
    return [".".join(parts[:n]) + "." for n in range(1, len(parts) + 1)]


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_MOST]) + (f" and {len(names) - _MOST} more" if len(names) > _MOST else "")


def _check_is_file(path: Path, what: str) -> None:
    if path.is_dir():
        raise ModelSpecError(f"cannot read the {what} {path}: it is a folder.")
    if not path.is_file():
        raise ModelSpecError(f"cannot read the {what} {path}: no such file.")


def _place() -> str | None:
    """Return the ``map_location`` for a whole model: the CPU if there is no GPU, else as saved."""
    return None if torch.cuda.is_available() else "cpu"


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")
