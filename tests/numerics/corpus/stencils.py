"""Derivatives as differences of neighbours, which are small beside both: physics, edges, smooth deformations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.numerics.corpus.case import Case, Demand
from tests.numerics.corpus.parts import Compared, mlp, pictures

__all__ = ["CASES"]

SIDE = 16

# ---- of pictures ----------------------------------------------------------------------------------------------------


def laplacian(model: Compared, p: Tensor, y: Tensor) -> Tensor:
    return (F.conv2d(p.sigmoid(), model.laplacian) - F.conv2d(y, model.laplacian)).square().mean()


def laplacian_of_sum(model: Compared, p: Tensor, y: Tensor) -> Tensor:
    return F.conv2d(p.tanh() + y, model.laplacian.repeat(1, 1, 1, 1), padding=1)[..., 1:-1, 1:-1].square().mean()


def sobel(model: Compared, p: Tensor, y: Tensor) -> Tensor:
    kernels = torch.cat([model.sobel, model.sobel.mT])
    return (F.conv2d(p.tanh(), kernels) - F.conv2d(y, kernels)).square().mean()


def gradient_similarity(model: Compared, p: Tensor, y: Tensor) -> Tensor:
    """GMSD: the deviation of how alike the magnitudes of gradients are."""
    kernels = torch.cat([model.sobel, model.sobel.mT]) / 4
    a = (F.conv2d(p, kernels).square().sum(1) + 1e-6).sqrt()
    b = (F.conv2d(y, kernels).square().sum(1) + 1e-6).sqrt()
    alike = (2 * a * b + 0.0026) / (a * a + b * b + 0.0026)
    return (alike - alike.mean((1, 2), keepdim=True)).square().mean((1, 2)).sqrt().mean()


def made_kernel(model: Compared, p: Tensor, y: Tensor) -> Tensor:
    """High-pass weights that forward makes."""
    kernel = torch.full((1, 1, 3, 3), -1.0)
    kernel[..., 1, 1] = 8.0
    return (F.conv2d(p, kernel) - F.conv2d(y, kernel)).abs().mean()


def pyramid(model: Compared, p: Tensor, y: Tensor) -> Tensor:
    """A Laplacian pyramid: what a blur takes away, at two resolutions."""
    loss = torch.zeros(())
    for _ in range(2):
        d = p - F.conv2d(F.pad(p, (3, 3, 3, 3), "reflect"), model.window)
        e = y - F.conv2d(F.pad(y, (3, 3, 3, 3), "reflect"), model.window)
        loss = loss + (d - e).abs().mean()
        p, y = F.avg_pool2d(p, 2), F.avg_pool2d(y, 2)
    return loss


def sharpened(model: Compared, p: Tensor, y: Tensor) -> Tensor:
    """An unsharp mask."""
    blurred = F.conv2d(p, model.window, padding=3)
    return ((p + 2 * (p - blurred)) - y)[..., 3:-3, 3:-3].square().mean()


def variation(model: Compared, p: Tensor, y: Tensor) -> Tensor:
    down, right = p[..., 1:, :] - p[..., :-1, :], p[..., :, 1:] - p[..., :, :-1]
    return torch.sqrt(down[..., :-1] ** 2 + right[..., :-1, :] ** 2 + 1e-6).sum((1, 2, 3)).mean()


def edge_aware(model: Compared, p: Tensor, y: Tensor) -> Tensor:
    """Monodepth's smooth disparities: second differences of what a mean divides, weighted by the picture's edges."""
    d = p / (p.mean((2, 3), keepdim=True) + 1e-7)
    dx = d[..., :-1] - d[..., 1:]
    dxx = dx[..., :-1] - dx[..., 1:]
    return (dxx.abs() * torch.exp(-(y[..., 1:-1] - y[..., 2:]).abs())).mean()


def difference_matrix(model: Compared, p: Tensor, y: Tensor) -> Tensor:
    p = p.sigmoid()
    return (model.steps @ p).square().mean() + (p @ model.steps.mT).square().mean()


def heat(model: Compared, p: Tensor, y: Tensor) -> Tensor:
    """The residual of a heat equation after one step."""
    u = p.tanh()
    return (u[..., 1:-1, 1:-1] - y[..., 1:-1, 1:-1] - 0.1 * F.conv2d(u, model.laplacian)).square().mean()


# ---- of fields that a network gives ----------------------------------------------------------------------------------


class Field(nn.Module):
    """A smooth field on a grid, from a network of the places.

    Args:
        residual: the loss, from the field as (batch, channels, side, side).
        channels: components of the field.
    """

    def __init__(self, residual: Callable[[Tensor], Tensor], channels: int = 1) -> None:
        super().__init__()
        self.net, self.of = mlp(2, 16, channels), residual
        nn.init.uniform_(self.net[0].weight, -3, 3)

    def residual(self, u: Tensor) -> Tensor:
        return self.of(u)

    def forward(self, places: Tensor) -> Tensor:
        return self.residual(self.net(places).movedim(-1, 1))


STEP = 2.0 / SIDE


def burgers(u: Tensor) -> Tensor:
    """u_t + u u_x = v u_xx, time along rows."""
    first, second = torch.tensor([-1.0, 0.0, 1.0]) / (2 * STEP), torch.tensor([1.0, -2.0, 1.0]) / STEP**2
    ut = F.conv2d(u, first.view(1, 1, 3, 1))[..., 1:-1]
    ux = F.conv2d(u, first.view(1, 1, 1, 3))[..., 1:-1, :]
    uxx = F.conv2d(u, second.view(1, 1, 1, 3))[..., 1:-1, :]
    return (ut + u[..., 1:-1, 1:-1] * ux - 0.05 * uxx).square().mean()


def wave(u: Tensor) -> Tensor:
    """Second differences by slices, in time and in space."""
    utt = (u[..., 2:, 1:-1] - 2 * u[..., 1:-1, 1:-1] + u[..., :-2, 1:-1]) / STEP**2
    uxx = (u[..., 1:-1, 2:] - 2 * u[..., 1:-1, 1:-1] + u[..., 1:-1, :-2]) / STEP**2
    return (utt - 0.5 * uxx).square().mean()


def poisson(u: Tensor) -> Tensor:
    """Five points by rolls."""
    around = u.roll(1, 2) + u.roll(-1, 2) + u.roll(1, 3) + u.roll(-1, 3)
    return (((around - 4 * u) / STEP**2)[..., 1:-1, 1:-1] - 1).square().mean()


def fourth_order(u: Tensor) -> Tensor:
    """Five weights of a twelfth, in both directions."""
    kernel = torch.tensor([-1.0, 16.0, -30.0, 16.0, -1.0]) / (12 * STEP**2)
    row = F.conv2d(u, kernel.view(1, 1, 1, 5))[..., 2:-2, :]
    return (row + F.conv2d(u, kernel.view(1, 1, 5, 1))[..., 2:-2]).square().mean()


def by_gradient(u: Tensor) -> Tensor:
    ut, ux = torch.gradient(u, spacing=STEP, dim=(2, 3))
    return (ut + 0.7 * ux).square().mean()


def divergence(u: Tensor) -> Tensor:
    """A flow that keeps its volume."""
    across = (u[:, 0, 1:-1, 2:] - u[:, 0, 1:-1, :-2]) / (2 * STEP)
    down = (u[:, 1, 2:, 1:-1] - u[:, 1, :-2, 1:-1]) / (2 * STEP)
    return (across + down).square().mean()


def bending(u: Tensor) -> Tensor:
    """The bending energy of a deformation."""
    dx, dy = (u[..., 2:] - u[..., :-2]) / 2, (u[..., 2:, :] - u[..., :-2, :]) / 2
    dxx, dyy = (dx[..., 2:] - dx[..., :-2]) / 2, (dy[..., 2:, :] - dy[..., :-2, :]) / 2
    dxy = (dx[..., 2:, :] - dx[..., :-2, :]) / 2
    return (dxx.square().mean() + dyy.square().mean() + 2 * dxy.square().mean()) * SIDE**2


def jacobian(u: Tensor) -> Tensor:
    """How a deformation changes areas: determinants of x + u(x), in pixels."""
    dx, dy = u[..., :-1, 1:] - u[..., :-1, :-1], u[..., 1:, :-1] - u[..., :-1, :-1]
    area = (1 + dx[:, 0]) * (1 + dy[:, 1]) - dx[:, 1] * dy[:, 0]
    return (area - 1).square().mean() * SIDE**2


def on_line(u: Tensor) -> Tensor:
    """A graph Laplacian of a line of points."""
    line = torch.eye(SIDE).diff(dim=0)
    return torch.einsum("ij,bcjk->bcik", line.T @ line, u).square().mean() * SIDE**2


def places(size: int) -> Tensor:
    line = torch.linspace(-1, 1, SIDE)
    grid = torch.stack(torch.meshgrid(line, line, indexing="ij"), -1)
    return grid + torch.rand(size, 1, 1, 2)


POINT = "stencils"
OF_PICTURES: dict[str, Callable[[Compared, Tensor, Tensor], Tensor]] = {
    "laplacian-loss": laplacian,
    "laplacian-of-sum": laplacian_of_sum,
    "sobel-loss": sobel,
    "gradient-similarity": gradient_similarity,
    "high-pass": made_kernel,
    "laplacian-pyramid": pyramid,
    "unsharp-mask": sharpened,
    "total-variation": variation,
    "edge-aware-smoothness": edge_aware,
    "difference-matrix": difference_matrix,
    "heat-residual": heat,
}
OF_FIELDS: dict[str, tuple[Callable[[Tensor], Tensor], int, float]] = {
    "burgers": (burgers, 1, 16),
    "wave-equation": (wave, 1, 16),
    "poisson": (poisson, 1, 16),
    "fourth-order": (fourth_order, 1, 16),
    "advection": (by_gradient, 1, 4),
    "divergence": (divergence, 2, 4),
    "bending-energy": (bending, 2, 16),
    "jacobian": (jacobian, 2, 8),
    "graph-laplacian": (on_line, 1, 16),
}
WHY = {
    4: "two layers and a tanh 6; central differences are a quarter of the field",
    8: "two layers and a tanh 6; neighbours differ by an eighth of the field",
    16: "two layers and a tanh 6; second differences are a sixteenth of the field",
}

CASES = [
    *(
        Case(name, lambda m=m: Compared(m), pictures, POINT, Demand(3, 8),
             "the layer's picture 3; neighbours differ by an eighth of it", ("compare",), sizes=(2, 3))
        for name, m in OF_PICTURES.items()
    ),
    *(
        Case(name, lambda m=m, c=c: Field(m, c), places, POINT, Demand(6, n), WHY[n], ("residual",), sizes=(2, 3))
        for name, (m, c, n) in OF_FIELDS.items()
    ),
]  # fmt: skip
