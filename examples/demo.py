"""What `make demo` runs: a pretrained encoder and a training run in 16 bits beside float32, and what was decided."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import embed_sentences
import torch
import train_digits

import autocastfx

OUTPUT = Path(__file__).resolve().parents[1] / "build" / "demo"


def describe(amp_model: autocastfx.AmpModule, title: str, path: Path) -> None:
    """Print what the plan says of the graph, and write the page of the whole graph to ``path``."""
    plan = amp_model.plan
    by_op = plan.by_op()
    precisions = {"low": plan.low, "float32": "float32"}
    print(f"{title}, {plan.low} on {plan.device}, op list {plan.op_list}: nodes by op and precision")
    print(f"  {'op':<30}" + "".join(f"{name:>10}" for name in precisions.values()))
    for op in sorted({op for op, _ in by_op}):
        print(f"  {op:<30}" + "".join(f"{by_op.get((op, run), '-'):>10}" for run in precisions))
    casts = Counter(cast.dtype for cast in plan.casts)
    print(f"  casts: {len(plan.casts)} (" + ", ".join(f"{n} to {dtype}" for dtype, n in casts.items()) + ")")
    print("  ops that no list names: " + (", ".join(f"{op} {n}" for op, n in plan.unlisted.items()) or "none"))
    path.parent.mkdir(parents=True, exist_ok=True)
    autocastfx.dump(amp_model, path)
    print(f"  every node with its reason, open it in a browser: {path}")


def main() -> int:
    print("1. Inference (examples/embed_sentences.py)\n")
    embedded = embed_sentences.run([torch.bfloat16, torch.float16])
    passed = embed_sentences.report(embedded)
    print("\n2. Training (examples/train_digits.py)\n")
    trained = train_digits.run()
    passed &= train_digits.report(trained)
    print("\n3. What was decided\n")
    describe(embedded[0].amp_model, "Sentence encoder", OUTPUT / "sentence_encoder.html")
    print()
    describe(trained[0].amp_model.train(), "Digits CNN in training", OUTPUT / "digits_cnn.html")
    print("\nBoth parts passed." if passed else "\nA part FAILED, see above.")
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
