"""``convert``: the whole way from a model to an :class:`AmpModule`."""

from __future__ import annotations

import inspect
import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, cast, overload

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from autocastfx.calibration import calibrate as measure_ranges
from autocastfx.calibration import first_call
from autocastfx.capture import plain_function
from autocastfx.capture.call import (
    INPUTS_ALONE,
    Call,
    CallSignature,
    check_arguments,
    conversion_is_off,
    device_of,
    inputs_of,
    refuse_scripted,
)
from autocastfx.capture.kept_whole import functions_at
from autocastfx.capture.leave_intact import capturing, modes_after
from autocastfx.capture.progress import parts, stage
from autocastfx.errors import (
    ArgumentTypeError,
    CaptureError,
    UncheckedWarning,
    UnsupportedError,
)
from autocastfx.options import DType, Fold, Fuse, Options, Weights, for_models
from autocastfx.passes.pipeline import Converter
from autocastfx.plan.plan import Plan
from autocastfx.plan.ranges import Ranges
from autocastfx.plan.sensitivity import Sensitivity
from autocastfx.policy.op_list import OpList, OpListLike, load_op_list
from autocastfx.report import conversion_warnings
from autocastfx.runtime.amp_module import AmpModule, view
from autocastfx.runtime.behaviour import Difference, FewRows, Trial, compare_calls, trials_of
from autocastfx.runtime.captures import Captures
from autocastfx.runtime.stored_low import stored_low

_LOG = logging.getLogger("autocastfx")
_CHECKED = 2**30  # bytes of parameters up to which a model is checked unasked


def convert(
    model: nn.Module | fx.GraphModule | ExportedProgram | Callable[..., Any],
    example_inputs: tuple[Any, ...] | Mapping[str, Any] | torch.Tensor | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    dtype: DType | None = None,
    op_list: OpListLike = "default",
    weights: Weights = "cast",
    fold: Fold = "exact",
    calibrate: Ranges | str | os.PathLike[str] | Iterable[Any] | None = None,
    headroom: float = 2.0,
    device: torch.device | str | None = None,
    keep_output_dtype: bool = True,
    plan: Plan | str | Path | None = None,
    recompose: bool | Sequence[str] = True,
    sensitivity: Sensitivity | str | os.PathLike[str] | None = None,
    check: bool | None = None,
    saved: str | Sequence[Mapping[str, Any]] = "as computed",
    fuse: Fuse = "none",
) -> AmpModule:
    """Turn a float32 model into a graph whose every cast to 16 bits, and back, is a node.

    A model whose parameters all have one 16-bit dtype keeps them, and the ops that ``op_list`` denies run in float32:
    nothing is rounded that was not, and without such rules it stays as it is, to the bit.

    Args:
        model: still computes in float32; the result is a view of it, so training one trains the other. A function
            of tensors is converted, too, as one of ``torch.nn.functional``, with its arguments by position and by
            keyword and all that it returns. Numbers that it reads from around it may change: it is captured again.
            Tensors that it reads there are constants, and must need no gradient. :func:`convert_function` is a
            decorator.
        example_inputs: positional inputs of one call, as a tuple (one tensor may stand alone), or its keyword inputs,
            as a dict. Their sizes and dtypes matter, their values do not. Calls that no graph fits, with other sizes,
            structures, modes or attributes, capture a further one. Without any input the model is captured at its first
            call; until then there is no ``graph`` and no ``plan``.
        example_kwargs: keyword inputs of that call.
        dtype: the 16-bit dtype: ``torch.float16`` or ``torch.bfloat16``, or ``"float16"`` or ``"bfloat16"``. By default
            bfloat16 for a CPU, whose float16 kernels are slow, and float16 for all other devices; the logger
            ``autocastfx`` says which. A 16-bit model has its own.
        op_list: which op runs in which precision: a preset's name, a YAML path, an ``OpList``, or a sequence of these,
            of which the later win. ``"default"`` is the preset of ``dtype``. Below them are rules for the modules that
            a transformers model keeps in float32 in this dtype (:mod:`autocastfx.policy.kernel_facts`).
        weights: ``"cast"``: parameters stay float32 and are cast in the graph, in each call. ``"cached"``: parameters
            stay float32; the graph reads 16-bit working copies, which are made anew when a parameter has changed (after
            writes into ``parameter.data`` call :meth:`AmpModule.refresh_weights`). Results are the same to the bit.
            ``"low"``: for inference alone, a model of its own that shares nothing with ``model``: parameters that
            every op reads in 16 bits are stored so. It takes calls of the structure of the example inputs.
        fold: whether a ``deny`` op may take and give 16 bits between low neighbours, by the table of kernel facts.
            ``"exact"``: where that changes no more than an ulp. ``"kernel"``: also where the kernel computes in float32
            inside but rounds what it stores (norms, softmax), as a model does that is 16-bit throughout; it moves fewer
            bytes, and gradients pass through the rounded results. A cross entropy of 16-bit logits stays float32, but
            keeps 16 bits for backward if they are many; on a CPU (in bfloat16) attention with dropout, which torch
            computes in float32 there, is written out in 16 bits, and that of few tokens goes backward by products of 16
            bits. ``"none"``: never.
        calibrate: how large the model's values are: ranges that :func:`calibrate` measured, the path of a file of
            them, or batches to measure now, of which the first stands in for example inputs that are not given. A
            node whose output or input is too large or too small for ``dtype`` is float32.
        headroom: too large is the dtype's largest number divided by this, which is at least 1.
        device: decide for the kernels of this device; the model's own by default.
        keep_output_dtype: cast float32 outputs back to float32.
        plan: decisions given by hand, which win over the lists: a ``Plan``, or the path of its JSON text, edited. The
            lines of one plan apply to the nodes of their names in all variants (:mod:`autocastfx.plan.edited_plan`).
        recompose: replace what the model writes out in several ops by the one operator that computes it, which may run
            in 16 bits where the parts may not: ``True``, ``"tanh_gelu"``, ``"erf_gelu"``, ``"quick_gelu"``, ``"silu"``,
            ``"rms_norm"``, ``"layer_norm"``, ``"softmax"``, and what else is changed for speed: ``"repeated"``, equal
            calls are one; ``"loss_cast"``, a cast of logits that the loss makes itself goes; ``"math_attention"``,
            attention that torch would compute in float32 is written out; ``"short_attention"``, that of few tokens goes
            backward faster; on CUDA ``"aligned_product"``, a large product of odd sizes is padded, and gives a view;
            ``"dense_mask"``, attention reads a mask whose last stride is 1; ``"tf32_product"``, as the list says;
            ``"wide_linear"``, backward writes gradients of weights in float32; ``"grouped_attention"``, keys and values
            are not copied for each head.
            ``False``, none; or the names of those wanted, among which may be ``"attention"`` and
            ``"masked_attention"``. Rules for ops no longer see the parts. A list with ``placement: follow`` recomposes
            nothing; nor is a 16-bit model recomposed.
        sensitivity: what :func:`sensitivity` measured, or the path of its file: the plan, dumps and ``explain`` then
            tell the error that is predicted for each node and for the whole. It changes no placement; :func:`tune`
            chooses by it.
        saved: how values are kept for backward in eager training; forward does not change. ``"as computed"``, unless
            ``op_list`` has rules; ``"recompute"``: what cheap ops (norms, activations, dropout, casts) give again is
            not kept, and gradients are the same to the bit; ``"low"``: float32 values in bfloat16; ``"float8"``: in
            e4m3, with a scale for each row; or entries as under ``saved`` of an op list. Narrower rules of ``op_list``
            win. :func:`tune` chooses value by value. A compiler decides itself what to keep and recompute, so
            ``torch.compile`` ignores this.
        fuse: ``"inductor"``: what lies between products is compiled by TorchInductor, each kind of region once
            (:mod:`autocastfx.runtime.regions`). The plan is the same; a region rounds nothing inside of it, draws other
            numbers for dropout than torch on a GPU, and chooses itself what it keeps for backward. It needs a C++
            compiler on a CPU, and Triton on a GPU. ``"none"``: ops run one by one.
        check: whether the captured graph, without a cast, is run beside ``model`` before anything is handed out: with
            the example inputs and with other values, forward and backward, in training and evaluation. All that it
            does must be the same: outputs, gradients, buffers, arguments that are written into, random numbers.
            ``True``: always. ``None``: where the parameters are at most 1 GiB, with few rows of the batch, once in each
            mode, and again in a quarter of the time that the conversion took; a batch of one row is run whole, however
            long that takes. The logger ``autocastfx`` tells which calls were compared. ``False``: never.

    Returns:
        A ``torch.fx.GraphModule`` that is called like ``model``.

    Raises:
        CaptureError: the model cannot be captured, or the graph does not do what the model does; it says why and what
            would help.
        OpListError: a list is wrong, or two rules fit a node equally well; with file, line and column.
        CalibrationError: the ranges cannot be measured or read.
        SensitivityError: the sensitivity cannot be read, or was measured for another dtype.
        BannedOpError: the list bans an op of the model.
        PlanError: the plan cannot be read, or asks for what cannot be; with file, line and column.
        UnsupportedError: the model is enabled, TorchScript, or holds torchao's float8 layers, the list asks for float8
            and the device has no such products (or the model is 16-bit), a reserved argument was given, a parameter is
            a DTensor or FSDP1's, ``weights="low"`` or ``check=True`` was given without example inputs, or
            ``sensitivity`` with a list that follows torch.autocast's dispatch; or the model is 16-bit, and was given
            another ``dtype``, ``weights``, ``fold="kernel"``, ``calibrate``, ``sensitivity``, or names to
            ``recompose``; or a function calls a module with parameters, or reads a tensor that requires a gradient,
            from around it.
        ValueError: ``dtype`` is no 16-bit dtype, or ``recompose`` names no pattern.
        VerifyError: a defect of this package; nothing is handed out.
    """
    check_arguments(fold, weights, headroom, check=check)
    options = Options(
        dtype=dtype,
        op_list=op_list,
        weights=weights,
        fold=fold,
        calibrate=calibrate,
        headroom=headroom,
        device=device,
        keep_output_dtype=keep_output_dtype,
        plan=plan,
        recompose=recompose,
        sensitivity=sensitivity,
        saved=saved,
        fuse=fuse,
    )
    started = time.perf_counter()
    module, target = _as_module(model), options.target
    if not isinstance(model, ExportedProgram):
        model = module  # of a function, the module that stands for it
    _refuse_enabled(module)
    conversion_warnings.warn_of_other_parameters(module, stacklevel=3)
    args, kwargs = inputs_of(example_inputs, example_kwargs)
    is_given = example_inputs is not None or example_kwargs is not None
    if not is_given and isinstance(model, ExportedProgram) and model.example_inputs is not None:
        (args, kwargs), is_given = model.example_inputs, True
    elif not is_given and options.has_batches:
        (args, kwargs, batches), is_given = first_call(cast("Any", calibrate)), True
        options = replace(options, calibrate=batches)
    if is_off := conversion_is_off():
        options = options.turned_off()
    measured = model
    converter = options.converter(
        *(module, target or device_of(module, args, kwargs)),
        lambda batches, lists: measure_ranges(measured, batches, op_list=lists),
    )
    converter = converter if is_off else for_models(converter, [module])
    if weights == "low" and not is_given:
        raise UnsupportedError(
            'weights="low" keeps no original that could be captured at the first call: give convert the inputs of one '
            "call as example_inputs."
        )
    signature = CallSignature.of(module.forward)
    leaves = converter.op_list.functions()
    if is_given:
        _bind(signature, module, args, kwargs, takes_all=weights != "low")
    done = f"{'converted' if is_given else 'prepared'} {type(module).__name__}"
    with parts(done):
        whole = functions_at(leaves)
        if weights == "low":
            amp_model: AmpModule = stored_low(module, signature, converter, target, leaves, whole, args, kwargs)
        else:
            amp_model = view(Captures(module, signature, whole), converter, target, leaves)
            if is_given:
                amp_model._capture_first(args, kwargs)
            else:
                amp_model.__dict__["_tell"] = _tell_first
        if check and (weights == "low" or not is_given):
            raise UnsupportedError(
                "check=True compares the graph with the model in a call: give example inputs, and weights of 'cast' or "
                "'cached'."
            )
        if is_given and weights != "low" and (check or (check is None and _may_run(module, args, kwargs))):
            comparing = stage("comparing with the model", "check", is_logged=False)
            with comparing, capturing():  # threads that convert one model take turns
                if check and (missing := _check_capture(amp_model, module, (args, dict(kwargs)), None)):
                    raise CaptureError(f"check=True could compare no call: {missing}. Give other example inputs.")
                if not check:
                    _check_unasked(amp_model, module, (args, dict(kwargs)), time.perf_counter() - started)
        conversion_warnings.warn_of_slow_kernels(amp_model, converter.low)
        if amp_model.variants:  # else the first call captures, and tells
            _tell_unmatched(amp_model, stacklevel=3, ranges=not options.has_batches)
    return amp_model


@overload
def convert_function(function: Callable[..., Any], /, **options: Any) -> AmpModule: ...
@overload
def convert_function(**options: Any) -> Callable[[Callable[..., Any]], AmpModule]: ...
def convert_function(
    function: Callable[..., Any] | None = None, /, **options: Any
) -> AmpModule | Callable[[Callable[..., Any]], AmpModule]:
    """Convert a function of tensors where it is defined, as a decorator: ``@convert_function(dtype="bfloat16")``.

    What takes its place is called like it, and is what :func:`convert` returns for it: it has ``plan`` and ``graph``,
    and ``dump`` and ``explain`` show it. It is captured at its first call, and again for calls that no graph fits.

    Args:
        function: a function at the top of a module or inside of another function; left out with options alone, as in
            ``@convert_function()``.
        options: of :func:`convert`, by keyword, such as ``dtype`` and ``op_list``.

    Returns:
        The converted function; with options alone, what converts one.

    Raises:
        TypeError: it is no function, or an option is none of :func:`convert`'s.
        UnsupportedError: it is a method, whose object is no tensor; it calls a module with parameters, or reads a
            tensor that requires a gradient, from around it.
    """
    if function is None:
        return partial(_converted_function, options)
    return _converted_function(options, function)


def _converted_function(options: Mapping[str, Any], function: Any) -> AmpModule:
    if not plain_function.is_function(function):
        what = "an nn.Module, which convert takes" if isinstance(function, nn.Module) else type(function).__name__
        raise ArgumentTypeError(
            f"convert_function takes a function of tensors, not {what}; its options go by keyword, as in "
            '@convert_function(dtype="bfloat16")'
        )
    known = inspect.signature(convert).parameters
    if unknown := [option for option in options if option not in known or option == "model"]:
        raise ArgumentTypeError(
            f"convert_function takes no {', '.join(map(repr, unknown))}, but the options of convert: "
            f"{', '.join(name for name in known if name != 'model')}"
        )
    place, _, name = str(getattr(function, "__qualname__", "")).rpartition(".")
    first = next(iter(getattr(getattr(function, "__code__", None), "co_varnames", ())), "")
    is_in_class = bool(place) and not place.endswith("<locals>") and not isinstance(function, MethodType)
    if is_in_class and first in ("self", "cls"):
        raise UnsupportedError(
            f"{place}.{name} is a method, and convert_function takes a function of tensors: {first} is none. Convert "
            "the module with autocastfx.convert or autocastfx.enable, or decorate a function that the method calls "
            "with its tensors."
        )
    return convert(function, **options)


def _tell_first(amp_model: AmpModule) -> None:
    """Warn at the first call of a model that was converted without inputs."""
    conversion_warnings.warn_of_slow_kernels(amp_model, amp_model._original.converter.low)
    _tell_unmatched(amp_model)


def _tell_unmatched(amp_model: AmpModule, stacklevel: int = 2, *, ranges: bool = True) -> None:
    """Warn of rules, lines of a plan and measurements that were given to a conversion, and match nothing in its graphs.

    Without ``ranges`` not of ranges: they were measured for this conversion.
    """
    converter = cast("Converter", amp_model._original.converter)
    told = conversion_warnings.unmatched_in(
        amp_model,
        ranges=converter.ranges if ranges else None,
        sensitivity=converter.prices.sensitivity if converter.prices is not None else None,
        plan=converter.plan,
        saved=converter.op_list.saved,
    )
    for category, message in told:
        warnings.warn(message, category, stacklevel=stacklevel)
    conversion_warnings.warn_of_unmatched_rules(amp_model, converter.op_list, converter.facts, stacklevel)
    if not conversion_is_off() and converter.op_list.name != "float32":
        for without in conversion_warnings.without_effect(amp_model, weights=converter.weights, fold=converter.fold):
            _LOG.warning("%s: %s.", type(amp_model._model).__name__, without)


def _as_module(model: object) -> nn.Module:
    """The module to convert.

    Raises:
        TypeError: it is nothing that can be converted.
        UnsupportedError: it is converted already, a parameter is a DTensor, or a function reads parameters.
    """
    if isinstance(model, AmpModule):
        raise UnsupportedError("the model is converted already: convert the original again, with the other arguments.")
    module = model.module() if isinstance(model, ExportedProgram) else model
    if not isinstance(module, nn.Module):
        if plain_function.is_function(module):
            return plain_function.as_module(cast("Callable[..., Any]", module))
        hint = f": give an instance of {model.__name__}" if isinstance(model, type) else ""
        raise ArgumentTypeError(
            "convert takes an nn.Module, a GraphModule, an ExportedProgram or a function of tensors, not "
            f"{type(model).__name__}{hint}"
        )
    refuse_scripted(module)
    _check_parameters(module)
    _refuse_swapped(module)
    return module


def _bind(
    signature: CallSignature, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, takes_all: bool
) -> Call:
    try:
        return (signature.describe if takes_all else signature.bind)(args, kwargs)
    except TypeError as error:
        hint = " A dict that is an argument itself goes into a tuple: (inputs,)." if kwargs and not args else ""
        hint = f" {INPUTS_ALONE}" if len(args) > 1 else hint
        raise CaptureError(f"the example inputs do not fit {type(module).__name__}.forward: {error}.{hint}") from None


def convert_again(amp_model: AmpModule, op_list: OpList) -> AmpModule | None:
    """Convert again with ``op_list`` laid over the lists of ``amp_model``, from the graphs that were captured for it.

    It shares parameters and buffers with ``amp_model``. Rules that match no node are not warned of. None where what was
    captured is not at hand, as with ``weights="low"``.

    Raises:
        BannedOpError: the list bans an op of the model.
    """
    converter = cast("Converter", amp_model._original.converter)
    return convert_captured(amp_model, replace(converter, op_list=converter.op_list.merged(op_list)))


def without_casts(amp_model: AmpModule, modes: Sequence[bool] | None = None) -> AmpModule | None:
    """Return a model that runs what was captured for ``amp_model`` as it was captured: no cast, nothing recomposed.

    It runs where the captured model is; with ``modes`` in these alone. None where what was captured is not at hand.
    """
    own = cast("Converter", amp_model._original.converter)
    converter = Converter(load_op_list("float32"), own.facts, own.low, True, as_captured=True)
    return convert_captured(amp_model, converter, keeps_device=False, modes=modes)


def _may_run(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if the model can run and is small enough to be checked unasked."""
    values = [*module.parameters(), *module.buffers(), *pytree.tree_leaves((tuple(args), dict(kwargs)))]
    tensors = [one for one in values if isinstance(one, torch.Tensor)]
    is_abstract = any(one.is_meta or isinstance(one, FakeTensor) for one in tensors)
    return not is_abstract and sum(p.nbytes for p in module.parameters()) <= _CHECKED


def _check_unasked(amp_model: AmpModule, module: nn.Module, arguments: Any, spent: float) -> None:
    """Check the capture, or warn that, and why, it could not be checked.

    Raises:
        CaptureError: the graphs do something else.
    """
    try:
        missing = _check_capture(amp_model, module, arguments, spent)
    except CaptureError:
        raise
    except Exception as error:
        _LOG.exception("the comparison with the model failed")
        missing = f"the comparison itself failed, which is a fault of autocastfx: {type(error).__name__}: {error}"
    if missing:
        warnings.warn(
            f"the conversion of {type(module).__name__} was not compared with the model: {missing}. Give other example "
            "inputs, or check=False, which compares nothing.",
            UncheckedWarning,
            stacklevel=3,
        )


def _check_capture(amp_model: AmpModule, module: nn.Module, arguments: Any, spent: float | None) -> str:
    """Compare the captured graphs, without casts, with the model, and return why no call was compared, if none was.

    Args:
        amp_model: the converted model.
        module: the original.
        arguments: the example inputs.
        spent: the seconds that the conversion took. The check takes about a quarter of them, and few rows of the batch;
            None: it takes its time, and all rows.

    Raises:
        CaptureError: the graphs do something else.
    """
    started = time.perf_counter()
    calls, dropped, differing = list[str](), list[str](), list[Difference]()
    bare, took = dict[Sequence[bool], AmpModule | None](), 0.0
    checked = [variant.modes for variant in amp_model.variants]
    checked += [modes_after(module, training=training) for training in (True, False)]
    for trial in trials_of(arguments, list(dict.fromkeys(checked))):
        left = math.inf if spent is None else spent / 4 - (time.perf_counter() - started)
        if calls and left <= took and trial.modes in bare:  # each mode is compared once
            dropped.append(f"{trial.name}: it would take too long")
            continue
        if trial.modes not in bare:
            bare[trial.modes] = without_casts(amp_model, trial.modes)
        if (other := bare[trial.modes]) is None:
            return "what was captured is not at hand"
        began = time.perf_counter()
        few = None if spent is None else FewRows(partial(_with_own_captures, other), spent)
        compared = compare_calls(module, other, [trial], few)
        took = time.perf_counter() - began
        calls += compared.calls
        dropped += compared.dropped
        differing += compared.differences
    missing = f"; not compared: {'; '.join(dropped)}" if dropped else ""
    took = time.perf_counter() - started
    _LOG.info("compared with the model: %s%s: %.1f s", "; ".join(calls) or "nothing", missing, took)
    if differing:
        first, *rest = differing
        more = f", and {len(rest)} more differences" if rest else ""
        raise CaptureError(
            f"the graph captured of {type(module).__name__} does not do what the model does: {first}{more}. Its code "
            "does something that capture does not follow: autocastfx.enable(model) runs such code as it is. "
            "convert(check=False) hands the graph out all the same."
        )
    return "" if calls else "; ".join(dropped)


def _with_own_captures(amp_model: AmpModule, _: Trial) -> AmpModule:
    return amp_model._with_own_captures()


def convert_captured(
    amp_model: AmpModule, converter: Converter, *, keeps_device: bool = True, modes: Sequence[bool] | None = None
) -> AmpModule | None:
    """Convert by ``converter`` what was captured for ``amp_model``, as :func:`convert_again` does.

    With ``modes`` only for these. With ``keeps_device`` it is for the device that ``amp_model`` was converted for, else
    for that of its parameters.
    """
    if amp_model._is_low:
        return None
    known = amp_model._made if modes is None else amp_model._captures.graphs
    graphs = [one for one in known if modes is None or one.captured.training == modes]
    return amp_model._converted_by(converter, graphs, amp_model._original.device if keeps_device else None)


def _refuse_enabled(model: nn.Module) -> None:
    """Refuse a model that is enabled, or holds what is: capture would go through the calls that convert it.

    Raises:
        UnsupportedError: it is.
    """
    for name, module in model.named_modules():
        call = module.__dict__.get("_compiled_call_impl")
        if str(getattr(getattr(call, "__func__", type(call)), "__module__", "")).startswith("autocastfx."):
            raise UnsupportedError(
                f"{f'the module {name}' if name else f'this {type(module).__name__}'} is enabled: its calls are "
                "converted already. Call autocastfx.disable first, with the model that was enabled, or convert a "
                "copy.deepcopy of it."
            )


def _refuse_swapped(model: nn.Module) -> None:
    """Refuse a model whose linear layers torchao has swapped: their own products are float8, and no graph shows them.

    Raises:
        UnsupportedError: it is such a model.
    """
    swapped = [
        name or "(root)" for name, m in model.named_modules() if type(m).__module__.startswith("torchao.float8.")
    ]
    if swapped:
        raise UnsupportedError(
            f"{len(swapped)} modules of {type(model).__name__} are torchao's Float8Linear, the first being "
            f"{swapped[0]!r}: convert the model before torchao swaps its layers, with op_list='float8' for float8."
        )


def _check_parameters(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "device_mesh"):
            raise UnsupportedError(
                f"parameter {name!r} of {type(model).__name__} is a DTensor, whose collectives cannot be captured. For "
                "FSDP2 convert first, and give fully_shard the converted model; leave a tensor-parallel model to "
                "torch.autocast, with a LossScalingOptimizer all the same."
            )
        if hasattr(parameter, "_fsdp_flattened"):
            raise UnsupportedError(
                f"parameter {name!r} of {type(model).__name__} is held by FullyShardedDataParallel, in whose calls "
                "alone it is whole. Convert the model first and wrap what was converted, or use autocastfx.enable."
            )
