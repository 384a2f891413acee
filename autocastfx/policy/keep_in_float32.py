"""The modules that a transformers model asks to be kept in float32, as rules of an op list.

A transformers model class names parts of parameters' names: ``_keep_in_fp32_modules`` for float16, and
``_keep_in_fp32_modules_strict`` for both 16-bit dtypes. When it loads a checkpoint, a parameter or buffer whose name
holds such a part (a regular expression, in which ``*`` stands for any characters) stays float32.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import nn

from autocastfx.errors import KeyPath
from autocastfx.policy.op_list import OpList
from autocastfx.policy.rule import ModuleRule

__all__ = ["kept_in_float32"]

_ATTRIBUTES: Mapping[str, tuple[torch.dtype, ...]] = {
    "_keep_in_fp32_modules_strict": (torch.float16, torch.bfloat16),
    "_keep_in_fp32_modules": (torch.float16,),
}


def kept_in_float32(model: nn.Module, low: torch.dtype) -> OpList:
    """Return a list whose rules run in float32 what ``model``, or a model inside it, keeps so in the dtype ``low``.

    A rule covers a module all of whose parameters and saved buffers are named, or one without modules inside of which
    any is. A parameter that is named alone beside other modules has no rule: a rule would cover all of these.
    """
    found: dict[str, ModuleRule] = {}
    for prefix, inner in model.named_modules():
        for attribute, asked_for in _ATTRIBUTES.items():
            named: object = getattr(inner, attribute, None)
            if low not in asked_for or not isinstance(named, (list, tuple, set, frozenset)):
                continue
            parts = cast("Collection[object]", named)
            for part in sorted(part for part in parts if isinstance(part, str)):
                for path in _kept(inner, re.compile(part.replace("*", ".*"))):
                    name = type(inner).__name__
                    reason = f"{name} keeps {part!r} in float32 ({attribute})"
                    whole = ".".join(filter(None, (prefix, path)))
                    rule = ModuleRule(whole, "float32", reason, source=KeyPath(name, attribute), shipped=True)
                    found.setdefault(whole, rule)
    return OpList(modules=tuple(_joined(found, [path for path, _ in model.named_modules()])))


def _kept(model: nn.Module, part: re.Pattern[str]) -> Iterator[str]:
    """Yield the paths of the outermost modules of ``model`` that a rule may cover."""
    stored, kept = Counter[str](), Counter[str]()  # by path, tensors inside
    for name in _saved(model):
        names = name.split(".")
        inside = [".".join(names[:count]) for count in range(len(names))]
        stored.update(inside)
        kept.update(inside if part.search(name) else ())
    covered: list[str] = []
    for path, module in model.named_modules():
        is_whole = kept[path] == stored[path] or not list(module.children())
        start = f"{path}." if path else ""
        if kept[path] and is_whole and not any(start.startswith(outer) for outer in covered):
            covered.append(start)
            yield path


def _saved(model: nn.Module) -> Iterator[str]:
    """Yield the names of the tensors that a checkpoint of ``model`` holds."""
    for path, module in model.named_modules():
        for name in (*module._parameters, *(module._buffers.keys() - module._non_persistent_buffers_set)):
            yield f"{path}.{name}" if path else name


def _joined(rules: Mapping[str, ModuleRule], paths: Sequence[str]) -> Iterator[ModuleRule]:
    """Yield one rule for the modules whose paths differ in numbers alone, where it covers no others."""
    groups: dict[tuple[str, str], list[tuple[str, ModuleRule]]] = {}
    for path, rule in rules.items():
        groups.setdefault((re.sub(r"(?<![^.])\d+(?![^.])", "*", path), rule.reason), []).append((path, rule))
    for (starred, _), group in groups.items():
        one = replace(group[0][1], path=starred)
        is_glob = "*" in starred and all(_is_plain(path) for path, _ in group)
        if is_glob and sum(map(one.covers, paths)) == len(group):
            yield one
        else:
            yield from (replace(r, path=path if _is_plain(path) else f"re:{re.escape(path)}") for path, r in group)


def _is_plain(path: str) -> bool:
    """True for a path that is a glob of itself."""
    return re.fullmatch(r"[\w-]+(\.[\w-]+)*", path) is not None
