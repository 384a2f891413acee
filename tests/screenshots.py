"""``python -m tests.screenshots`` makes the pictures of the page in docs/images anew."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
import transformers

import autocastfx
from tests.browser import Browser, browser

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
SIZE = (1280, 887)  # of which the window's own frame takes 87
DATE = "1767225600"  # the pictures change only when the page does


def main() -> None:
    os.environ["SOURCE_DATE_EPOCH"] = DATE
    torch.manual_seed(0)
    model, ids = bert(), torch.randint(0, 1000, (8, 64))
    amp_model = autocastfx.convert(model, (ids,), dtype=torch.bfloat16)
    mine = autocastfx.OpList.of({"allow": ["softmax"]}, name="mine")
    changed = autocastfx.convert(model, (ids,), dtype=torch.bfloat16, op_list=["default", mine])
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, browser(SIZE) as page:
        path = Path(folder) / "page.html"
        autocastfx.dump(amp_model, path)
        page.colours("light")
        page.open(path)
        _save(page, "page-overview")
        page.search("softmax layer.0.")
        _save(page, "page-reason")
        autocastfx.dump(changed, path, against=amp_model.plan)
        page.open(path)
        page.click("#changes")
        page.search("softmax layer.0.")
        page.click("#tab-changes")
        _save(page, "page-changes")
        page.colours("dark")
        autocastfx.dump(amp_model, path, comparison=autocastfx.compare(model, amp_model, ids))
        page.open(path)
        page.choose("#colour", "error")
        page.search("layer_norm layer.0.attention")
        page.click("#tab-errors")
        _save(page, "page-errors")
        with torch.no_grad():
            model.encoder.layer[3].intermediate.dense.weight.mul_(3e5)
        half = autocastfx.convert(model, (ids,), dtype=torch.float16)
        autocastfx.dump(half, path, comparison=autocastfx.compare(model, half, ids))
        page.open(path)
        _save(page, "page-overflow")


def bert() -> torch.nn.Module:
    config = transformers.BertConfig(
        hidden_size=256, num_hidden_layers=12, num_attention_heads=4, vocab_size=1000, attn_implementation="eager"
    )
    return transformers.BertModel(config).eval()


def _save(page: Browser, name: str) -> None:
    page.run("document.activeElement.blur()")
    path = IMAGES / f"{name}.png"
    page.driver.save_screenshot(str(path))
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
