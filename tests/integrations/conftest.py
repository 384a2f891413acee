"""Dynamo without what other tests have compiled."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        # Dynamo reads deprecated attributes of modules while it guards them
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
        # and ``grad`` of results, from which it hides its own warning, unless warnings are errors
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
        yield
    torch._dynamo.reset()
