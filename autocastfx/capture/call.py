"""A call of a model: its arguments bound by name, and its structure, which is part of a variant's key."""

from __future__ import annotations

import inspect
import itertools
import math
import os
import pickle
import re
import sys
import warnings
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from enum import Enum
from numbers import Real
from typing import Any, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autocastfx.dtypes import dtype_name, is_dtype
from autocastfx.errors import ArgumentError, ArgumentTypeError, UnsupportedError, shown
from autocastfx.policy.kernel_facts import LEVELS


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


# Read the nesting of arguments from a pytree's spec alone, without constructing the user's objects.

_BRACKETS = {dict: "{}", list: "[]", tuple: "()"}


def leaf_paths(spec: pytree.TreeSpec) -> list[tuple[Any, ...]]:
    """Return the keys, field names and positions that lead to each leaf, in order."""
    if spec.is_leaf():
        return [()]
    steps = _steps(spec)
    return [(step, *path) for step, child in zip(steps, spec.children(), strict=True) for path in leaf_paths(child)]


def written(spec: pytree.TreeSpec, words: Iterable[str]) -> str:
    """Write the tree in Python's notation, with one of ``words`` for each leaf, in order: ``{a: [1, None]}``."""
    return _written(spec, iter(words))


def _written(spec: pytree.TreeSpec, words: Iterator[str]) -> str:
    if spec.is_leaf():
        return next(words)
    members = [_written(child, words) for child in spec.children()]
    kind: Any = spec.context if spec.type is namedtuple else spec.type
    steps = _steps(spec)
    if kind in (list, tuple):
        inside = ", ".join(members) + ("," if kind is tuple and len(members) == 1 else "")
    elif all(isinstance(step, int) for step in steps) and kind is not dict:
        inside = ", ".join(members)
    else:
        sign = ": " if kind is dict else "="
        inside = ", ".join(f"{step}{sign}{member}" for step, member in zip(steps, members, strict=True))
    opening, closing = _BRACKETS.get(kind, "()")
    return f"{'' if kind in _BRACKETS else kind.__name__}{opening}{inside}{closing}"


def _steps(spec: pytree.TreeSpec) -> list[Any]:
    """Return a key, field name or position for each child. Keys are the context, or one of its members."""
    context: Any = spec.context
    count = spec.num_children
    if spec.type is namedtuple:
        return list(context._fields)
    parts: list[Any] = [context, *context] if isinstance(context, (list, tuple)) else []
    fitting = (part for part in parts if isinstance(part, (list, tuple)) and len(part) == count)
    named = (part for part in fitting if spec.type is dict or all(isinstance(step, str) for step in part))
    return list(next(named, range(count)))


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
    kind, of, detail = leaf[:3]
    return f"{str(of).removeprefix('torch.')}[{detail}d]" if kind == "tensor" else shown(detail)


def sized(tensor: torch.Tensor) -> str:
    """Write a tensor as ``float32[3, 5]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _structure(spec: bytes, leaves: tuple[tuple[Any, ...], ...]) -> CallStructure:
    return CallStructure(unpack_spec(spec), leaves)


@dataclass(frozen=True)
class CallSignature:
    """A forward's parameters, without annotations, so that the signature pickles and compiles."""

    parameters: tuple[inspect.Parameter, ...]

    @classmethod
    def of(cls, forward: Callable[..., Any]) -> CallSignature:
        """Read the signature of a bound ``forward``."""
        parameters = inspect.signature(forward).parameters.values()
        return cls(tuple(p.replace(annotation=_EMPTY) for p in parameters))

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """Bind the call ``forward(*args, **kwargs)``.

        Arguments by position or by keyword, and defaults given or left out, make the same call.

        Raises:
            TypeError: an argument is missing or unknown; raised by Python.
            UnsupportedError: an argument holds an object that is not a tensor, a plain value or a registered pytree.
        """
        return _call(self._arguments(args, kwargs))

    def describe(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """Do as :meth:`bind`, but take objects of any class, of which the name stands in the structure."""
        return _call(self._arguments(args, kwargs), takes_all=True)

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

    def split(self, arguments: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Turn bound arguments into ``(args, kwargs)``, by keyword wherever Python allows it."""
        has_rest = any(p.kind is p.VAR_POSITIONAL and p.name in arguments for p in self.parameters)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for p in self.parameters:
            if p.kind is p.VAR_POSITIONAL:
                args.extend(arguments.get(p.name, ()))
            elif p.kind is p.VAR_KEYWORD:
                kwargs.update(arguments.get(p.name, {}))
            elif p.kind is p.POSITIONAL_ONLY or (has_rest and p.kind is p.POSITIONAL_OR_KEYWORD):
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


@dataclass(frozen=True)
class _Object:
    """Stands for an object that is no plain value."""

    name: str

    def __repr__(self) -> str:
        return f"<{self.name}>"


def _call(arguments: dict[str, Any], *, takes_all: bool = False) -> Call:
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
        elif takes_all:
            described.append(("value", type(leaf), _Object(type(leaf).__name__)))
        else:
            raise UnsupportedError(_refusal(leaf, leaf_paths(spec)[len(described)]))
    return Call(tuple(tensors), CallStructure(spec, tuple(described)))


def _refusal(leaf: Any, path: tuple[Any, ...]) -> str:
    kind = type(leaf).__name__
    place = "".join(f"[{step!r}]" for step in path[1:])
    if type(leaf).__module__ == "numpy":
        return f"argument {path[0]}{place} is a {kind} of NumPy: make a tensor of it, torch.from_numpy(array)."
    if is_dataclass(leaf):
        return (
            f"argument {path[0]}{place} is a dataclass {kind} that torch does not know. Call "
            f"torch.export.register_dataclass({kind}) once, before the conversion: its fields are arguments of a graph "
            "then, if they are tensors, numbers, text, None, or the like."
        )
    return (
        f"argument {path[0]}{place} is an object of class {kind}, which a graph cannot hold. Arguments are "
        "tensors, numbers, text, None, dtypes, devices, layouts and enums, in lists, tuples, dicts and registered "
        f"pytrees. Pass the tensors of the {kind} in one of these; or register the class with "
        "torch.utils._pytree.register_pytree_node (transformers: for a DynamicCache, "
        "transformers.integrations.executorch.register_dynamic_cache_export_support() does; or use_cache=False)."
    )


# Read the inputs of one call as a user gives them, and the device that they and the model are on.

_FROM_NUMPY = "Make a tensor of it: torch.from_numpy(array)."
INPUTS_ALONE = "Give the inputs of the model alone, and no targets."
_SEVERAL = "Several inputs of one call go in a tuple: convert(model, (a, b)); keyword inputs in a dict."
_BY_NAME = 'Options go by name: convert(model, example_inputs, dtype="bfloat16").'
_IN_A_TUPLE = "An object that is the model's first argument goes into a tuple: (inputs,)."


def inputs_of(positional: Any, keywords: Mapping[str, Any] | None) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return the positional and the keyword inputs of a call.

    Args:
        positional: a tensor, a tuple or list of positional inputs, a mapping of keyword inputs, or None.
        keywords: keyword inputs, or None.

    Raises:
        TypeError: the inputs are none of these; or both hold keyword inputs.
    """
    if keywords is not None and not isinstance(keywords, Mapping):
        given, hint = type(keywords).__name__, _SEVERAL
        if is_dtype(keywords):
            given, hint = shown(keywords), _BY_NAME
        raise ArgumentTypeError(f"example_kwargs is a dict of keyword inputs, not {given}. {hint}")
    if isinstance(positional, Mapping):
        if keywords:
            raise ArgumentTypeError(
                "example_inputs is a dict, which holds keyword inputs, and example_kwargs has others: give one of the "
                "two. A dict that is the model's first argument goes into a tuple: (inputs,)."
            )
        return (), cast("Mapping[str, Any]", positional)
    if isinstance(positional, torch.Tensor):
        return (positional,), keywords or {}
    if positional is not None and not isinstance(positional, (tuple, list)):
        hint = _BY_NAME if is_dtype(positional) else _FROM_NUMPY if _is_array(positional) else _IN_A_TUPLE
        raise ArgumentTypeError(
            "example_inputs is a tensor, a tuple of the positional inputs of one call, or a dict of its keyword "
            f"inputs, not {type(positional).__name__}. {hint}"
        )
    return tuple(cast("Sequence[Any]", positional or ())), keywords or {}


def batch_of(
    signature: CallSignature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return the positional and keyword inputs of a call; a dict that stands alone holds keyword inputs.

    It does so if the model takes all its keys by name. Else it is the first argument.
    """
    if len(args) == 1 and not kwargs and isinstance(args[0], Mapping):
        given = cast("Mapping[str, Any]", args[0])
        if given and signature.takes(given):
            return (), given
    return tuple(args), kwargs


def batches_of(batches: Iterable[Any]) -> Iterator[Any]:
    """Return an iterator of the batches that a user gave.

    Raises:
        TypeError: one batch was given, or nothing that can be iterated.
    """
    if isinstance(batches, (torch.Tensor, Mapping)) or not isinstance(batches, Iterable):
        raise ArgumentTypeError(
            f"batches is an iterable of batches, not a {type(batches).__name__}; write [batch] for one"
        )
    return iter(batches)


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword inputs of the call that a batch is for.

    Args:
        batch: a tensor; a tuple or list of positional inputs; a mapping of keyword inputs; or a pair of a tuple and a
            mapping, for both.
    """
    if isinstance(batch, Mapping):
        return (), dict(cast("Mapping[str, Any]", batch))
    if not isinstance(batch, (tuple, list)):
        return (batch,), {}
    parts: tuple[Any, ...] = tuple(cast("Iterable[Any]", batch))
    if len(parts) == 2 and isinstance(parts[0], (tuple, list)) and isinstance(parts[1], Mapping):
        return tuple(cast("Iterable[Any]", parts[0])), dict(cast("Mapping[str, Any]", parts[1]))
    return parts, {}


def _is_array(value: object) -> bool:
    return type(value).__module__ == "numpy"


def device_of(model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> torch.device:
    """Return the device of the model's first parameter or buffer, else of the first tensor among the inputs."""
    return device_among((*model.parameters(), *model.buffers(), *pytree.tree_leaves((tuple(args), dict(kwargs or {})))))


def device_among(values: Iterable[object]) -> torch.device:
    """Return the device of the first tensor among ``values``; the CPU if there is none."""
    return next((one.device for one in values if isinstance(one, torch.Tensor)), torch.device("cpu"))


def named_device(given: torch.device | str | None) -> torch.device | None:
    """Return the device that a user named; None for None.

    Raises:
        ValueError: torch knows none of this name.
    """
    try:
        return torch.device(given) if given is not None else None
    except (RuntimeError, TypeError) as error:
        near = "cuda" if str(given).lower().startswith("gpu") else "cpu"
        known = str(error).partition("\n")[0]
        raise ArgumentError(
            f"device={given!r} is not a device that torch knows (did you mean {near!r}?): {known}"
        ) from None


# Checks of the arguments of a conversion, before anything is captured.


def check_arguments(
    fold: str, weights: str = "cast", headroom: float = 1.0, *, check: bool | None = None, fuse: str = "none"
) -> None:
    """Check arguments of a conversion.

    Raises:
        ValueError: one has no such value.
    """
    if isinstance(headroom, bool) or not isinstance(headroom, Real) or not 1 <= headroom <= sys.float_info.max:
        raise ArgumentError(f"headroom is a finite factor of at least 1, not {shown(headroom)}")
    if check not in (None, True, False):
        raise ArgumentError(f"check is None, True or False, not {shown(check)}")
    choices = {
        "weights": (weights, ("cast", "cached", "low")),
        "fold": (fold, tuple(LEVELS)),
        "fuse": (fuse, ("none", "inductor")),
    }
    for name, (given, known) in choices.items():
        if given not in known:
            raise ArgumentError(f"{name} is one of {', '.join(map(repr, known))}, not {given!r}")


# Of a model that is 16-bit already.
_REFUSED = {
    "dtype": "the conversion has the dtype of the model: leave dtype out, or convert the float32 model",
    "weights": 'its parameters are stored in 16 bits as they are: leave weights="cast"',
    "fold": 'what the list denies is raised to float32: leave fold="exact", and name in op_list what is to be raised',
    "calibrate": "nothing is rounded that was not: name in op_list what is to be float32, or convert the float32 model",
    "sensitivity": "nothing is rounded that was not: convert the float32 model, for which it was measured",
    "recompose": "its ops stay those that they are, to the bit: leave recompose out, or convert the float32 model",
}


def refuse_for_low_model(module: nn.Module, own: torch.dtype, **given: Any) -> None:
    """Refuse arguments of a conversion that mean nothing for a model whose parameters are ``own``, a 16-bit dtype.

    Raises:
        UnsupportedError: one of them is given.
    """
    wanted = {"dtype": own, "weights": "cast", "calibrate": None, "sensitivity": None}
    for name, value in given.items():
        if name == "fold":
            is_fit = value != "kernel"
        else:
            is_fit = isinstance(value, bool) if name == "recompose" else value == wanted.get(name, value)
        if not is_fit:
            raise UnsupportedError(
                f"{name} was given, and the parameters of this {type(module).__name__} are {dtype_name(own)} already: "
                f"{_REFUSED[name]}."
            )


def refuse_scripted(model: nn.Module) -> None:
    """Refuse a model that is TorchScript, or holds a module that is: there is no Python code to capture.

    Raises:
        UnsupportedError: it is.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"{f'the module {name!r}' if name else 'this model'} is a {type(module).__name__} of torch.jit, which "
                "has no Python code to capture: put the module in its place that it was made from, or leave it to "
                "torch.autocast."
            )


def conversion_is_off() -> bool:
    """True, and told, if the environment has ``AUTOCASTFX_DISABLE=1``: everything runs in float32, to compare runs.

    Raises:
        ValueError: the variable has another value than 0 or 1.
    """
    said = os.environ.get("AUTOCASTFX_DISABLE", "") or "0"
    if said not in ("0", "1"):
        raise ArgumentError(f"AUTOCASTFX_DISABLE is 0 or 1, not {said!r}")
    if said == "1":
        warnings.warn("AUTOCASTFX_DISABLE=1 is set: nothing is converted, and all runs in float32.", stacklevel=3)
    return said == "1"
