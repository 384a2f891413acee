"""Train a small transformer to predict the characters of Python's own source, in float32, and print its loss."""

import argparse
import inspect
import math

import torch
import torch.nn as nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

CONTEXT = 64


class CharModel(nn.Module):
    def __init__(self, vocabulary, width=64, heads=4, depth=2):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(torch.zeros(CONTEXT, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids):
        length = ids.size(1)
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=ids.device)
        hidden = self.encoder(self.token(ids) + self.place[:length], mask=mask, is_causal=True)
        return self.head(self.norm(hidden))


def batches(text, count, size):
    for _ in range(count):
        starts = torch.randint(0, len(text) - CONTEXT - 1, (size,)).tolist()
        rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
        yield rows[:, :-1], rows[:, 1:]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    source = inspect.getsource(argparse)
    letters = sorted(set(source))
    text = torch.tensor([letters.index(letter) for letter in source])
    held_out = text[-8000:]
    model = CharModel(len(letters))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    scheduler = LambdaLR(optimizer, lambda step: min(1, step / 20) * 0.5 * (1 + math.cos(math.pi * step / args.steps)))
    for step, (ids, following) in enumerate(batches(text[:-8000], args.steps, 32)):
        logits = model(ids)
        loss = criterion(logits.view(-1, len(letters)), following.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    model.eval()
    torch.manual_seed(1)
    with torch.no_grad():
        losses = [
            criterion(model(ids).flatten(0, 1), following.flatten()).item()
            for ids, following in batches(held_out, 8, 32)
        ]
    print(f"result: {sum(losses) / len(losses):.4f}")


if __name__ == "__main__":
    main()
