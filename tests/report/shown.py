"""Converted models with the pages that show them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autocastfx
from autocastfx.report.packed import OWN
from autocastfx.runtime.amp_module import AmpModule
from benchmarks.models.tiny import EncoderLayer


@dataclass(frozen=True)
class Shown:
    """A model and the page that shows it."""

    amp_model: autocastfx.AmpModule
    path: Path


def as_written(model: nn.Module, ids: torch.Tensor) -> autocastfx.AmpModule:
    """Converted with nothing recomposed: more nodes."""
    return autocastfx.convert(model, (ids,), dtype=torch.bfloat16, recompose=False)


def in_both_modes(amp_model: autocastfx.AmpModule, *inputs: torch.Tensor) -> autocastfx.AmpModule:
    """The model with a graph of the other mode too, in the mode in which it was."""
    mode = amp_model.training
    amp_model.train(not mode)(*inputs)
    return amp_model.train(mode)


def with_symbols(
    model: nn.Module, first: tuple[torch.Tensor, ...], second: tuple[torch.Tensor, ...], dtype: str
) -> autocastfx.AmpModule:
    """Converted for calls of two sizes, with the graph of the second call alone: sizes that differed are symbols."""
    amp_model = autocastfx.convert(model, first, dtype=dtype)
    amp_model(*second)
    assert isinstance(amp_model, AmpModule)
    return amp_model._converted_by(amp_model._converter, amp_model._captures.graphs[-1:], None)


def encoder_layer_with_symbols() -> autocastfx.AmpModule:
    """The case of this name, for batches of two and of three."""
    calls = [(torch.randn(n, 9, 16), torch.zeros(n, 1, 9, 9)) for n in (2, 3)]
    return with_symbols(EncoderLayer(), *calls, dtype="float16")


def filled(value: Any, node: Mapping[str, Any]) -> Any:
    if isinstance(value, str):
        for key, sign in OWN.items():
            value = value.replace(sign, str(node.get(key, "")))
        return value
    if isinstance(value, list):
        return [filled(one, node) for one in value]
    return {k: filled(v, node) for k, v in value.items()} if isinstance(value, dict) else value


def unpacked(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """As ``packed.js`` does."""
    nodes: list[dict[str, Any]] = [{} for _ in range(data["count"])]
    for own in (True, False):
        for key, column in data["columns"].items():
            for node, number in zip(nodes, column["at"].split(" "), strict=True) if (key in OWN) is own else ():
                if number:
                    value = column["of"][int(number)]
                    node[key] = value if own else filled(value, node)
    return nodes


def nodes_in(page: str) -> list[dict[str, Any]]:
    """The nodes of all graphs of a page, from its text."""
    read = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    return [node for variant in read["variants"] for node in unpacked(variant["nodes"])]
