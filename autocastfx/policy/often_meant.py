"""Names that people write in lists from habit, with the names that they mean."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from torch import nn

__all__ = ["meant", "of_python", "yaml_advice"]

_LOW, _WIDE = ("low", "allow"), ("float32", "deny")
_MEANT: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("fp16", "half"), (*_LOW, "float16")),
    "bf16": (*_LOW, "bfloat16"),
    **dict.fromkeys(("float16", "bfloat16", "16", "whitelist", "allowlist"), _LOW),
    **dict.fromkeys(("fp32", "float", "full", "32"), _WIDE),
    **dict.fromkeys(("float32", "blacklist", "blocklist", "denylist"), ("deny",)),
    **dict.fromkeys(("graylist", "greylist"), ("infer",)),
    **dict.fromkeys(("gpu", "nvidia"), ("cuda",)),
    **dict.fromkeys(("attention", "sdpa", "flash_attention"), ("scaled_dot_product_attention",)),
    "batchnorm": ("batch_norm",),
    "layernorm": ("layer_norm",),
}
_SHORT = {"F": "torch.nn.functional", "nn": "torch.nn", "functional": "torch.nn.functional"}


def meant(word: str, legal: Collection[str]) -> str | None:
    """Return the one of ``legal`` that ``word`` is often written for; None if there is none."""
    return next((one for one in _MEANT.get(word.lower(), ()) if one in legal), None)


def of_python(name: str, ops: Collection[str]) -> str | None:
    """Say what a list writes for a name that Python code has by an import, such as ``F.softmax`` or ``LayerNorm``.

    Args:
        name: as in the list.
        ops: the names of ATen ops.

    Returns:
        What to write; None if the name is no such name.
    """
    head, _, last = name.rpartition(".")
    first = head.partition(".")[0]
    is_class = isinstance(getattr(nn, last, None), type)
    if first not in _SHORT and (head or not is_class):
        return None
    path = ".".join([_SHORT[first], *name.split(".")[1:]]) if head else f"torch.nn.{name}"
    op = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", last).lower()
    as_path = f"{'the module class' if is_class else 'the function'} {path!r}"
    return f"write the op {op!r}, or {as_path}" if op in ops else f"write {as_path}"


def yaml_advice(problem: str, line: str) -> str:
    """Return what to do about an error of the YAML parser, as a sentence; empty if there is nothing to add.

    Args:
        problem: the parser's words.
        line: the line of the file.
    """
    if "\\t" in problem:
        return " Indent by spaces; YAML takes no tabs."
    if "alias" in problem or "anchor" in problem:
        pattern = re.search(r"[*&][^\s,}\]]*", line)
        return f" Put a pattern that begins so in quotes: '{pattern[0]}'." if pattern is not None else ""
    if "mapping values are not allowed" in problem:
        return " Put text with a colon in quotes."
    return ""
