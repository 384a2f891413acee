"""``logprob_gap``: how far two models are apart in the log probabilities of chosen tokens."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autocastfx.capture.call import arguments_of, batches_of, refuse_scripted, sized
from autocastfx.capture.leave_intact import isolated
from autocastfx.errors import ArgumentError, ArgumentTypeError, SensitivityError


@dataclass(frozen=True)
class LogprobGap:
    """Absolute differences of two models' log probabilities, over the chosen tokens of all batches.

    Attributes:
        mean: their mean.
        quantile: the smallest that 99.9 % of them do not exceed.
        largest: the largest.
        tokens: how many tokens were compared.
    """

    mean: float
    quantile: float
    largest: float
    tokens: int

    def __str__(self) -> str:
        return (
            f"log probabilities of {self.tokens:,} tokens: {self.mean:.3g} apart on average, at most "
            f"{self.quantile:.3g} for 99.9 % of them, at most {self.largest:.3g} for all"
        )


# The loss of a model's output, whose gradient is measured.

LossFunction = Callable[[Any, Any], torch.Tensor]
Inputs = Callable[[Any], Any]


def loss_of(output: Any, batch: Any, loss_fn: LossFunction | None) -> torch.Tensor:
    """Return the loss of a model's output.

    Raises:
        SensitivityError: it is no single number, or does not depend on anything that requires a gradient; or
            ``loss_fn`` does not take the output and the batch.
    """
    loss: Any = _own_loss(output) if loss_fn is None else _called(loss_fn, output, batch)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        kind = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        asks = "give loss_fn(output, batch), which" if loss_fn is None else "loss_fn"
        raise SensitivityError(f"the loss is {kind}: {asks} returns one number, as a tensor.")
    if not loss.requires_grad:
        raise SensitivityError(
            "the loss does not depend on anything that requires a gradient: compute it from the output without detach "
            "and no_grad."
        )
    return loss.float().reshape(())


def _called(loss_fn: LossFunction, output: Any, batch: Any) -> Any:
    try:
        return loss_fn(output, batch)
    except (TypeError, AttributeError) as error:
        kind = f"a {type(batch).__name__}{f' of {len(batch)}' if isinstance(batch, (tuple, list, Mapping)) else ''}"
        raise SensitivityError(
            f"loss_fn(output, batch) raised {type(error).__name__}: {error}. It takes the model's output and the whole "
            f"batch, here {kind}: lambda output, batch: cross_entropy(output, batch[1]), for example."
        ) from error


def _own_loss(output: Any) -> Any:
    if isinstance(output, Mapping) and "loss" in output:
        return cast("Mapping[str, Any]", output)["loss"]
    return cast("tuple[Any, ...]", output)[0] if isinstance(output, tuple) and output else output


IGNORED = -100  # a token that does not count, as in torch's cross entropy
_QUANTILE = 0.999

Model = Callable[..., Any]


def logprob_gap(
    a: Model,
    b: Model,
    batches: Iterable[Any],
    *,
    chosen: Callable[[Any], torch.Tensor] | None = None,
) -> LogprobGap:
    """Run two models on the same batches, and compare the log probabilities that they give the chosen tokens.

    For a trainer and a server of the same policy, which must agree; they may be plain and converted models in any
    mixture. Both run without gradients, in the modes that they are in, and with the same random numbers, whose state is
    restored. Log probabilities are computed in float32. Logits are freed with their batch; four bytes a token are kept.

    Args:
        a: a model, or another function, that returns logits of shape (..., tokens, vocabulary) of any floating-point
            dtype: a tensor, or an object or mapping with ``logits``.
        b: another one, whose logits have the same shape.
        batches: each is the input of one call of both: a tensor; a tuple or list of positional arguments; a mapping of
            keyword arguments; or a pair of a tuple and a mapping, for both. The iterable is read once.
        chosen: a function from a batch to its chosen tokens: an integer tensor of the logits' shape without the
            vocabulary, in which -100 does not count. By default the tokens of ``labels``, or else of ``input_ids``, or
            of the only integer input, each chosen by the logits before it; those that ``attention_mask`` hides do not
            count. Labels of an encoder-decoder model are chosen by the logits at their own place.

    Raises:
        TypeError: ``batches`` is a single batch; a model returns no logits; or ``chosen`` no integer tensor.
        ValueError: there are no batches; no tokens, or tokens of another shape, beyond the vocabulary, or none that
            counts; logits of two shapes; or a log probability is NaN.
        UnsupportedError: a model is TorchScript, or holds a module that is.
    """
    for model in (a, b):
        if isinstance(model, nn.Module):
            refuse_scripted(model)
    gaps = [_of_batch(a, b, batch, chosen, f"batch {number}") for number, batch in enumerate(batches_of(batches), 1)]
    if not gaps:
        raise ArgumentError("there are no batches to compare the models on. An iterator can be read only once.")
    every = torch.cat(gaps).sort().values
    if not len(every):
        raise ArgumentError("no token of the batches counts: all are -100, or hidden by attention_mask.")
    place_of_quantile = math.ceil(_QUANTILE * len(every)) - 1
    return LogprobGap(
        mean=float(every.double().mean()),
        quantile=float(every[place_of_quantile]),
        largest=float(every[-1]),
        tokens=len(every),
    )


def _of_batch(a: Model, b: Model, batch: Any, chosen: Callable[[Any], torch.Tensor] | None, place: str) -> torch.Tensor:
    args, kwargs = arguments_of(batch)
    first, second = _logits_of(a, b, args, kwargs, place)
    if chosen is not None:
        tokens = chosen(batch)
        if not _is_integer(tokens):
            raise ArgumentTypeError(f"{place}: chosen returns an integer tensor, not {_kind(tokens)}.")
        return _gaps(first, second, tokens, place)
    return _gaps(*_tokens_of(a, args, kwargs, first, second, place), place)


def _logits_of(
    a: Model, b: Model, args: tuple[Any, ...], kwargs: Mapping[str, Any], place: str
) -> tuple[torch.Tensor, torch.Tensor]:
    pair: list[torch.Tensor] = []
    for name, model in (("a", a), ("b", b)):
        with isolated(*([model] if isinstance(model, nn.Module) else ())), torch.no_grad():
            given = model(*args, **kwargs)
        logits: object = given.get("logits") if isinstance(given, Mapping) else getattr(given, "logits", given)
        if not isinstance(logits, torch.Tensor) or not logits.is_floating_point() or logits.ndim < 2:
            raise ArgumentTypeError(
                f"{place}: {name} returns no logits but {_kind(given)}: return a tensor of shape (..., tokens, "
                "vocabulary), or an object or a mapping with 'logits'."
            )
        pair.append(logits)
    first, second = pair
    if first.shape != second.shape:
        raise ArgumentError(f"{place}: a gives logits of shape {tuple(first.shape)}, and b of {tuple(second.shape)}.")
    return first, second


def _tokens_of(
    model: Model,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    first: torch.Tensor,
    second: torch.Tensor,
    place: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the logits of both models that chose tokens of a call, and these tokens."""
    named = _named(model, args, kwargs)
    integers = {id(t): t for t in pytree.tree_leaves((args, dict(kwargs))) if _is_integer(t)}
    token_ids = next((named[name] for name in ("labels", "input_ids") if _is_integer(named.get(name))), None)
    if token_ids is None and len(integers) == 1:
        (token_ids,) = integers.values()
    if token_ids is None:
        raise ArgumentError(
            f"{place}: no labels, no input_ids, and {len(integers)} integer inputs: give chosen=, a function from a "
            "batch to its chosen tokens."
        )
    tokens = cast("torch.Tensor", token_ids)
    config: object = getattr(model, "config", None)
    if token_ids is named.get("labels") and getattr(config, "is_encoder_decoder", False):
        return first, second, tokens
    mask = named.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.shape == tokens.shape:
        tokens = tokens.masked_fill(mask == 0, IGNORED)
    return first[..., :-1, :], second[..., :-1, :], tokens[..., 1:]


def _named(model: Model, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of a call by name, as far as the names are known."""
    try:
        return dict(inspect.signature(getattr(model, "forward", model)).bind(*args, **kwargs).arguments) | dict(kwargs)
    except (TypeError, ValueError):  # a signature that says nothing
        return dict(kwargs)


def _gaps(first: torch.Tensor, second: torch.Tensor, tokens: torch.Tensor, place: str) -> torch.Tensor:
    if tokens.shape != first.shape[:-1]:
        raise ArgumentError(
            f"{place}: the chosen tokens have shape {tuple(tokens.shape)}, and the logits that choose them "
            f"{tuple(first.shape)}: these want tokens of shape {tuple(first.shape[:-1])}."
        )
    counts = tokens != IGNORED
    picked, vocabulary = tokens[counts], first.shape[-1]
    if len(picked) and not 0 <= int(picked.min()) <= int(picked.max()) < vocabulary:
        wrong = next(t for t in picked.tolist() if not 0 <= t < vocabulary)
        raise ArgumentError(f"{place}: token {wrong} is not in the vocabulary of {vocabulary} logits.")
    ours, theirs = (_log_probabilities(logits[counts.to(logits.device)], picked) for logits in (first, second))
    gaps = torch.where(ours == theirs, 0.0, (ours - theirs).abs())  # both may be -inf
    if gaps.isnan().any():
        names = " and ".join(name for name, logarithms in (("a", ours), ("b", theirs)) if logarithms.isnan().any())
        raise ArgumentError(f"{place}: log probabilities of {names} are NaN. find_overflow names where NaN begins.")
    return gaps


def _log_probabilities(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    logarithms = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    return logarithms.gather(-1, tokens.to(logits.device)[:, None].long())[:, 0].cpu()


def _is_integer(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or value.dtype == torch.bool:
        return False
    return not value.is_floating_point() and not value.is_complex()


def _kind(value: object) -> str:
    return f"a tensor of {sized(value)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
