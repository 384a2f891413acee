"""Count the operators and casts of a training step, and the bytes that forward saves for backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_NOTHING = ("aten::empty", "aten::new_empty", "aten::_unsafe_view")  # names of what computes nothing begin so
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass
class Casts:
    """Casts from one floating dtype to another; a cast moves the bytes that it reads and writes."""

    count: int = 0
    bytes: int = 0

    def add(self, source: Tensor, target: Tensor) -> None:
        self.count += 1
        self.bytes += source.numel() * source.element_size() + target.numel() * target.element_size()


@dataclass(frozen=True)
class Saved:
    """Bytes of the storages that backward holds, each counted once; inputs and their casts are not counted.

    ``weights`` are parameters, buffers and their casts to another dtype; ``activations`` are the rest. A 16-bit model
    gets cast inputs, so counting casts of inputs would be unfair to the others.
    """

    activations: int
    weights: int


class Counter(TorchDispatchMode):
    """Counts, while entered, the operators called below autograd and the tensors that autograd saves.

    Attributes:
        ops: calls of ATen operators that compute or copy; no views and no plain allocations.
        weights: casts of parameters, and of their casts.
        gradients: casts in backward that make the gradient of a parameter, or a part of it.
        activations: all other casts.
    """

    def __init__(self, model: nn.Module, inputs: Iterable[Any]) -> None:
        super().__init__()
        self.ops = 0
        self.weights, self.gradients, self.activations = Casts(), Casts(), Casts()
        self._weights = _storages((*model.parameters(), *model.buffers()))
        self._inputs = _storages(inputs)
        self._saved: dict[int, torch.UntypedStorage] = {}  # held, so that no later one has the address
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor)

    def __enter__(self) -> Counter:
        self._hooks.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.ops += not (func.is_view or allocates(func))
        if func is aten._to_copy.default:
            self._cast(args[0], result)
        elif func is aten.clamp.default and next(iter(_storages([args[0]])), None) in self._inputs:  # it is saturated
            self._inputs.update(_storages([result]))
        elif func is aten.add.out:  # the end of a saturating cast
            self._cast(args[0], result)
        elif func is aten.copy_.default:
            self._cast(args[1], args[0])
        elif func is aten._foreach_copy_.default:
            for target, source in zip(*args[:2], strict=True):
                self._cast(source, target)
        return result

    def saved(self) -> Saved:
        """Return the bytes saved for backward."""
        kinds = {True: 0, False: 0}
        for address, storage in self._saved.items():
            if address not in self._inputs:
                kinds[address in self._weights] += storage.nbytes()
        return Saved(kinds[False], kinds[True])

    def _save(self, tensor: Tensor) -> Tensor:
        self._saved.update(_storages([tensor]))
        return tensor

    def _cast(self, source: Tensor, target: Tensor) -> None:
        if source.dtype == target.dtype or not {source.dtype, target.dtype} <= set(_FLOATS):
            return
        if next(iter(_storages([source]))) in self._weights:
            self._weights.update(_storages([target]))
            self.weights.add(source, target)
        else:
            if next(iter(_storages([source]))) in self._inputs:
                self._inputs.update(_storages([target]))
            (self.gradients if _makes_a_gradient(target) else self.activations).add(source, target)


def allocates(func: Any) -> bool:
    """True for an operator that allocates and computes nothing."""
    found: bool = func.name().startswith(_NOTHING)
    return found


def _makes_a_gradient(made: Tensor) -> bool:
    """True if the autograd node that runs now passes ``made`` on as a parameter's gradient.

    It may pass it directly, or through the node that reads a working copy.
    """
    node: Any = torch._C._current_autograd_node()
    readers = [reader for reader, _ in node.next_functions if reader] if node is not None else []
    further = [nexts[0][0] for r in readers if len(nexts := r.next_functions) == 1 and "UnsafeView" in r.name()]
    found = (r for r in (*readers, *further) if hasattr(r, "variable"))
    return any(reader.variable.shape == made.shape for reader in found)


def _storages(tensors: Iterable[Any]) -> dict[int, torch.UntypedStorage]:
    found = (tensor.untyped_storage() for tensor in tensors if isinstance(tensor, Tensor))
    return {storage._cdata: storage for storage in found}


def count(model: nn.Module, inputs: Iterable[Any], work: Callable[[], object]) -> Counter:
    """Run ``work``, which calls ``model`` on ``inputs``, and return the counts."""
    with Counter(model, inputs) as counter:
        work()
    return counter
