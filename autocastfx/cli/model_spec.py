"""Load models and inputs that a command line names as ``package.module:factory``, or inputs as dtypes and sizes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import nn

from autocastfx.cli.factory_call import FactoryCall, is_factory_call
from autocastfx.dtypes import dtype_name
from autocastfx.errors import ModelSpecError
from autocastfx.policy.yaml_tree import nearest

__all__ = ["load_batches", "load_function", "load_inputs", "load_model"]

_SHAPE = re.compile(
    r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<dtype>[a-z]\w*)\[(?P<sizes>\s*|\s*\d+\s*(?:,\s*\d+\s*)*)\](?:<(?P<below>\d+))?"
)
_FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
_OTHERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
_DTYPES = {dtype_name(dtype): dtype for dtype in (*_FLOATING, *_OTHERS)}
_FORMS = "'x=float32[8,3,224,224]' (by keyword), 'float32[8,3]' (by position) or 'package.module:factory'"


def load_model(spec: str) -> nn.Module:
    """Import the module of ``package.module:factory``, or of ``package.module:factory(2, name="tiny")``, for a model.

    The factory is called with seed 0; a model that stands there ready is taken as it is.

    Raises:
        ModelSpecError: there is no such module or factory, or it does not return an ``nn.Module``.
        CaptureError: the module or the factory raises.
    """
    made = FactoryCall.of(spec, "a model is package.module:factory").result()
    if not isinstance(made, nn.Module):
        raise ModelSpecError(f"{spec} gave a {type(made).__name__}: the factory of a model returns an nn.Module.")
    return made


def load_function(spec: str, what: str) -> Callable[..., Any]:
    """Call the factory of ``package.module:factory`` for a function.

    Args:
        spec: as for a model.
        what: the function's kind in messages, such as ``"a metric"``.

    Raises:
        ModelSpecError: there is no such module or factory, or its result cannot be called.
        CaptureError: the module or the factory raises.
    """
    made = FactoryCall.of(spec, f"{what} is package.module:factory").result()
    if not callable(made):
        raise ModelSpecError(f"{spec} gave a {type(made).__name__}: the factory of {what} returns a function.")
    return made


def load_inputs(specs: Sequence[str], device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Make the positional and keyword inputs of a call.

    Args:
        specs: one ``package.module:factory`` that returns a tuple, a dict (keyword inputs) or a tensor; or for each
            input its dtype and sizes: ``float32[8,3]``, or ``x=float32[8,3]`` for a keyword input. Floating inputs are
            normally distributed, integers and booleans zero; ``int64[8,128]<1000`` is random from 0 to 999. Seeds are
            fixed.
        device: the device of inputs given by their sizes.

    Raises:
        ModelSpecError: a text has neither form, or a factory returns something else.
        CaptureError: a factory raises.
    """
    if len(specs) == 1 and is_factory_call(specs[0]):
        made = FactoryCall.of(specs[0], f"inputs are {_FORMS}").result()
        if isinstance(made, dict):
            return (), {str(name): value for name, value in made.items()}
        if isinstance(made, torch.Tensor):
            return (made,), {}
        if not isinstance(made, tuple):
            raise ModelSpecError(f"{specs[0]} gave a {type(made).__name__}: inputs are a tuple, a dict or a tensor.")
        return made, {}
    args, kwargs = list[Any](), dict[str, Any]()
    generator = torch.Generator().manual_seed(0)
    for spec in specs:
        found = _SHAPE.fullmatch(spec)
        if found is None:
            alone = "; a factory gives all inputs and stands alone" if is_factory_call(spec) else ""
            raise ModelSpecError(f"cannot read the input {spec!r}: it is {_FORMS}{alone}.")
        tensor, name = _tensor(found, generator).to(device), found["name"]
        if name is None:
            args.append(tensor)
        elif name in kwargs:
            raise ModelSpecError(f"the input {name!r} is given twice.")
        else:
            kwargs[name] = tensor
    return tuple(args), kwargs


def load_batches(spec: str) -> list[Any]:
    """Call the factory of ``package.module:factory`` for batches: the inputs of one call, or an iterable of such.

    Raises:
        ModelSpecError: there is no such module or factory, or it returns something else.
        CaptureError: the module or the factory raises.
    """
    made = FactoryCall.of(spec, f"batches are {_FORMS}").result()
    if isinstance(made, (tuple, dict, torch.Tensor)):
        return [made]
    if not isinstance(made, Iterable):
        raise ModelSpecError(
            f"{spec} gave a {type(made).__name__}: batches are an iterable of tuples, dicts or tensors, or one."
        )
    return list(cast("Iterable[Any]", made))


def _tensor(spec: re.Match[str], generator: torch.Generator) -> torch.Tensor:
    dtype, below = _DTYPES.get(spec["dtype"]), spec["below"]
    if dtype is None:
        hint = nearest(spec["dtype"], _DTYPES)
        raise ModelSpecError(
            f"the input {spec[0]!r}: {spec['dtype']!r} is no dtype{hint}. Known: {', '.join(_DTYPES)}."
        )
    sizes = [int(size) for size in spec["sizes"].split(",") if size.strip()]
    if below is None:
        return (
            torch.randn(sizes, generator=generator, dtype=dtype)
            if dtype in _FLOATING
            else torch.zeros(sizes, dtype=dtype)
        )
    if dtype in _FLOATING or dtype is torch.bool:
        raise ModelSpecError(f"the input {spec[0]!r}: a bound such as <1000 is for integers.")
    if not 0 < int(below) <= torch.iinfo(dtype).max:
        raise ModelSpecError(f"the input {spec[0]!r}: the bound is from 1 to {torch.iinfo(dtype).max}.")
    return torch.randint(int(below), sizes, generator=generator, dtype=dtype)
