"""One call of a model: its arguments bound by name, apart from how they were written, and the key that they make."""

from __future__ import annotations

import inspect
import itertools
import math
import pickle
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["Call", "CallSignature", "CallStructure", "pack_spec", "unpack_spec"]

_EMPTY = inspect.Parameter.empty
# What the code of a graph means by these names, a tensor cannot be called.
_TAKEN = ("self", "torch", "device", "inf", "nan", "NoneType", "pytree", "fx_pytree")


def pack_spec(spec: pytree.TreeSpec) -> bytes:
    """``spec`` as bytes. Pickling one warns of torch's own deprecation of a class that torch still uses itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return pickle.dumps(spec)


def unpack_spec(data: bytes) -> pytree.TreeSpec:
    """What :func:`pack_spec` packed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return pickle.loads(data)


@dataclass(frozen=True)
class CallStructure:
    """All of a call that a captured graph bakes in: which arguments, nested how, their dtypes and plain values."""

    spec: pytree.TreeSpec
    leaves: tuple[tuple[Any, ...], ...]  # ("tensor", dtype, ndim) or ("value", type, value)

    def arguments(self, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
        """The bound arguments, with ``tensors`` in the places of the tensors, in order."""
        rest = iter(tensors)
        leaves = [next(rest) if leaf[0] == "tensor" else leaf[2] for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)

    def tensor_names(self) -> list[str]:
        """A Python name for each tensor, in order, from the argument and the keys that lead to it."""
        arguments = pytree.tree_unflatten([leaf[0] for leaf in self.leaves], self.spec)
        paths, _ = pytree.tree_flatten_with_path(arguments)
        names: dict[str, None] = dict.fromkeys(_TAKEN)
        for path, kind in paths:
            if kind == "tensor":
                name = re.sub(r"\W+", "_", pytree.keystr(path)).strip("_") or "input"
                again = (f"{name}_{n}" for n in itertools.count(1))
                names[name if name not in names else next(n for n in again if n not in names)] = None
        return list(names)[len(_TAKEN) :]

    def __reduce__(self) -> tuple[Any, ...]:
        return (_structure, (pack_spec(self.spec), self.leaves))

    def __str__(self) -> str:
        stand_ins = [
            f"{str(leaf[1]).removeprefix('torch.')}[{leaf[2]}d]" if leaf[0] == "tensor" else repr(leaf[2])
            for leaf in self.leaves
        ]
        arguments = pytree.tree_unflatten(stand_ins, self.spec)
        return ", ".join(f"{name}={shown}" for name, shown in arguments.items()).replace("'", "")


def _structure(spec: bytes, leaves: tuple[tuple[Any, ...], ...]) -> CallStructure:
    return CallStructure(unpack_spec(spec), leaves)


@dataclass(frozen=True)
class Call:
    """A call's tensors, in order, and all else that it says."""

    tensors: tuple[torch.Tensor, ...]
    structure: CallStructure


@dataclass(frozen=True)
class CallSignature:
    """A forward's parameters, without annotations, so that it pickles and compiles."""

    parameters: tuple[inspect.Parameter, ...]
    by_position: int = 0  # how many leading parameters ``split`` passes by position although Python would not need it

    @classmethod
    def of(cls, forward: Callable[..., Any], by_position: int = 0) -> CallSignature:
        """The signature of a bound ``forward``."""
        parameters = inspect.signature(forward).parameters.values()
        return cls(tuple(p.replace(annotation=_EMPTY) for p in parameters), by_position)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """The call ``forward(*args, **kwargs)``: positional and keyword forms, and defaults spelled out, are one call.

        Raises:
            TypeError: as Python itself would, for missing and unknown arguments.
        """
        return _call(self._arguments(args, kwargs))

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        named, position = dict(kwargs), 0
        for p in self.parameters:
            if p.kind is p.VAR_POSITIONAL:
                if position < len(args):
                    arguments[p.name] = tuple(args[position:])
                    position = len(args)
            elif p.kind is p.VAR_KEYWORD:
                if named:
                    arguments[p.name], named = named, {}
            elif position < len(args) and p.kind is not p.KEYWORD_ONLY:
                if p.name in named and p.kind is not p.POSITIONAL_ONLY:
                    break
                arguments[p.name] = args[position]
                position += 1
            elif p.name in named and p.kind is not p.POSITIONAL_ONLY:
                arguments[p.name] = named.pop(p.name)
            elif p.default is _EMPTY:
                break
        if position < len(args) or named or not self._complete(arguments):
            inspect.Signature(list(self.parameters)).bind(*args, **kwargs)  # raises Python's own TypeError
        defaults = {p.name: p.default for p in self.parameters}
        return {name: v for name, v in arguments.items() if not _same(v, defaults[name])}

    def _complete(self, arguments: Mapping[str, Any]) -> bool:
        optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return all(p.name in arguments or p.default is not _EMPTY or p.kind in optional for p in self.parameters)

    def split(self, arguments: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Bound arguments as ``(args, kwargs)`` of a call; by keyword wherever Python allows it."""
        has_rest = any(p.kind is p.VAR_POSITIONAL and p.name in arguments for p in self.parameters)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for i, p in enumerate(self.parameters):
            if p.kind is p.VAR_POSITIONAL:
                args.extend(arguments.get(p.name, ()))
            elif p.kind is p.VAR_KEYWORD:
                kwargs.update(arguments.get(p.name, {}))
            elif (
                p.kind is p.POSITIONAL_ONLY or (has_rest and p.kind is p.POSITIONAL_OR_KEYWORD) or i < self.by_position
            ):
                args.append(arguments.get(p.name, p.default))
            elif p.name in arguments:
                kwargs[p.name] = arguments[p.name]
        return tuple(args), kwargs


def _same(given: Any, default: Any) -> bool:
    """Whether an argument is its default spelled out: the same object, or an equal plain value (0.0 is not -0.0)."""
    if given is default:
        return True
    if type(given) is not type(default):
        return False
    if isinstance(given, tuple):
        return len(given) == len(default) and all(_same(a, b) for a, b in zip(given, default, strict=True))
    return isinstance(given, (int, float, str)) and given == default and bool(given)


def _call(arguments: dict[str, Any]) -> Call:
    leaves, spec = pytree.tree_flatten(arguments)
    tensors: list[torch.Tensor] = []
    described: list[tuple[Any, ...]] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
            described.append(("tensor", leaf.dtype, leaf.ndim))
        else:
            is_nan = isinstance(leaf, float) and leaf != leaf
            described.append(
                ("value", type(leaf), math.nan if is_nan else leaf)
            )  # one object, so that it equals itself
    return Call(tuple(tensors), CallStructure(spec, tuple(described)))
