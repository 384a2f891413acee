"""Rewrite the model's calls of torch functions during a capture, each by the rule for its function."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autocastfx.capture.failure import TooSlowError

__all__ = ["CallRules", "Rule"]

Rule = Callable[..., Any]  # takes the arguments of the call, and gives its result


class CallRules(TorchFunctionMode):
    """While open, a call of a function that has a rule is a call of the rule; other calls are as they were.

    One mode for all rules, because each call of torch in the model passes through each mode.

    Raises:
        TooSlowError: this thread has worked for more than ``seconds`` since this was made.
    """

    def __init__(self, rules: Mapping[Any, Rule], seconds: float) -> None:
        super().__init__()
        self.rules, self.end = rules, time.thread_time() + seconds

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():  # it traces the bodies of cond and while_loop, and modes with them
            return func(*args, **kwargs)
        if time.thread_time() > self.end:
            raise TooSlowError("capturing every size as dynamic takes too long")
        return self.rules.get(func, func)(*args, **kwargs)
