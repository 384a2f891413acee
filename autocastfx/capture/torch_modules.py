"""torch's own modules that do in a graph of Dynamo's something else than by themselves."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import transformer

from autocastfx.errors import StateWarning


class _Seen(threading.local):
    """What a thread has seen while it captures."""

    pads = False


_SEEN = _Seen()
_PARAMETERS = inspect.signature(nn.TransformerEncoder.forward)


def pads() -> bool:
    """Return whether an encoder in the graph that a backend is given may leave 0 in padded places by itself."""
    seen, _SEEN.pads = _SEEN.pads, False
    return seen


def tell_of_padding() -> None:
    """Warn of such an encoder."""
    warnings.warn(
        "the converted model computes the padded places of an nn.TransformerEncoder's output, as torch does in "
        "training and under torch.compile. In evaluation without gradients the model itself may leave 0 there: "
        "read none of these places, or make the encoder with enable_nested_tensor=False.",
        StateWarning,
        stacklevel=2,
    )


def note_call(function: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Look at a function that Dynamo is about to follow, and at the variables of Dynamo's that it gets."""
    if function is nn.TransformerEncoder.forward:
        given = {name: one for name, one in _PARAMETERS.bind(*args, **kwargs).arguments.items() if not _is_none(one)}
        encoder = given["self"].value
        _SEEN.pads |= "src_key_padding_mask" in given and "mask" not in given and _may_leave_zeros(encoder)


def written_out(function: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return a function that Dynamo follows in the place of torch's, which reads numbers; None if it follows that."""
    if function is F.batch_norm and not any(map(_is_of_tensor, (*args, *kwargs.values()))):
        return None
    return _WRITTEN_OUT.get(cast("Any", function)) if isinstance(function, Hashable) else None


def _is_said_causal(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Do not compare a mask with the causal one, which only selects a faster kernel that needs no mask."""
    return is_causal is True


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Read the momentum from a tensor, as with ``momentum=None``: torch's operator takes a plain number."""
    if not training or running_mean is None or running_var is None:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, 0.0, eps)
    mean, var = torch.zeros_like(running_mean), torch.zeros_like(running_var)
    result = F.batch_norm(input, mean, var, weight, bias, training, 1.0, eps)  # the statistics of this batch
    with torch.no_grad():
        for average, of_batch in ((running_mean, mean), (running_var, var)):
            average.mul_(1 - momentum).add_(of_batch * momentum)
    return result


def _equal(input: Tensor, other: Tensor) -> Any:
    """Compare as torch does: the shapes are equal, and so are all elements after promotion to one dtype."""
    return input.shape == other.shape and input.eq(other).all().item()


def _allclose(input: Tensor, other: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> Any:
    """Compare as torch does, with broadcasting."""
    return input.isclose(other, rtol, atol, equal_nan).all().item()


_WRITTEN_OUT: Mapping[Any, Any] = {
    transformer._detect_is_causal_mask: _is_said_causal,
    F.batch_norm: _batch_norm,
    torch.equal: _equal,
    Tensor.equal: _equal,
    torch.allclose: _allclose,
    Tensor.allclose: _allclose,
}


def _may_leave_zeros(encoder: nn.TransformerEncoder) -> bool:
    return bool(encoder.use_nested_tensor) and not encoder.training


def _is_of_tensor(variable: Any) -> bool:
    """True for a number that Dynamo reads from a tensor, and not from Python."""
    from torch._dynamo.variables import SymNodeVariable
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return isinstance(variable, SymNodeVariable) and bool(free_unbacked_symbols(variable.sym_num))


def _is_none(variable: Any) -> bool:
    return bool(variable.is_python_constant()) and variable.as_python_constant() is None
