"""Load the model, the weights and the inputs that a command's arguments name, and convert it as its options say."""

from __future__ import annotations

import argparse
import ast
import importlib
import pkgutil
import re
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from autocastfx.capture.call import device_of, named_device
from autocastfx.capture.leave_intact import random_numbers_kept
from autocastfx.cli.parser import CONVERSION, add_file, group
from autocastfx.conversion import convert
from autocastfx.dtypes import chosen_dtype, dtype_name
from autocastfx.errors import CaptureError, ModelSpecError, NotCapturedError, listed
from autocastfx.graph.node import path_and_around
from autocastfx.passes.patterns.patterns import chosen
from autocastfx.policy.kernel_facts import LEVELS
from autocastfx.policy.op_list import OpList, OpListLike, load_op_list
from autocastfx.policy.yaml_tree import nearest
from autocastfx.runtime.amp_module import AmpModule

# Import what ``package.module:name`` names, and call it with the literal arguments that may follow.

_FORM = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*)*):([^\W\d]\w*(?:\.[^\W\d]\w*)*)(\(.*\))?", re.DOTALL)


def is_factory_call(spec: str) -> bool:
    """True for ``package.module:name`` and ``package.module:name(…)``."""
    return _FORM.fullmatch(spec) is not None


def called(spec: str, form: str) -> Any:
    """Import the module of ``package.module:name`` and call what it holds, each with seed 0.

    A model that stands there ready is not called. Arguments in brackets are literals: nothing in them is evaluated as
    code. ``form`` is what the text should be, for the error.

    Raises:
        ModelSpecError: it is no such text, an argument is no literal, there is no such module or name, or it cannot be
            called.
        CaptureError: the module or the call raises.
    """
    match = _FORM.fullmatch(spec)
    if match is None:
        raise ModelSpecError(f"cannot read {spec!r}: {form}.")
    module, path, brackets = match.groups()
    args, kwargs = _literals(spec, brackets) if brackets is not None else ((), {})
    value = _imported(spec, module)
    for name in path.split("."):
        if not hasattr(value, name):
            raise ModelSpecError(f"{module} has no {path!r}{nearest(name, dir(value))}.")
        value = getattr(value, name)
    if isinstance(value, nn.Module) and brackets is None:
        return value
    if isinstance(value, nn.Module):
        raise ModelSpecError(f"{module}:{path} is a model itself: leave the arguments out.")
    if not callable(value):
        raise ModelSpecError(f"{spec} is a {type(value).__name__}: name a model, or something to call.")
    return _with_seed(lambda: value(*args, **kwargs), spec)


def _imported(spec: str, module: str) -> Any:
    try:
        return _with_seed(lambda: importlib.import_module(module), f"importing {module}")
    except CaptureError as raised:
        error = raised.__cause__
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{module}.".startswith(f"{missing}."):
            raise
        raise ModelSpecError(
            f"{spec}: there is no module {missing!r} here{_nearest_module(missing)}. It is looked for in the current "
            "directory and where Python looks."
        ) from error


def _with_seed(call: Callable[[], Any], what: str) -> Any:
    try:
        with random_numbers_kept():
            torch.manual_seed(0)
            return call()
    except Exception as error:
        raise CaptureError(f"{what} raised {type(error).__name__}: {error}") from error


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
    hint = nearest(last, (module.name for module in pkgutil.iter_modules(paths)))
    return hint.replace("'", f"'{around}.", 1) if around else hint


# Load models and inputs that a command line names as ``package.module:factory``, or inputs as dtypes and sizes.

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
    made = called(spec, "a model is package.module:factory")
    if not isinstance(made, nn.Module):
        raise ModelSpecError(f"{spec} gave a {type(made).__name__}: the factory of a model returns an nn.Module.")
    return made


def load_function(spec: str, what: str) -> Callable[..., Any]:
    """Call the factory of ``package.module:factory`` for a function, which messages call ``what``: ``"a metric"``.

    Raises:
        ModelSpecError: there is no such module or factory, or its result cannot be called.
        CaptureError: the module or the factory raises.
    """
    made = called(spec, f"{what} is package.module:factory")
    if not callable(made):
        raise ModelSpecError(f"{spec} gave a {type(made).__name__}: the factory of {what} returns a function.")
    return made


def load_inputs(specs: Sequence[str], device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Make the positional and keyword inputs of a call; those given by their sizes are on ``device``.

    One ``package.module:factory`` returns a tuple, a dict (keyword inputs) or a tensor. Or each input is given by its
    dtype and sizes: ``float32[8,3]``, or ``x=float32[8,3]`` for a keyword input. Floating inputs are normally
    distributed, integers and booleans zero; ``int64[8,128]<1000`` is random from 0 to 999. Seeds are fixed.

    Raises:
        ModelSpecError: a text has neither form, or a factory returns something else.
        CaptureError: a factory raises.
    """
    if len(specs) == 1 and is_factory_call(specs[0]):
        made = called(specs[0], f"inputs are {_FORMS}")
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
        match = _SHAPE.fullmatch(spec)
        if match is None:
            alone = "; a factory gives all inputs and stands alone" if is_factory_call(spec) else ""
            raise ModelSpecError(f"cannot read the input {spec!r}: it is {_FORMS}{alone}.")
        tensor, name = _tensor(match, generator).to(device), match["name"]
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
    made = called(spec, f"batches are {_FORMS}")
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


# Load models and weights from files of ``torch.save``. A whole model's file can run any code; weights cannot.

_SUFFIXES = (".pt", ".pth")
_MOST = 3


def is_model_file(spec: str) -> bool:
    """True if a MODEL is a file rather than ``package.module:factory``."""
    return spec.lower().endswith(_SUFFIXES) and not is_factory_call(spec)


def load_pickled(spec: str, *, trust: bool) -> nn.Module:
    """Load a whole model from the file ``spec``, if the user accepts that reading it can run any code (``trust``).

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
        place = None if torch.cuda.is_available() else "cpu"  # as saved, where it can be
        made: Any = torch.load(path, map_location=place, weights_only=False)
    except Exception as error:  # whatever the file's own code raises
        said = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}".rstrip(": ")
        raise CaptureError(
            f"reading {spec} raised {said}. The code of the model's classes must be importable from here."
        ) from error
    if isinstance(made, torch.jit.ScriptModule):
        raise ModelSpecError(f"{spec} holds a TorchScript module, which has no Python code to capture.")
    if not isinstance(made, nn.Module):
        way = "; a state_dict is given by --weights" if isinstance(made, Mapping) else ""
        raise ModelSpecError(f"{spec} holds a {type(made).__name__}, not an nn.Module{way}.")
    return made


def load_weights(model: nn.Module, spec: str, path: Path) -> None:
    """Load a complete state_dict into ``model``, which messages call ``spec``, without running code from the file.

    Raises:
        ModelSpecError: the file cannot be read, holds anything but tensors by name, or does not fit the model.
    """
    _check_is_file(path, "weights")
    try:
        weights: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's own message advises to run the file's code
        raise ModelSpecError(
            f"{path} holds more than tensors, or is no file of torch.save ({type(error).__name__}). --weights takes a "
            "state_dict and runs nothing, with --trust or without: save model.state_dict() by itself."
        ) from error
    _check_fits(_state_dict(weights, path), model.state_dict(), path, spec)
    model.load_state_dict(weights, strict=True)


def _state_dict(weights: Any, path: Path) -> Mapping[str, torch.Tensor]:
    if not isinstance(weights, Mapping):
        raise ModelSpecError(f"{path} holds a {type(weights).__name__}: --weights takes a state_dict, tensors by name.")
    other = next((name for name, value in weights.items() if not isinstance(value, torch.Tensor)), None)
    if other is not None:
        held = {name: value for name, value in weights.items() if isinstance(value, Mapping) and value}
        inner = next((n for n, value in held.items() if all(isinstance(t, torch.Tensor) for t in value.values())), None)
        way = f" One seems to be under {inner!r}: save it by itself." if inner is not None else ""
        kind = type(weights[other]).__name__
        raise ModelSpecError(
            f"{path}: {other!r} is a {kind}, and --weights takes a state_dict alone, tensors by name.{way}"
        )
    return weights


def _check_fits(weights: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], path: Path, spec: str) -> None:
    missing, unknown = [n for n in wanted if n not in weights], [n for n in weights if n not in wanted]
    shapes = [
        f"{name} is {list(weights[name].shape)}, here {list(tensor.shape)}"
        for name, tensor in wanted.items()
        if name in weights and weights[name].shape != tensor.shape
    ]
    hint = nearest(unknown[0], missing) if unknown else ""
    prefixes = [f"{path}." for path in path_and_around(next(iter(unknown), "").rpartition(".")[0]) if path]
    prefix = next((p for p in prefixes if all(n.removeprefix(p) in wanted for n in unknown)), "")
    hint = f" (all begin with {prefix!r}: save the state_dict of the model inside)" if prefix else hint
    problems = [
        f"it lacks {listed(missing, _MOST)}" if missing else "",
        f"the model has no {listed(unknown, _MOST)}{hint}" if unknown else "",
        f"other sizes: {listed(shapes, _MOST)}" if shapes else "",
    ]
    if any(problems):
        raise ModelSpecError(f"the weights {path} do not fit {spec}: {'; '.join(p for p in problems if p)}.")


def _check_is_file(path: Path, what: str) -> None:
    if path.is_dir():
        raise ModelSpecError(f"cannot read the {what} {path}: it is a folder.")
    if not path.is_file():
        raise ModelSpecError(f"cannot read the {what} {path}: no such file.")


# Options of the command line that are arguments of ``convert``.

_NAMES = ("device", "fold", "fuse", "recompose", "calibrate", "plan")


def add_conversion_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    conversion = group(parser, CONVERSION)
    conversion.add_argument("--device", metavar="DEVICE", help="decide for the kernels of this device; the model's")
    conversion.add_argument("--fold", choices=tuple(LEVELS), help="where a deny op may take and give 16 bits; exact")
    conversion.add_argument("--fuse", choices=("none", "inductor"), help="compile what lies between products; none")
    which = conversion.add_mutually_exclusive_group()
    which.add_argument("--recompose", nargs="+", metavar="NAME", help="use these patterns alone, of all of convert's")
    which.add_argument(
        "--no-recompose", dest="recompose", action="store_false", default=None, help="replace nothing by one operator"
    )
    conversion.add_argument(
        "--calibrate",
        nargs="+",
        metavar="INPUTS",
        help="measure how large values are: on batches, each as --inputs (a factory may give a list of them); or a "
        "file of ranges",
    )
    add_file(conversion, "--plan", help="an edited plan of dump --format json")


def given_options(options: Namespace) -> list[str]:
    """Return the options of these that were given, as they are written."""
    given = [name for name in _NAMES if getattr(options, name, None) is not None]
    return ["--no-recompose" if getattr(options, name) is False else f"--{name}" for name in given]


def conversion_arguments(options: Namespace, device: torch.device) -> dict[str, Any]:
    """Return keyword arguments for ``convert``, for a model on ``device``; those that were not given are left out.

    Raises:
        ModelSpecError: one cannot be used.
        CaptureError: a factory of batches raises.
    """
    arguments: dict[str, Any] = {n: given for n in _NAMES if (given := getattr(options, n, None)) is not None}
    try:
        if "device" in arguments:
            named_device(arguments["device"])
        if arguments.get("recompose"):
            chosen(arguments["recompose"])
    except ValueError as error:
        raise ModelSpecError(f"--{error}.") from error
    if "calibrate" in arguments:
        arguments["calibrate"] = _calibration(arguments["calibrate"], device)
    return arguments


def _calibration(specs: Sequence[str], device: torch.device) -> Any:
    """Return the path of a file of ranges, or batches."""
    if len(specs) == 1 and not is_factory_call(specs[0]) and "[" not in specs[0]:
        if not Path(specs[0]).is_file():
            raise ModelSpecError(
                f"--calibrate {specs[0]}: there is no such file of ranges, and it is no form of inputs."
            )
        return specs[0]
    if all(map(is_factory_call, specs)):
        return [batch for spec in specs for batch in load_batches(spec)]
    return [load_inputs(specs, device)]


# Load and convert the model that a command's arguments name.


def given_model(options: Namespace, spec: str) -> nn.Module:
    """Load the model that ``spec`` names, with the weights of ``--weights``, in the mode of ``--mode``.

    Raises:
        ModelSpecError: there is no such model, it is a file and ``--trust`` is not given, or the weights do not fit.
        CaptureError: the model's own code raises.
    """
    model = load_pickled(spec, trust=options.trust) if is_model_file(spec) else load_model(spec)
    if options.weights is not None and not isinstance(model, AmpModule):
        load_weights(model, spec, options.weights)
    return model if options.mode is None else model.train(options.mode == "train")


def converted(
    options: Namespace, op_list: OpListLike, model: nn.Module | None = None, device: str | None = None
) -> AmpModule:
    """Convert ``model`` (by default ``options.model``) as the arguments say, for the given inputs or batches.

    A file of a converted model is captured for the inputs. ``device`` is the device type to decide for, by default that
    of ``--device`` or the model's.

    Raises:
        AutocastFXError: the model or the inputs cannot be loaded, or the model cannot be converted.
    """
    model = given_model(options, options.model) if model is None else model
    if isinstance(model, AmpModule):
        _check_converted(options, model, device)
        if options.inputs:
            args, kwargs = load_inputs(options.inputs, device_of(model))
            model._variant_for(args, kwargs)
        return _with_graph(model)
    place = device_of(model)
    how = conversion_arguments(options, place)
    if device is not None:
        how["device"] = device
    dtype = chosen_dtype(options.dtype, torch.device(how.get("device") or place))
    lists: OpList = load_op_list(op_list, default=dtype_name(dtype))
    if not options.inputs:
        return _with_graph(convert(model, dtype=dtype, op_list=lists, **how))
    args, kwargs = load_inputs(options.inputs, place)
    return convert(model, args, kwargs, dtype=dtype, op_list=lists, **how)


def _with_graph(amp_model: AmpModule) -> AmpModule:
    try:
        _ = amp_model.plan
    except NotCapturedError as error:
        raise NotCapturedError(f"{error} Here that is --inputs.") from error
    return amp_model


def _check_converted(options: Namespace, model: AmpModule, device: str | None) -> None:
    """Refuse options that would convert a model which is converted already."""
    if device is not None:
        raise ModelSpecError(
            "the file holds a converted model, which was decided for its own device: give the original."
        )
    low = dtype_name(model._original.converter.low)
    names = [f"--{name.replace('_', '-')}" for name in ("op_list", "weights") if getattr(options, name, None)]
    given = [
        *names,
        *given_options(options),
        *([f"--dtype {options.dtype}"] if options.dtype not in (None, low) else []),
    ]
    if given:
        raise ModelSpecError(
            f"the file holds a model that is converted already, to {low}: leave {', '.join(given)} out."
        )
