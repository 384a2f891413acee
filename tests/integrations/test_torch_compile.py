"""The backend that torch.compile knows by name."""

from __future__ import annotations

import pytest
import torch

import autocastfx
from autocastfx.report.compiled_graph import CompiledGraph
from tests.integrations.backend.test_compile_backend import Layers, Tied, tokens

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


LOW = torch.bfloat16


def test_it_has_a_name_and_takes_its_arguments_as_options() -> None:
    model, x, seen = Layers().eval(), torch.randn(3, 8), list[CompiledGraph]()
    options = {"dtype": LOW, "inner": "eager", "report": seen.append}
    found = torch.compile(model, backend="autocastfx", options=options)(x)[0]
    assert torch.equal(found, autocastfx.convert(model, (x,), dtype=LOW)(x)[0])
    assert len(seen) == 1
    with pytest.raises(Exception, match="unexpected keyword argument 'dtpye'"):
        torch.compile(Tied(), backend="autocastfx", options={"dtpye": LOW})(*tokens())
