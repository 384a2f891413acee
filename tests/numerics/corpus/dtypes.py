"""Dtypes that the model writes: the result has them, and the work is done in them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.numerics.corpus.case import Case, Demand
from tests.numerics.corpus.parts import rows

__all__ = ["CASES"]

WIDTH = 16


class Encoded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)


class DoubleSum(Encoded):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encode(x)
        return z.sum(dtype=torch.float64), z.mean(0, dtype=torch.float64)


class LowSum(Encoded):
    """A sum that the model itself makes bfloat16."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encode(x)
        return z.sum(-1, dtype=torch.bfloat16), self.out(z)


class DoubleSoftmax(Encoded):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encode(x)
        return F.softmax(z, -1, dtype=torch.float64), F.log_softmax(z, -1, dtype=torch.float64)


class FloatSoftmax(Encoded):
    """Attention weights in float32 that return to the type of the values."""

    def forward(self, x: Tensor) -> Tensor:
        z = self.encode(x)
        weight = F.softmax(z @ z.T / 4, dim=-1, dtype=torch.float32).to(z.dtype)
        return self.out(weight @ z)


class DoubleProduct(Encoded):
    """A product of all values, and a running one, in float64."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.products(self.encode(x))

    def products(self, z: Tensor) -> tuple[Tensor, Tensor]:
        z = z.tanh() * 0.1 + 1
        return z.prod(-1, dtype=torch.float64), z.cumsum(-1, dtype=torch.float64)


class DoubleHead(Encoded):
    """A head that computes in float64, and comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("basis", torch.randn(WIDTH, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encode(x)
        wide = z.double() @ self.basis
        return wide, self.out(wide.to(torch.float32))


class HalfOutput(Encoded):
    """A result that the model itself makes float16."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encode(x)
        return z.to(torch.float16), self.out(z)


class MaskedMinimum(Encoded):
    """The smallest number of the type that the model sees."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        z = self.encode(x)
        return z.masked_fill(~keep, torch.finfo(z.dtype).min).softmax(-1)


class TypeOfOther(Encoded):
    """Sums in the type of a float64 argument."""

    def forward(self, x: Tensor, start: Tensor) -> Tensor:
        return start + self.encode(x).type_as(start).sum(-1)


class ComplexFilter(Encoded):
    """A spectral filter with complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, 2))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x) * torch.view_as_complex(self.filter)
        return self.out(torch.fft.irfft(spectrum, n=WIDTH))


def _kept(size: int) -> tuple[Tensor, Tensor]:
    keep = torch.rand(size, WIDTH) < 0.7
    keep[:, 0] = True
    return torch.randn(size, WIDTH), keep


POINT = "dtypes"
ENCODED = "encode 3; the rest is exact"
CASES = (
    Case("double-sums", DoubleSum, rows(WIDTH), POINT, Demand(3, 2.0), "encode 3; sums cancel to a half"),
    Case("low-sum", LowSum, rows(WIDTH), POINT, Demand(5), "encode 3, out 2", exact=False,
         tensors={"output 0": Demand(8 + 4)}),
    Case("double-softmax", DoubleSoftmax, rows(WIDTH), POINT, Demand(3), ENCODED),
    Case("float-softmax", FloatSoftmax, rows(WIDTH), POINT, Demand(11, 2.0),
         "encode 3, scores 2, scaling 1, softmax 1, product 2, out 2"),
    Case("double-products", DoubleProduct, rows(WIDTH), POINT, Demand(3, 0.4, 1.0),
         "encode 3, a tenth of each factor; 16 such errors add up to four", ("products",)),
    Case("double-head", DoubleHead, rows(WIDTH), POINT, Demand(6), "encode 3, out 3"),
    Case("half-output", HalfOutput, rows(WIDTH), POINT, Demand(5), "encode 3, out 2", tensors={"output 0": Demand(4)},
         exact=False),
    Case("masked-minimum", MaskedMinimum, _kept, POINT, Demand(4), "encode 3, softmax 1"),
    Case("type-of-other", TypeOfOther, lambda n: (torch.randn(n, WIDTH), 1000 + torch.rand(n, dtype=torch.float64)),
         POINT,
         Demand(3, 1e-2, 1.0), "encode 3, beside a thousand"),
    Case("complex-filter", ComplexFilter, rows(WIDTH), POINT, Demand(3), "out 3; the filter is exact"),
)  # fmt: skip
