"""Time compiled training steps of blocks of Llama whose linear layers run in float8, beside bfloat16."""

from __future__ import annotations

import copy
import importlib.util
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import autocastfx
from benchmarks.gpu.measure import Work, failure, interleaved, kernels, release, settle, timed
from benchmarks.gpu.stage import ROUNDS, Given, Rounds, Row
from benchmarks.judge import distance

BFLOAT16, TORCHAO = "bfloat16", "torchao rowwise"
# The op lists of the converted sides. Those after the preset take every product that the recipe has.
LISTS: Mapping[str, tuple[Any, ...]] = {
    BFLOAT16: ("bfloat16",),
    "float8 preset": ("float8",),
    **{
        f"float8 {recipe}": ("bfloat16", autocastfx.OpList.of({"float8": [{"ops": ["linear"], "recipe": recipe}]}))
        for recipe in ("rowwise", "tensorwise", "rowwise_gw_hp")
    },
}
SIDES = (*LISTS, TORCHAO)
# Hidden size, that between the two products of the MLP, and layers; heads of 128, 4 queries to a key.
BLOCKS: Mapping[str, tuple[int, int, int]] = {
    "Llama-1B blocks": (2048, 8192, 4),
    "Llama-8B blocks": (4096, 14_336, 2),
    "blocks tiny": (64, 128, 1),
}


class Blocks(nn.Module):
    """Blocks alone: what comes before and after them is not in float8."""

    def __init__(self, width: int, between: int, layers: int) -> None:
        super().__init__()
        heads = max(width // 128, 4)
        sizes: dict[str, Any] = {"hidden_size": width, "intermediate_size": between, "num_hidden_layers": layers}
        heads_of: dict[str, Any] = {"num_attention_heads": heads, "num_key_value_heads": heads // 4, "vocab_size": 16}
        self.model = transformers.LlamaModel(transformers.LlamaConfig(**sizes, **heads_of, use_cache=False))

    def forward(self, x: Tensor) -> Tensor:
        """Return a loss of the hidden states that come of ``x``, float32 of [batch, tokens, width]."""
        hidden = self.model(inputs_embeds=x).last_hidden_state
        return (hidden.float() * x.roll(1, -1)).mean()  # of their squares the last norm would leave no gradient


def blocks(
    given: Given,
    shapes: Sequence[str],
    sides: Sequence[str] = SIDES,
    tokens: int = 8192,
    rounds: Rounds = ROUNDS,
    compiler: str = "inductor",
) -> Iterator[Row]:
    """Yield the time of forward and backward of each side, and its gradient's distance from that of float32.

    Args:
        given: what every stage is given.
        shapes: keys of ``BLOCKS``.
        sides: keys of ``LISTS``, or torchao's, which is left out where that is not installed.
        tokens: in the batch; a row has at most 4,096.
        rounds: how many, for each shape.
        compiler: a backend of torch.compile.
    """
    warnings.simplefilter("ignore")
    sides = [side for side in sides if side != TORCHAO or importlib.util.find_spec("torchao") is not None]
    for name in shapes:
        if all(given.has(name, side) for side in sides):
            continue
        torch.manual_seed(0)
        with torch.device(given.device):
            model = Blocks(*BLOCKS[name]).train()
            x = torch.randn(max(tokens // 4096, 1), min(tokens, 4096), BLOCKS[name][0])
        work, rows = dict[str, Work](), dict[str, Row]()
        exact = _gradients(model, partial(model, x))
        for side in sides:
            started = time.monotonic()
            try:
                step, of_products = _step(side, model, x, compiler)
                far = distance(_gradients(model, step), exact)
                work[side] = Work({"backward": lambda step=step: step().backward()}, model.zero_grad)
                rows[side] = {"apart": far, "prepared_s": round(time.monotonic() - started, 1), **of_products}
            except Exception as error:  # of this side; the others are measured
                yield {"model": name, "side": side, "error": failure(error)}
            release()
        settle()
        given.wait()
        for times in interleaved(work, rounds, given.device):
            for side, row in timed(times, rounds, BFLOAT16, BFLOAT16).items():
                yield {"model": name, "side": side, **rows[side], **row}
        for side, one in work.items() if given.device == "cuda" else ():
            found = kernels(one.parts["backward"])
            yield {"model": f"{name}, kernels", "side": side, **found}
        work.clear()
        release()


def _step(side: str, model: Blocks, x: Tensor, compiler: str) -> tuple[Callable[[], Tensor], Row]:
    """Return what computes the loss, compiled, and how many products of how many run in float8."""
    if side == TORCHAO:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name("rowwise")
        twin = convert_to_float8_training(copy.deepcopy(model), config=config)
        for path, parameter in model.named_parameters():  # gradients come where those of the other sides do
            parent, _, name = path.rpartition(".")
            setattr(twin.get_submodule(parent), name, parameter)
        compiled: Any = torch.compile(twin, backend=compiler)

        def of_torchao() -> Tensor:
            with torch.autocast(x.device.type, torch.bfloat16):
                return compiled(x)

        return of_torchao, {}
    amp_model = autocastfx.convert(model, x, dtype="bfloat16", op_list=LISTS[side], check=False)
    decided = [node.float8 for node in amp_model.plan.nodes if node.float8 is not None]
    counted = {"in_float8": sum(len(one.products) for one in decided), "of": 3 * len(decided)}
    compiled = torch.compile(amp_model, backend=compiler)
    return lambda: compiled(x), counted


def _gradients(model: nn.Module, step: Callable[[], Tensor]) -> Tensor:
    model.zero_grad()
    step().backward()
    found = torch.cat([p.grad.detach().flatten().float() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return found
