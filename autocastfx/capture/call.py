"""A call of a model: its arguments bound by name, and its structure, which is part of a variant's key."""

from __future__ import annotations

import inspect
import itertools
import math
import pickle
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autocastfx.capture.tree_spec import leaf_paths, written
from autocastfx.errors import UnsupportedError, shown

__all__ = ["Call", "CallSignature", "CallStructure", "pack_spec", "sized", "unpack_spec"]

_EMPTY = inspect.Parameter.empty
# The values that an argument may hold besides tensors. Compilers pass symbols for numbers.
_CONSTANTS = (torch.dtype, torch.device, torch.layout, torch.memory_format, Enum)
_PLAIN = (type(None), bool, int, complex, str, *_CONSTANTS, torch.SymInt, torch.SymFloat, torch.SymBool)
_MOST = 300  # characters of a call in messages
# Names that a graph's code uses itself, so that no tensor may have them.
_TAKEN = ("self", "torch", "device", "inf", "nan", "NoneType", "pytree", "fx_pytree")


def pack_spec(spec: pytree.TreeSpec) -> bytes:
    """Pickle ``spec``, without torch's warning about a deprecated class that torch itself still uses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return pickle.dumps(spec)


def unpack_spec(data: bytes) -> pytree.TreeSpec:
    """Unpickle the result of :func:`pack_spec`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return pickle.loads(data)


@dataclass(frozen=True)
class CallStructure:
    """The part of a call that a graph bakes in: arguments and their nesting, dtypes, dimensions and plain values."""

    spec: pytree.TreeSpec
    leaves: tuple[tuple[Any, ...], ...]  # ("tensor", dtype, ndim) or ("value", type, value); a float's sign follows

    def arguments(self, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Return the bound arguments with ``tensors`` in the places of the tensors, in order."""
        rest = iter(tensors)
        leaves = [next(rest) if leaf[0] == "tensor" else leaf[2] for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)

    def tensor_names(self) -> list[str]:
        """Return a Python name for each tensor, in order, made of the argument and keys that lead to it."""
        names: dict[str, None] = dict.fromkeys(_TAKEN)
        for path, leaf in zip(leaf_paths(self.spec), self.leaves, strict=True):
            if leaf[0] == "tensor":
                name = re.sub(r"\W+", "_", "_".join(map(str, path))).strip("_") or "input"
                again = (f"{name}_{n}" for n in itertools.count(1))
                names[name if name not in names else next(n for n in again if n not in names)] = None
        return list(names)[len(_TAKEN) :]

    def __reduce__(self) -> tuple[Any, ...]:
        return (_structure, (pack_spec(self.spec), self.leaves))

    def __str__(self) -> str:
        return self.written([_word(leaf) for leaf in self.leaves])

    def written(self, leaves: Sequence[str]) -> str:
        """Write the arguments with these words in the places of the leaves."""
        words = iter(leaves)
        children = zip(self.spec.context, self.spec.children(), strict=True)
        named = [f"{name}={written(child, itertools.islice(words, child.num_leaves))}" for name, child in children]
        return ", ".join(named).replace("'", "")


def _word(leaf: tuple[Any, ...]) -> str:
    """Write a leaf as ``float32[2d]``, or as its value."""
    kind, of, held = leaf[:3]
    return f"{str(of).removeprefix('torch.')}[{held}d]" if kind == "tensor" else shown(held)


def sized(tensor: torch.Tensor) -> str:
    """Write a tensor as ``float32[3, 5]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _structure(spec: bytes, leaves: tuple[tuple[Any, ...], ...]) -> CallStructure:
    return CallStructure(unpack_spec(spec), leaves)


@dataclass(frozen=True)
class Call:
    """A call's tensors, in order, and its structure."""

    tensors: tuple[torch.Tensor, ...]
    structure: CallStructure

    def __str__(self) -> str:
        """Write the arguments, tensors as ``x=float32[3, 5]``; cut where that is long."""
        rest = iter(self.tensors)
        words = [sized(next(rest)) if leaf[0] == "tensor" else _word(leaf) for leaf in self.structure.leaves]
        said = self.structure.written(words)
        return said if len(said) <= _MOST else f"{said[:_MOST]}…"


@dataclass(frozen=True)
class CallSignature:
    """A forward's parameters, without annotations, so that the signature pickles and compiles."""

    parameters: tuple[inspect.Parameter, ...]
    by_position: int = 0  # number of leading parameters that ``split`` passes by position, needed or not

    @classmethod
    def of(cls, forward: Callable[..., Any], by_position: int = 0) -> CallSignature:
        """Read the signature of a bound ``forward``."""
        parameters = inspect.signature(forward).parameters.values()
        return cls(tuple(p.replace(annotation=_EMPTY) for p in parameters), by_position)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """Bind the call ``forward(*args, **kwargs)``.

        Arguments by position or by keyword, and defaults given or left out, make the same call.

        Raises:
            TypeError: an argument is missing or unknown; raised by Python.
            UnsupportedError: an argument holds an object that is not a tensor, a plain value or a registered pytree.
        """
        return _call(self._arguments(args, kwargs))

    def takes(self, names: Iterable[object]) -> bool:
        """True if arguments of all these names may be given by keyword."""
        known = {p.name for p in self.parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        return any(p.kind is p.VAR_KEYWORD for p in self.parameters) or known.issuperset(names)

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

    def split(self, arguments: Mapping[str, Any], *, in_order: bool = False) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Turn bound arguments into ``(args, kwargs)``, by keyword wherever Python allows it.

        With ``in_order`` the leading ones are passed by position, where hooks on the model's call look for them.
        """
        has_rest = any(p.kind is p.VAR_POSITIONAL and p.name in arguments for p in self.parameters)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for i, p in enumerate(self.parameters):
            if p.kind is p.VAR_POSITIONAL:
                args.extend(arguments.get(p.name, ()))
            elif p.kind is p.VAR_KEYWORD:
                kwargs.update(arguments.get(p.name, {}))
            elif (
                p.kind is p.POSITIONAL_ONLY
                or (has_rest and p.kind is p.POSITIONAL_OR_KEYWORD)
                or i < self.by_position
                or (in_order and p.kind is p.POSITIONAL_OR_KEYWORD and p.name in arguments and len(args) == i)
            ):
                args.append(arguments.get(p.name, p.default))
            elif p.name in arguments:
                kwargs[p.name] = arguments[p.name]
        return tuple(args), kwargs


def _same(given: Any, default: Any) -> bool:
    """True if an argument equals its default: the same object, or an equal plain value other than zero or empty."""
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
        elif isinstance(leaf, float):  # every NaN as one object, so that it equals itself; zeros with their sign
            described.append(("value", type(leaf), math.nan if leaf != leaf else leaf, math.copysign(1.0, leaf)))
        elif isinstance(leaf, _PLAIN):
            described.append(("value", type(leaf), leaf))
        else:
            raise UnsupportedError(_refusal(leaf, leaf_paths(spec)[len(described)]))
    return Call(tuple(tensors), CallStructure(spec, tuple(described)))


def _refusal(leaf: Any, path: tuple[Any, ...]) -> str:
    kind = type(leaf).__name__
    place = "".join(f"[{step!r}]" for step in path[1:])
    if type(leaf).__module__ == "numpy":
        return f"argument {path[0]}{place} is a {kind} of NumPy: make a tensor of it, torch.from_numpy(array)."
    return (
        f"argument {path[0]}{place} is an object of class {kind}, which a graph cannot hold. Arguments are "
        "tensors, numbers, text, None, dtypes, devices, layouts and enums, in lists, tuples, dicts and registered "
        f"pytrees. Pass the tensors of the {kind} in one of these; or register the class with "
        "torch.utils._pytree.register_pytree_node (transformers: for a DynamicCache, "
        "transformers.integrations.executorch.register_dynamic_cache_export_support() does; or use_cache=False)."
    )
