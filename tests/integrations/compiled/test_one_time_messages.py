"""A message that is given once does not break the graph, and is given."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._dynamo.variables.misc import AutogradFunctionVariable, LoggingLoggerVariable

from autocastfx import CompileBackend
from autocastfx.integrations.compiled import MENDED

# transformers gives all loggers ``warning_once`` and ``info_once``.
LOGGER: Any = logging.getLogger(__name__)


class Speaking(nn.Module):
    """Says ``said(x)`` between two layers."""

    def __init__(self, said: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.said = said

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.said(x)
        return self.second(x)


class Counting(logging.Logger):
    """A logger with a method that has a cache and gives a number."""

    @lru_cache  # noqa: B019
    def length(self, text: str) -> int:
        """Return the length of the text."""
        return len(text)


COUNTING = Counting("counting")


@pytest.fixture
def messages() -> Iterator[list[str]]:
    """The texts that the logger gives."""
    given: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: given.append(record.getMessage())
    LOGGER.addHandler(handler)
    yield given
    LOGGER.removeHandler(handler)


def _graphs(said: Callable[[Tensor], object]) -> int:
    """Run a compiled model twice, and count its graphs."""
    torch.compiler.reset()
    backend = CompileBackend(dtype=torch.bfloat16, inner="eager")
    model = backend.compile(Speaking(said))
    with torch.no_grad():
        for _ in range(2):
            model(torch.ones(2, 8))
    return len(backend.graphs)


def test_a_message_given_once_is_given_and_does_not_break_the_graph(messages: list[str]) -> None:
    """Its text may be put together from constants, and have arguments."""
    assert _graphs(lambda x: LOGGER.warning_once(f"first of {x.shape[1]}: %s", "here")) == 1
    assert messages == ["first of 8: here"]


def test_it_is_not_given_again_if_it_was(messages: list[str]) -> None:
    """The cache is the logger's own."""
    LOGGER.warning_once("second")
    assert _graphs(lambda _: LOGGER.warning_once("second")) == 1
    assert messages == ["second"]


def test_a_message_that_dynamo_is_told_to_leave_out_is_not_given(messages: list[str]) -> None:
    """The setting is torch's own."""
    with torch._dynamo.config.patch(ignore_logging_functions={LOGGER.warning_once}):
        assert _graphs(lambda _: LOGGER.warning_once("third")) == 1
    assert messages == []


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")  # what the logger itself calls
@pytest.mark.parametrize(
    ("said", "given"),
    [
        (lambda _: LOGGER.warning("each time"), ["each time"] * 2),
        (lambda x: LOGGER.warning_once("size %s", x.new_ones(1)), ["size tensor([1.])"] * 2),
        (lambda _: COUNTING.length("four"), []),
    ],
    ids=["no cache", "no constant", "a result"],
)
def test_any_other_call_breaks_the_graph(
    said: Callable[[Tensor], object], given: list[str], messages: list[str]
) -> None:
    """A message that is given at each call stays so."""
    assert _graphs(said) > 1
    assert messages == given


def test_dynamo_has_its_own_method_back_after_a_failure() -> None:
    """Plain torch.compile breaks the graph as ever."""
    before = LoggingLoggerVariable.call_method
    with MENDED:
        assert LoggingLoggerVariable.call_method is not before
    with pytest.raises(KeyError), MENDED:
        raise KeyError
    assert LoggingLoggerVariable.call_method is before


def test_it_holds_until_the_last_call_has_ended() -> None:
    """Calls overlap in threads, in any order, and stand in calls."""

    def methods() -> tuple[object, object]:
        return LoggingLoggerVariable.call_method, AutogradFunctionVariable.call_apply

    own = methods()
    MENDED.__enter__()
    mended = methods()
    MENDED.__enter__()
    MENDED.__exit__(None, None, None)
    assert methods() == mended
    MENDED.__exit__(None, None, None)
    assert methods() == own
    assert not {*own} & {*mended}


def test_gpt2_with_labels_is_one_graph() -> None:
    """Its configuration has no loss_type, of which transformers warns once between the logits and the loss."""
    torch.compiler.reset()
    sizes: dict[str, Any] = {"vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8}
    special: dict[str, Any] = {"use_cache": False, "bos_token_id": 1, "eos_token_id": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **special))
    backend = CompileBackend(dtype=torch.bfloat16, inner="eager")
    ids = torch.arange(8)[None]
    backend.compile(model)(input_ids=ids, labels=ids)
    assert len(backend.graphs) == 1
