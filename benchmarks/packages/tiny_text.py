"""A tokenizer of some words, made here: nothing is downloaded."""

from __future__ import annotations

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SENTENCES = (
    *("the cat sat on the mat", "a dog ran in the park", "the park is near the sea", "a cat and a dog ran"),
    *("the sea is cold", "a mat is on the sea", "the dog sat near a cat", "in the park a cat sat"),
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with a word for each token."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted({w for one in SENTENCES for w in one.split()})]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        eos_token="[SEP]",
        bos_token="[CLS]",
        mask_token="[MASK]",
        model_max_length=32,
    )
