"""How each device's kernels behave whatever the op list says, and what a model asks to keep in float32."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, cast

import torch
from torch import fx, nn

from autocastfx.errors import KeyPath
from autocastfx.graph.names import base_name, op_name
from autocastfx.graph.node import uses
from autocastfx.graph.sizes import KINDS
from autocastfx.policy.op_list import OpList, preset_folder
from autocastfx.policy.rule import Rule, Runs
from autocastfx.policy.yaml_tree import Tree, parse_file

PARAMETERS = ("weight", "bias")  # of a norm, by the names in its schema

# Levels of folding, each with the tables of ops that it uses.
LEVELS: Mapping[str, tuple[str, ...]] = {"none": (), "exact": ("exact",), "kernel": ("exact", "kernel")}

CONTRIBUTIONS = ("indexed", "windows", "replicated", "reflected", "adaptive", "interpolated", "overlapping", "steps")
_WHOLE = ("made", "truth", "counted", "filled", "added", "multiplied", "summed", "moved", "bounded")


@dataclass(frozen=True)
class KernelFacts:
    """Facts by op name.

    Attributes:
        computes_in_float32: ops whose kernel computes in float32 inside.
        rounds_numbers: by device type, those of them that round their epsilon to 16 bits all the same.
        mixed_args: ops whose kernel takes operands of several precisions and computes in the widest of those with
            dimensions.
        takes_dtype: ops whose kernel widens its input itself, given a dtype argument.
        no_kernel: per (device type, dtype name), the ops that the device cannot run in that dtype.
        folds: per (level, device type, dtype name), the ops that may take and give 16 bits where a list asks for
            float32. Level ``"exact"``: as exactly as with casts around them. ``"kernel"``: computed in float32 inside,
            from rounded arguments to rounded results.
        float32_parameters: by device type, the ops that take 16-bit inputs with a float32 weight and bias.
        folds_with_parameters: ops that fold only if they have a weight or a bias.
        joins: ops that join values and compute nothing.
        expands_range: ops with results beyond the range of their finite inputs.
        switches: ops of straight pieces, whose gradient jumps between them.
        same_operands: by op, the op that it equals when its two operands are the same.
        groups_heads: by device type, attention that takes keys and values of fewer heads, without a mask.
        float32_gradients: devices whose product of 16-bit matrices writes float32, each with the number of
            floating-point operations from which a product is worth the host's time for a backward of its own.
        fast_multiples: by device type, what divides the sizes of products for which it has its fast kernels.
        triton_faster: by device type, our operators whose Triton kernels are measured faster there.
        whole_numbers: by op that can give whole numbers, the kind of whole number.
        holds_masks: ops whose results may hold numbers that mask beside others.
        recomputes: ops that backward may run again, in place of keeping what they gave.
        bears_rounding: by op whose backward is about as exact as what it reads, rounded: what is rounded by itself.
        adds_in_16_bits: per (device type, ``"forward"`` or ``"backward"``), the ops whose kernel adds up in 16 bits.
            Others add up in float32, and round once.
        contributions: by op whose backward adds up, what says how many gradients meet in one element.
        reduces: by op that reduces many elements into one, the source of their number (``graph.product.KINDS``).
    """

    computes_in_float32: frozenset[str]
    mixed_args: frozenset[str]
    takes_dtype: frozenset[str]
    no_kernel: Mapping[tuple[str, str], frozenset[str]]
    folds: Mapping[tuple[str, str, str], frozenset[str]]
    expands_range: frozenset[str]
    reduces: Mapping[str, str]
    adds_in_16_bits: Mapping[tuple[str, str], frozenset[str]]
    contributions: Mapping[str, str]
    float32_parameters: Mapping[str, frozenset[str]]
    joins: frozenset[str]
    folds_with_parameters: frozenset[str]
    same_operands: Mapping[str, str]
    whole_numbers: Mapping[str, str]
    triton_faster: Mapping[str, frozenset[str]]
    groups_heads: Mapping[str, frozenset[str]]
    fast_multiples: Mapping[str, int]
    float32_gradients: Mapping[str, int]
    switches: frozenset[str]
    rounds_numbers: Mapping[str, frozenset[str]]
    recomputes: frozenset[str]
    holds_masks: frozenset[str]
    bears_rounding: Mapping[str, str]

    def keeps_numbers(self, op: str, device: str) -> bool:
        """True if a small number, such as an epsilon, is not rounded to 16 bits in the kernel of ``op``."""
        name = base_name(op)
        return name in self.computes_in_float32 and name not in self.rounds_numbers.get(device, frozenset())

    def runs(self, op: str, dtype: str, device: str) -> bool:
        """True unless the table says that ``device`` has no kernel of ``op`` for ``dtype``."""
        return base_name(op) not in self.no_kernel.get((device, dtype), frozenset())

    def stands_for(self, node: fx.Node) -> str | None:
        """Return the op that ``node`` equals because both its operands are the same: ``x * x`` is ``square``."""
        reads = [u.node for u in uses(node)]
        is_twice = len(reads) == 2 and reads[0] is reads[1]
        return self.same_operands.get(base_name(op_name(node))) if is_twice else None

    def may_fold(self, op: str, dtype: str, device: str, level: str) -> bool:
        """True if ``op`` may take and give ``dtype`` at this level of folding, where its list asks for float32.

        ``op`` is a ``kernel_name``.
        """
        if dtype == "float16" and op in self.expands_range:
            return False
        return any(op in self.folds.get((each, device, dtype), frozenset()) for each in LEVELS[level])


def load_kernel_facts() -> KernelFacts:
    """Read the shipped table.

    Raises:
        OpListError: the file is damaged.
    """
    return _read(parse_file(preset_folder() / "kernel_facts.yaml", shown="op_lists/kernel_facts.yaml", shipped=True))


@lru_cache(maxsize=2)
def _read(tree: Tree) -> KernelFacts:
    names = [fact.name for fact in fields(KernelFacts)]
    tree.check_keys(names, what="kernel fact")
    tree.child("folds").check_keys(LEVELS["kernel"], what="level of folding")
    tree.child("whole_numbers").check_keys(_WHOLE, what="kind of whole number")
    tree.child("reduces").check_keys(KINDS, what="kind of reduction")
    tree.child("bears_rounding").check_keys(("numbers", "rows", "channels"), what="kind of rounding")
    tree.child("contributions").check_keys(CONTRIBUTIONS, what="kind of contribution")
    return KernelFacts(**{name: _TABLES.get(name, _ops)(tree.child(name)) for name in names})


def _by_device_type(tree: Tree) -> dict[str, frozenset[str]]:
    return {device.text: _ops(ops) for device, ops in tree.items()}


def _by_device(tree: Tree) -> dict[tuple[str, str], frozenset[str]]:
    return {(device.text, dtype.text): _ops(ops) for device, dtypes in tree.items() for dtype, ops in dtypes.items()}


def _by_level(tree: Tree) -> dict[tuple[str, str, str], frozenset[str]]:
    return {(level.text, *key): ops for level, devices in tree.items() for key, ops in _by_device(devices).items()}


def _kinds(tree: Tree) -> dict[str, str]:
    return {op: kind.text for kind, ops in tree.items() for op in _ops(ops)}


def _pairs(tree: Tree) -> dict[str, str]:
    return {op.op_name(): other.op_name() for op, other in tree.items()}


def _numbers(tree: Tree) -> dict[str, int]:
    return {device.text: number.as_integer() for device, number in tree.items()}


def _ops(tree: Tree) -> frozenset[str]:
    return frozenset(entry.op_name() for entry in tree.as_strings())


# How the facts are read that are not a list of ops.
_TABLES: Mapping[str, Callable[[Tree], Any]] = {
    **dict.fromkeys(("no_kernel", "adds_in_16_bits"), _by_device),
    "folds": _by_level,
    "same_operands": _pairs,
    **dict.fromkeys(("fast_multiples", "float32_gradients"), _numbers),
    **dict.fromkeys(("whole_numbers", "reduces", "contributions", "bears_rounding"), _kinds),
    **dict.fromkeys(("float32_parameters", "groups_heads", "triton_faster", "rounds_numbers"), _by_device_type),
}


# The modules that a transformers model asks to be kept in float32, as rules of an op list.
#
# A transformers model class names parts of parameters' names: ``_keep_in_fp32_modules`` for float16, and
# ``_keep_in_fp32_modules_strict`` for both 16-bit dtypes. When it loads a checkpoint, a parameter or buffer whose
# name holds such a part (a regular expression, in which ``*`` stands for any characters) stays float32.

_FOR_RANGE = "_keep_in_fp32_modules"  # what bfloat16 may hold is float32 for its range: TF32 has that, too
_ATTRIBUTES: Mapping[str, tuple[torch.dtype, ...]] = {
    "_keep_in_fp32_modules_strict": (torch.float16, torch.bfloat16),
    _FOR_RANGE: (torch.float16,),
}


def kept_in_float32(model: nn.Module, low: torch.dtype) -> OpList:
    """Return a list whose rules run in float32 what ``model``, or a model inside it, keeps so in the dtype ``low``.

    A rule covers a module all of whose parameters and saved buffers are named, or one without modules inside of which
    any is. A parameter that is named alone beside other modules has no rule: a rule would cover all of these.
    """
    rules: dict[str, Rule[Runs]] = {}
    for prefix, inner in model.named_modules():
        for attribute, asked_for in _ATTRIBUTES.items():
            named: object = getattr(inner, attribute, None)
            if low not in asked_for or not isinstance(named, (list, tuple, set, frozenset)):
                continue
            parts = cast("Collection[object]", named)
            for part in sorted(part for part in parts if isinstance(part, str)):
                for path in _kept(inner, re.compile(part.replace("*", ".*"))):
                    name = type(inner).__name__
                    word = "tf32" if attribute == _FOR_RANGE else "float32"
                    reason = f"{name} keeps {part!r} in float32 ({attribute})"
                    reason += "; its products run in TF32 on CUDA" if word == "tf32" else ""
                    whole = ".".join(filter(None, (prefix, path)))
                    place = KeyPath(name, attribute)
                    rule = Rule(path=whole, effect=Runs(word), reason=reason, source=place, shipped=True)
                    rules.setdefault(whole, rule)
    joined = _joined(rules, [path for path, _ in model.named_modules()])
    return OpList(lines={rule.key: rule for rule in joined})


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


def _joined(rules: Mapping[str, Rule[Runs]], paths: Sequence[str]) -> Iterator[Rule[Runs]]:
    """Yield one rule for the modules whose paths differ in numbers alone, where it covers no others."""
    groups: dict[tuple[str, str], list[tuple[str, Rule[Runs]]]] = {}
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
