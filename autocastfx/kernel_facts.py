"""What a device's kernels do whatever the policy: one table, apart from the categories."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autocastfx.depth import KINDS
from autocastfx.op_list import preset_folder
from autocastfx.op_name import base_name
from autocastfx.yaml_tree import Tree, parse_file

__all__ = ["KernelFacts", "load_kernel_facts"]


@dataclass(frozen=True)
class KernelFacts:
    """Facts by op name.

    ``computes_in_float32``: ops whose kernels compute in float32 inside. ``mixes_scalars``: ops that take a 0-d float32
    operand beside 16-bit ones. ``no_kernel``: per (device type, dtype name),
    the ops that the device cannot run in that dtype. ``reduces``: for ops that reduce many elements into one, what
    tells how many.
    """

    computes_in_float32: frozenset[str]
    mixes_scalars: frozenset[str]
    no_kernel: Mapping[tuple[str, str], frozenset[str]]
    reduces: Mapping[str, str] = field(default_factory=dict)

    def runs(self, op: str, dtype: str, device: str) -> bool:
        """Whether ``device`` has a kernel of ``op`` for ``dtype``, as far as the table knows."""
        return base_name(op) not in self.no_kernel.get((device, dtype), frozenset())


def load_kernel_facts() -> KernelFacts:
    """The shipped table.

    Raises:
        OpListError: the file is damaged.
    """
    tree = parse_file(preset_folder() / "kernel_facts.yaml", shown="op_lists/kernel_facts.yaml")
    tree.check_keys(("computes_in_float32", "mixes_scalars", "no_kernel", "reduces"), what="kernel fact")
    missing = {
        (device.text, dtype.text): _ops(ops)
        for device, dtypes in tree.child("no_kernel").items()
        for dtype, ops in dtypes.items()
    }
    tree.child("reduces").check_keys(KINDS, what="kind of reduction")
    reduces = {op: kind.text for kind, ops in tree.child("reduces").items() for op in _ops(ops)}
    return KernelFacts(_ops(tree.child("computes_in_float32")), _ops(tree.child("mixes_scalars")), missing, reduces)


def _ops(tree: Tree) -> frozenset[str]:
    return frozenset(entry.op_name() for entry in tree.as_strings())
