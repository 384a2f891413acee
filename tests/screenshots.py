"""``python -m tests.screenshots`` makes the pictures of the page in docs/images anew.

``python -m tests.screenshots FOLDER`` makes pages of six kinds there, and pictures of their first screens, in light and
dark colours and in two sizes, to look at.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from torch import nn

import autocastfx
from tests.browser import Browser, browser

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
SIZE = (1280, 800)  # of the pictures in the docs
SIZES = ((1280, 887), (1920, 1080))
DATE = "1767225600"  # the pictures change only when the page does


def main() -> None:
    os.environ["SOURCE_DATE_EPOCH"] = DATE
    torch.manual_seed(0)
    if len(sys.argv) > 1:
        gallery(Path(sys.argv[1]))
    else:
        documentation()


def documentation() -> None:
    """The pictures in the docs."""
    model, ids = bert(), torch.randint(0, 1000, (8, 64))
    amp_model = autocastfx.convert(model, (ids,), dtype=torch.bfloat16)
    mine = autocastfx.OpList.of({"allow": ["softmax"]}, name="mine")
    changed = autocastfx.convert(model, (ids,), dtype=torch.bfloat16, op_list=["default", mine])
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, browser() as page:
        page.viewport(*SIZE)
        path = Path(folder) / "page.html"
        autocastfx.dump(amp_model, path)
        page.colours("light")
        page.open(path)
        _save(page, IMAGES / "page-overview.png")
        page.search("softmax layer.0.")
        _save(page, IMAGES / "page-reason.png")
        autocastfx.dump(changed, path, against=amp_model.plan)
        page.open(path)
        page.click("#changes")
        page.search("softmax layer.0.")
        page.click("#tab-changes")
        _save(page, IMAGES / "page-changes.png")
        page.colours("dark")
        autocastfx.dump(amp_model, path, comparison=autocastfx.compare(model, amp_model, ids))
        page.open(path)
        page.search("layer_norm layer.0.attention")
        page.click("#tab-errors")
        _save(page, IMAGES / "page-errors.png")
        half, compared = overflowing(model, ids)
        autocastfx.dump(half, path, comparison=compared)
        page.open(path)
        _save(page, IMAGES / "page-overflow.png")


def gallery(folder: Path) -> None:
    """Pages of six kinds, and pictures of them."""
    folder.mkdir(exist_ok=True, parents=True)
    _make_pages(folder)
    for size in SIZES:
        with browser() as page:
            page.viewport(*size)
            for path in sorted(folder.glob("*.html")):
                for colours in ("light", "dark"):
                    page.colours(colours)
                    page.open(path)
                    _save(page, folder / f"{path.stem}-{size[0]}-{colours}.png")


def _make_pages(folder: Path) -> None:
    model, ids = bert(), torch.randint(0, 1000, (8, 64))
    amp_model = autocastfx.convert(model, (ids,), dtype=torch.bfloat16)
    autocastfx.dump(amp_model, folder / "bert.html")
    mine = autocastfx.OpList.of({"allow": ["softmax"]}, name="mine")
    changed = autocastfx.convert(model, (ids,), dtype=torch.bfloat16, op_list=["default", mine])
    autocastfx.dump(changed, folder / "diff.html", against=amp_model.plan)
    linears = autocastfx.OpList.of(
        {"extends": "bfloat16", "float8": [{"ops": ["linear"], "last": False}]}, name="linears"
    )
    in_float8 = autocastfx.convert(model, (ids,), dtype=torch.bfloat16, op_list=linears)
    autocastfx.dump(in_float8, folder / "float8.html")
    half, compared = overflowing(model, ids)
    autocastfx.dump(half, folder / "overflow.html", comparison=compared)
    autocastfx.dump(autocastfx.convert(llama(), (ids, ids), dtype=torch.bfloat16), folder / "llama.html")
    small, batches = tower(), [(torch.randn(64, 16), torch.randint(4, (64,))) for _ in range(3)]

    def loss(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(output, batch[1])

    tuned = autocastfx.tune(small, batches, loss, dtype="bfloat16", inputs=lambda batch: batch[0])
    prices = {"op_list": tuned.op_list, "sensitivity": tuned.sensitivity}
    autocastfx.dump(autocastfx.convert(small, (batches[0][0],), dtype="bfloat16", **prices), folder / "tuned.html")


def bert() -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=256, num_hidden_layers=12, num_attention_heads=4, vocab_size=1000, attn_implementation="eager"
    )
    return transformers.BertModel(config).eval()


class WithLoss(nn.Module):
    """A language model that takes labels and returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.lm = model

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.lm(input_ids=ids, labels=labels).loss


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=688,
        vocab_size=1000,
        attn_implementation="eager",
        use_cache=False,
    )
    return WithLoss(transformers.LlamaForCausalLM(config)).train()


class Block(nn.Module):
    """A residual block with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def tower() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), *(Block() for _ in range(4)), nn.LayerNorm(32), nn.Linear(32, 4))


def overflowing(model: nn.Module, ids: torch.Tensor) -> tuple[autocastfx.AmpModule, autocastfx.Comparison]:
    """A model whose values are too large for float16 from its fourth layer on; ``model`` is changed."""
    with torch.no_grad():
        model.encoder.layer[3].intermediate.dense.weight.mul_(3e5)  # pyright: ignore
    half = autocastfx.convert(model, (ids,), dtype=torch.float16)
    return half, autocastfx.compare(model, half, ids)


def _save(page: Browser, path: Path) -> None:
    page.run("document.activeElement.blur()")
    page.driver.save_screenshot(str(path))
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
