"""``python -m tests.screenshots`` makes the pictures of the page in docs/images anew."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import transformers

import autocastfx
from tests.browser import Browser, browser

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
SIZE = (1280, 887)  # of which the window's own frame takes 87


def main() -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=256, num_hidden_layers=12, num_attention_heads=4, vocab_size=1000, attn_implementation="eager"
    )
    model, ids = transformers.BertModel(config).eval(), torch.randint(0, 1000, (8, 64))
    amp_model = autocastfx.convert(model, (ids,), dtype=torch.bfloat16)
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, browser(SIZE) as page:
        plain, measured = Path(folder) / "plain.html", Path(folder) / "measured.html"
        autocastfx.dump(amp_model, plain, "html")
        autocastfx.dump(amp_model, measured, "html", comparison=autocastfx.compare(model, amp_model, ids))
        page.colours("light")
        page.open(plain)
        _save(page, "page-overview")
        page.search("softmax layer.0.")
        _save(page, "page-reason")
        page.colours("dark")
        page.open(measured)
        page.search("layer_norm layer.0.attention")
        page.click("#tab-errors")
        _save(page, "page-errors")


def _save(page: Browser, name: str) -> None:
    page.run("document.activeElement.blur()")
    path = IMAGES / f"{name}.png"
    page.driver.save_screenshot(str(path))
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
