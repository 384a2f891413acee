"""``python -m tests.page_cost`` prints what the page costs: bytes a node, and milliseconds to draw and to search.

Pages of 5,401 nodes, of layers that are alike and of layers that are not, and one of GPT-2 with 24 layers. Medians of
nine, in headless Chromium: of opening, from navigation until the graph is drawn, and of a search for all softmaxes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median

from autocastfx.report.dump import view_of
from autocastfx.report.html import SCRIPTS, asset, render_html
from autocastfx.report.view import View
from tests.browser import browser
from tests.golden.models import converted
from tests.report.html.test_page import gpt2, stacked

ROUNDS = 9
SEARCH = """
const query = document.getElementById("query"), before = performance.now();
query.value = "softmax";
query.dispatchEvent(new Event("input"));
query.form.requestSubmit();
document.body.offsetHeight;
return performance.now() - before;
"""


def cost(view: View, path: Path) -> str:
    """Draw a page ``ROUNDS`` times in a browser of its own, and search it as often."""
    path.write_text(render_html([view], 0), encoding="utf-8")
    fixed = sum(len(asset(name).encode()) for name in SCRIPTS)
    with browser((1280, 887)) as page:
        page.open(path)  # fills the browser's cache of compiled scripts
        drawn = median(1e3 * page.open(path) for _ in range(ROUNDS))
        searched = median(page.run(SEARCH) for _ in range(ROUNDS))
    size = (path.stat().st_size - fixed) / len(view.rows)
    return f"{len(view.rows):,} nodes: {size:.0f} bytes a node, drawn in {drawn:.0f} ms, searched in {searched:.0f} ms"


def main() -> None:
    layer = view_of(converted("encoder_layer"))
    with tempfile.TemporaryDirectory() as folder:
        for name, view in {
            "layers alike": stacked(layer, 100, equal=True),
            "layers unlike": stacked(layer, 100, equal=False),
            "GPT-2": view_of(gpt2()),
        }.items():
            print(f"{name}, {cost(view, Path(folder) / 'page.html')}", flush=True)


if __name__ == "__main__":
    main()
