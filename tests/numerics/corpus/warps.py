"""Places in images and in space: coordinates in pixels, small matrices, rotations."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.numerics.corpus.case import Case, Demand
from tests.numerics.corpus.parts import mlp

__all__ = ["CASES"]

WIDTH = 16
SIDE = 400


def _pixels(height: int, width: int, like: Tensor) -> Tensor:
    """Pixel coordinates, x before y, of shape (height, width, 2)."""
    y, x = torch.meshgrid(
        torch.arange(height, device=like.device), torch.arange(width, device=like.device), indexing="ij"
    )
    return torch.stack([x, y], -1).float()


def _smooth(height: int, width: int) -> Tensor:
    """A picture of long waves, in which a place is worth its distance."""
    at = torch.arange(height)[:, None] * 0.01 + torch.arange(width)[None] * 0.05
    return torch.stack([at.sin(), at.cos(), (2 * at).sin()])[None]


class FlowWarp(nn.Module):
    """Optical flow: an image read where each pixel came from, a pixel or so away."""

    def __init__(self) -> None:
        super().__init__()
        self.flow = nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        place = _pixels(first.shape[2], first.shape[3], first) + self.flow(first).permute(0, 2, 3, 1)
        size = torch.tensor([first.shape[3], first.shape[2]], device=first.device)
        grid = 2 * place / (size - 1) - 1
        return F.grid_sample(second, grid, padding_mode="border", align_corners=True), place


class CorrelationLookup(nn.Module):
    """RAFT: windows of a volume around places that recurrent updates shift."""

    def __init__(self) -> None:
        super().__init__()
        self.update = nn.Linear(9, 2)

    def forward(self, volume: Tensor) -> tuple[Tensor, Tensor]:
        count, _, height, width = volume.shape
        place = torch.stack([torch.linspace(5, width - 6, count), torch.linspace(2, 5, count)], -1)[:, None, None]
        window = torch.stack(torch.meshgrid(torch.arange(-1, 2), torch.arange(-1, 2), indexing="xy"), -1)
        for _ in range(3):
            x, y = (place + window).unbind(-1)
            grid = torch.stack([2 * x / (width - 1) - 1, 2 * y / (height - 1) - 1], -1)
            seen = F.grid_sample(volume, grid, align_corners=True).flatten(1)
            place = place + self.update(seen).tanh()[:, None, None]
        return place.squeeze((1, 2)), seen


class Bilinear(nn.Module):
    """Bilinear reading by hand: floor, four corners and their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.offset, self.out = nn.Linear(WIDTH, 1), nn.Linear(3, 4)

    def forward(self, x: Tensor, place: Tensor, row: Tensor) -> Tensor:
        at = place + self.offset(x).squeeze(-1).tanh().to(place.dtype)
        low = at.floor()
        share = (at - low)[:, None]
        index = low.long().clamp(0, row.shape[0] - 2)
        return self.out(row[index] * (1 - share) + row[index + 1] * share)


class Homography(nn.Module):
    """A plane seen from elsewhere: a 3 x 3 matrix on pixels, and a division."""

    def __init__(self) -> None:
        super().__init__()
        self.change = nn.Linear(WIDTH, 9)

    def project(self, matrix: Tensor, pixels: Tensor) -> Tensor:
        there = pixels @ matrix.transpose(-1, -2)
        return there[..., :2] / there[..., 2:]

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.tensor([[1e-3, 1e-3, 1.0], [1e-3, 1e-3, 1.0], [1e-7, 1e-7, 0.0]], device=x.device)
        matrix = torch.eye(3, device=x.device) + self.change(x).unflatten(-1, (3, 3)) * scale
        pixels = _pixels(4, SIDE, x).flatten(0, 1)
        return self.project(matrix, F.pad(pixels, (0, 1), value=1.0))


class Camera(nn.Module):
    """Points in metres to pixels: extrinsics of 4 x 4 and intrinsics of 3 x 3, given."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Linear(WIDTH, 3)

    def project(self, points: Tensor, pose: Tensor, lens: Tensor) -> Tensor:
        seen = torch.einsum("bij,bnj->bni", pose, F.pad(points, (0, 1), value=1.0))
        pixels = torch.matmul(lens, seen[..., :3].transpose(1, 2)).transpose(1, 2)
        return pixels[..., :2] / pixels[..., 2:]

    def forward(self, x: Tensor, points: Tensor, pose: Tensor, lens: Tensor) -> Tensor:
        return self.project(points + 0.01 * self.shift(x), pose, lens)


class Rays(nn.Module):
    """NeRF: rays through pixels, turned by a camera, sampled at depths and encoded in octaves."""

    def __init__(self) -> None:
        super().__init__()
        self.out = mlp(36, 32, 4)

    def turn(self, directions: Tensor, rotation: Tensor) -> Tensor:
        return directions @ rotation.T

    def forward(self, rotation: Tensor, origin: Tensor, depths: Tensor) -> Tensor:
        pixels = _pixels(4, depths.shape[0], depths).flatten(0, 1)
        directions = torch.cat([(pixels - 10) / 50, -torch.ones_like(pixels[:, :1])], -1)
        rays = self.turn(directions, rotation)
        points = origin + rays[:, None] * depths[:, None]
        phase = points[..., None] * 2.0 ** torch.arange(6, device=depths.device)
        return self.out(torch.cat([phase.sin(), phase.cos()], -1).flatten(-2))


class Composited(nn.Module):
    """Volume rendering: transmittance as a running product of 1 - alpha."""

    def __init__(self) -> None:
        super().__init__()
        self.density = nn.Linear(WIDTH, 4)

    def render(self, raw: Tensor, depths: Tensor) -> Tensor:
        density, colour = F.softplus(raw[..., 0]), torch.sigmoid(raw[..., 1:])
        gap = depths[:, 1:] - depths[:, :-1]
        alpha = 1 - torch.exp(-density[:, :-1] * gap)
        clear = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], 1), 1)[:, :-1]
        return ((alpha * clear)[..., None] * colour[:, :-1]).sum(1)

    def forward(self, x: Tensor, depths: Tensor) -> Tensor:
        return self.render(self.density(x), depths)


class Quaternion(nn.Module):
    """Unit quaternions to rotations of points that lie hundreds of metres away."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Linear(WIDTH, 3)

    def rotation(self, small: Tensor) -> Tensor:
        q = F.normalize(F.pad(small * 1e-3, (1, 0), value=1.0), dim=-1)
        w, x, y, z = q.unbind(-1)
        rows = [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y),
                2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x),
                2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)]  # fmt: skip
        return torch.stack(rows, -1).unflatten(-1, (3, 3))

    def apply_to(self, rotation: Tensor, points: Tensor) -> Tensor:
        return (rotation @ points[..., None]).squeeze(-1)

    def forward(self, x: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
        moved = self.apply_to(self.rotation(self.turn(x)), points)
        return moved, moved - points


class SixNumbers(Quaternion):
    """Rotations from six numbers by Gram-Schmidt, near the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Linear(WIDTH, 6)
        self.register_buffer("identity", torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 0.0]))

    def rotation(self, small: Tensor) -> Tensor:
        a, b = (self.identity + small * 1e-3).chunk(2, -1)
        a = F.normalize(a, dim=-1)
        b = F.normalize(b - (a * b).sum(-1, keepdim=True) * a, dim=-1)
        return torch.stack([a, b, torch.linalg.cross(a, b)], -1)


class FoldedAngles(Quaternion):
    """Angles in turn by einsum: joints of an arm, with links of a metre."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Linear(WIDTH, 4)

    def joint(self, total: Tensor, angle: Tensor) -> Tensor:
        rows = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1).unflatten(-1, (2, 2))
        return torch.einsum("bij,bjk->bik", total, rows)

    def reach(self, angles: Tensor, points: Tensor) -> Tensor:
        total = torch.eye(2, device=angles.device).expand(angles.shape[0], 2, 2)
        for angle in angles.unbind(-1):
            total = self.joint(total, angle)
            points = points + total[..., 0]
        return points

    def forward(self, x: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
        moved = self.reach(1e-2 * self.turn(x), points[:, :2])
        return moved, moved - points[:, :2]


class BoxDecode(nn.Module):
    """Boxes of anchors in pixels: centres shifted, sizes by an exponent."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, anchors: Tensor) -> Tensor:
        shift, size = (self.head(x) * 0.1).chunk(2, -1)
        centre = anchors[:, :2] + shift * anchors[:, 2:]
        half = anchors[:, 2:] * torch.exp(size) / 2
        return torch.cat([centre - half, centre + half], -1)


class AffineGrid(nn.Module):
    """A spatial transformer: an affine grid from six learned numbers near the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.locate = nn.Linear(WIDTH, 6)
        nn.init.zeros_(self.locate.bias)
        self.register_buffer("identity", torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 0.0]))

    def sample(self, theta: Tensor, picture: Tensor) -> Tensor:
        grid = F.affine_grid(theta.unflatten(-1, (2, 3)), list(picture.shape), align_corners=False)
        return F.grid_sample(picture, grid, align_corners=False)

    def forward(self, x: Tensor, picture: Tensor) -> Tensor:
        return self.sample(self.identity + 1e-3 * self.locate(x), picture)


def _flow(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(1, 3, size, SIDE), _smooth(size, SIDE)


def _camera(size: int) -> tuple[Tensor, ...]:
    pose = torch.eye(4).expand(size, 4, 4).clone()
    pose[:, :3, 3] = torch.tensor([0.3, -0.2, 4.0])
    lens = torch.tensor([[900.0, 0.0, 640.0], [0.0, 900.0, 360.0], [0.0, 0.0, 1.0]]).expand(size, 3, 3)
    return torch.randn(size, 5, WIDTH), torch.randn(size, 5, 3), pose, lens


def _rays(size: int) -> tuple[Tensor, ...]:
    angle = torch.tensor(0.7)
    rotation = torch.stack([angle.cos(), -angle.sin(), angle * 0, angle.sin(), angle.cos(), angle * 0,
                            angle * 0, angle * 0, angle * 0 + 1]).reshape(3, 3)  # fmt: skip
    return rotation, torch.tensor([4.0, -3.0, 2.0]), torch.linspace(2, 6, size)


def _rendered(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(4, size, WIDTH), (5 + torch.rand(4, size).cumsum(1) * 0.1)


def _far(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, WIDTH), torch.randn(size, 3) * 300


POINT = "shape"
POINTS = "provenance"
CASES = (
    Case("flow-warp", FlowWarp, _flow, POINTS, Demand(3), "flow 3, of a pixel; the picture's slope is below 1",
         tensors={"output 1": Demand(3, 0.01)}),
    Case("correlation-lookup", CorrelationLookup, lambda n: _smooth(8, 300).expand(n, -1, -1, -1)[:, :1] * 2, POINTS,
         Demand(4, 0.02, 1.0), "update 3, tanh 1, of a pixel or two in a hundred",
         tensors={"output 1": Demand(4, 0.2)}),
    Case("bilinear-by-hand", Bilinear,
         lambda n: (torch.randn(n, WIDTH), 300 + 200 * torch.rand(n), _smooth(3, 520)[0, :, 1].T),
         "demand", Demand(7), "offset 3, tanh 1, out 3; a row's slope is below 1"),
    Case("homography", Homography, lambda n: torch.randn(n, WIDTH), POINT, Demand(4, 4e-3, 1.0),
         "change 3, scaling 1; it moves pixels by a thousandth or two", ("project",)),
    Case("camera-matrices", Camera, _camera, POINT, Demand(4, 0.01, 1.0),
         "shift 3, scaling 1; a hundredth of the points",
         ("project",)),
    Case("turned-rays", Rays, _rays, POINT, Demand(6), "waves 1, layers 2 and 2, tanh 1; points are exact", ("turn",)),
    Case("volume-rendering", Composited, _rendered, "sums", Demand(3, 2.0), "density 3; in an exponent and a colour",
         ("render",), sizes=(24, 40)),
    Case("quaternion", Quaternion, _far, POINT, Demand(3, 2e-3, 1.0), "turn 3, of a thousandth",
         ("rotation", "apply_to"),
         {"output 1": Demand(3)}),
    Case("rotation-of-six", SixNumbers, _far, POINT, Demand(3, 2e-3, 1.0), "turn 3, of a thousandth",
         ("rotation", "apply_to"), {"output 1": Demand(3)}),
    Case("arm-of-joints", FoldedAngles, _far, POINT, Demand(4, 1e-2, 1.0),
         "turn 3, scaling 1; a hundredth of a radian", ("reach",)),
    Case("box-decoding", BoxDecode, lambda n: (torch.randn(n, WIDTH), 200 + 300 * torch.rand(n, 4)), POINTS,
         Demand(4, 0.1, 1.0),
         "head 3, scaling 1; a tenth of the anchors"),
    Case("affine-grid", AffineGrid, lambda n: (torch.randn(n, WIDTH), _smooth(6, 300).expand(n, -1, -1, -1).clone()),
         POINT,
         Demand(3, 0.02, 1.0), "locate 3, of a thousandth of half a picture of six radians", ("sample",)),
)  # fmt: skip
