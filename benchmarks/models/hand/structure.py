"""Cases with every form of call and output, recurrent layers, Python control flow, and losses in the model."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models.hand.case import WIDTH, case, linears, rows


def nested_outputs(self: Any, x: Tensor) -> dict[str, Any]:
    y = self.a(x)
    return {"hidden": (y, [self.b(y), {"deep": y.sum(-1)}]), "none": None, "same": x}


def nested_inputs(self: Any, given: dict[str, Any], scale: float = 1.0) -> Tensor:
    return self.a(given["first"]) + self.b(given["others"][0]) * scale


def missing_argument(self: Any, x: Tensor, bias: Tensor | None = None, *, extra: Tensor | None = None) -> Tensor:
    y = self.a(x) if bias is None else self.a(x) + bias
    return self.b(y) if extra is None else self.b(y * extra)


def zero_dimensional(self: Any, x: Tensor, temperature: Tensor) -> Tensor:
    return self.b(self.a(x) / temperature) * self.gain


def several_outputs(self: Any, x: Tensor) -> tuple[Tensor, ...]:
    y = self.a(x)
    first, second = y.split([4, WIDTH - 4], -1)
    largest, at = y.max(-1)
    top, _ = y.topk(3, -1)
    spread, mean = torch.var_mean(y, -1)
    return (first, *second.chunk(2, -1), largest, at, top, spread, mean, y.sort(-1).values, *y.unbind(-1)[:2])


def loop_over_length(self: Any, x: Tensor) -> Tensor:
    state = torch.zeros(x.shape[0], WIDTH)
    for step in range(x.shape[1]):
        state = torch.tanh(self.a(x[:, step]) + self.b(state))
    return state


def gru_cells(self: Any, x: Tensor) -> Tensor:
    state, states = torch.zeros(x.shape[0], WIDTH), []
    for step in x.unbind(1):
        state = self.cell(step, state)
        states.append(state)
    return torch.stack(states, 1)


def lstm(self: Any, x: Tensor) -> Any:
    return self.layer(x)


def gru(self: Any, x: Tensor) -> Any:
    return self.layer(x)


def branch_on_shape(self: Any, x: Tensor) -> Tensor:
    return self.b(self.a(x)) if x.shape[1] > 20 else self.b(x) * 2


def branch_on_mode(self: Any, x: Tensor) -> Tensor:
    return self.b(self.a(x)) if self.training else self.b(x.exp())


def branch_by_cond(self: Any, x: Tensor) -> Tensor:
    return self.b(torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y * 2, (self.a(x),)))


def branch_on_value(self: Any, x: Tensor) -> Tensor:
    return self.a(x) if x.sum() > 0 else self.b(x)


def loop_on_value(self: Any, x: Tensor) -> Tensor:
    while x.norm().item() > 1:
        x = self.a(x) * 0.1
    return self.b(x)


def classified(self: Any, x: Tensor) -> dict[str, Tensor]:
    logits = self.a(x)
    labels = torch.arange(x.shape[1]).expand(x.shape[0], -1) % WIDTH
    labels = labels.masked_fill(labels == 3, -100)
    return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1), "logits": logits}


def several_losses(self: Any, x: Tensor) -> tuple[Tensor, ...]:
    y, z = self.a(x), self.b(x)
    squared, robust = F.mse_loss(300 * y, 300 * x) / 1e5, F.smooth_l1_loss(y, x) + F.huber_loss(y, x)
    divergence = F.kl_div(y.log_softmax(-1), z.log_softmax(-1), reduction="batchmean", log_target=True)
    return squared, robust, divergence, F.binary_cross_entropy_with_logits(y, (x > 0).float())


def contrasted(self: Any, x: Tensor) -> Tensor:
    a, b = (F.normalize(layer(x).mean(1), dim=-1) for layer in (self.a, self.b))
    return F.cross_entropy(a @ b.mT * self.temperature.exp(), torch.arange(x.shape[0]))


def shared_twice(self: Any, x: Tensor) -> Tensor:
    for _ in range(4):
        x = x + self.a(F.silu(self.b(x)))
    return x


def _nested(batch: int, size: int) -> dict[str, Any]:
    x = rows(batch, size)["x"]
    return {"given": {"first": x, "others": [x * 2, None]}, "scale": 0.5}


def _some(batch: int, size: int) -> dict[str, Any]:
    return {**rows(batch, size), "bias": None, "extra": torch.full((WIDTH,), 0.5)}


def _tempered(batch: int, size: int) -> dict[str, Any]:
    return {**rows(batch, size), "temperature": torch.tensor(0.07)}


DATA_DEPENDENT = "control flow depends on tensor values"
_PLAIN = (nested_outputs, several_outputs, loop_over_length, branch_on_shape, branch_on_mode, branch_by_cond)
CASES = (
    *(case(f) for f in (*_PLAIN, classified, several_losses, shared_twice)),
    case(nested_inputs, inputs=_nested),
    case(missing_argument, inputs=_some),
    case(zero_dimensional, linears("a", "b", gain=lambda: nn.Parameter(torch.tensor(0.3))), _tempered),
    case(gru_cells, linears(cell=partial(nn.GRUCell, WIDTH, WIDTH))),
    case(lstm, linears(layer=partial(nn.LSTM, WIDTH, 8, 2, batch_first=True, bidirectional=True))),
    case(gru, linears(layer=partial(nn.GRU, WIDTH, 8, batch_first=True))),
    case(contrasted, linears("a", "b", temperature=lambda: nn.Parameter(torch.tensor(2.6)))),
    case(branch_on_value, refused=DATA_DEPENDENT),
    case(loop_on_value, refused=DATA_DEPENDENT),
)
