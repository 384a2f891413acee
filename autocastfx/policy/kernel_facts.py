"""What a device's kernels do whatever the policy: one table, apart from the categories."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from autocastfx.graph.node import uses
from autocastfx.graph.op_name import base_name, op_name
from autocastfx.graph.product import KINDS
from autocastfx.policy.presets import preset_folder
from autocastfx.policy.yaml_tree import Tree, parse_file

__all__ = ["LEVELS", "PARAMETERS", "KernelFacts", "load_kernel_facts"]

PARAMETERS = ("weight", "bias")  # of a norm, by the names in its schema

# Levels of folding: which tables of ops each takes.
LEVELS: Mapping[str, tuple[str, ...]] = {"none": (), "exact": ("exact",), "kernel": ("exact", "kernel")}

_WHOLE = ("made", "truth", "counted", "filled", "added", "multiplied", "summed", "moved", "bounded")


@dataclass(frozen=True)
class KernelFacts:
    """Facts by op name.

    Attributes:
        computes_in_float32: the kernel computes in float32 inside.
        mixed_args: the kernel takes operands of several precisions and computes in the widest of those with dimensions.
        takes_dtype: a dtype argument makes the kernel widen its input itself.
        no_kernel: per (device type, dtype name), what the device cannot run in that dtype.
        folds: per (level, device type, dtype name), what may take and give 16 bits where its list asks for float32:
            ``"exact"``, as exactly as with casts around it; ``"kernel"``, computed in float32 inside, from rounded
            arguments to rounded results.
        float32_parameters: by device type, what takes 16-bit inputs beside a float32 weight and bias.
        folds_with_parameters: folds only where it has a weight or a bias.
        joins: values are joined, never computed.
        expands_range: finite inputs can give results beyond their range.
        same_operands: the op that an op of two equal operands is.
        whole_numbers: for ops that give whole numbers, what of.
        reduces: for ops that reduce many elements into one, what tells how many.
    """

    computes_in_float32: frozenset[str]
    mixed_args: frozenset[str]
    takes_dtype: frozenset[str]
    no_kernel: Mapping[tuple[str, str], frozenset[str]]
    folds: Mapping[tuple[str, str, str], frozenset[str]]
    expands_range: frozenset[str]
    reduces: Mapping[str, str] = field(default_factory=dict)
    float32_parameters: Mapping[str, frozenset[str]] = field(default_factory=dict)
    joins: frozenset[str] = frozenset()
    folds_with_parameters: frozenset[str] = frozenset()
    same_operands: Mapping[str, str] = field(default_factory=dict[str, str])
    whole_numbers: Mapping[str, str] = field(default_factory=dict[str, str])

    def runs(self, op: str, dtype: str, device: str) -> bool:
        """Whether ``device`` has a kernel of ``op`` for ``dtype``, as far as the table knows."""
        return base_name(op) not in self.no_kernel.get((device, dtype), frozenset())

    def stands_for(self, node: fx.Node) -> str | None:
        """The other op that ``node`` is because both its operands are the same: ``x * x`` is a square."""
        reads = [u.node for u in uses(node)]
        is_twice = len(reads) == 2 and reads[0] is reads[1]
        return self.same_operands.get(base_name(op_name(node))) if is_twice else None

    def may_fold(self, op: str, dtype: str, device: str, level: str) -> bool:
        """Whether ``op`` may take and give ``dtype`` where its list asks for float32, at ``level`` of folding.

        ``op`` is a ``kernel_name``.
        """
        if dtype == "float16" and op in self.expands_range:
            return False
        return any(op in self.folds.get((each, device, dtype), frozenset()) for each in LEVELS[level])


def load_kernel_facts() -> KernelFacts:
    """The shipped table.

    Raises:
        OpListError: the file is damaged.
    """
    tree = parse_file(preset_folder() / "kernel_facts.yaml", shown="op_lists/kernel_facts.yaml", shipped=True)
    keys = ("computes_in_float32", "mixed_args", "takes_dtype", "no_kernel", "folds", "expands_range", "reduces")
    keys = (*keys, "float32_parameters", "joins", "folds_with_parameters", "same_operands", "whole_numbers")
    tree.check_keys(keys, what="kernel fact")
    tree.child("folds").check_keys(LEVELS["kernel"], what="level of folding")
    tree.child("whole_numbers").check_keys(_WHOLE, what="kind of whole number")
    tree.child("reduces").check_keys(KINDS, what="kind of reduction")
    return KernelFacts(
        computes_in_float32=_ops(tree.child("computes_in_float32")),
        mixed_args=_ops(tree.child("mixed_args")),
        takes_dtype=_ops(tree.child("takes_dtype")),
        no_kernel=_by_device(tree.child("no_kernel")),
        folds=_by_level(tree.child("folds")),
        expands_range=_ops(tree.child("expands_range")),
        float32_parameters={device.text: _ops(ops) for device, ops in tree.child("float32_parameters").items()},
        joins=_ops(tree.child("joins")),
        folds_with_parameters=_ops(tree.child("folds_with_parameters")),
        same_operands={op.op_name(): other.op_name() for op, other in tree.child("same_operands").items()},
        whole_numbers={op: kind.text for kind, ops in tree.child("whole_numbers").items() for op in _ops(ops)},
        reduces={op: kind.text for kind, ops in tree.child("reduces").items() for op in _ops(ops)},
    )


def _by_device(tree: Tree) -> dict[tuple[str, str], frozenset[str]]:
    return {(device.text, dtype.text): _ops(ops) for device, dtypes in tree.items() for dtype, ops in dtypes.items()}


def _by_level(tree: Tree) -> dict[tuple[str, str, str], frozenset[str]]:
    return {(level.text, *key): ops for level, devices in tree.items() for key, ops in _by_device(devices).items()}


def _ops(tree: Tree) -> frozenset[str]:
    return frozenset(entry.op_name() for entry in tree.as_strings())
