"""Abstract values of a graph: dtypes, and concrete sizes in place of symbolic ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch

from autocastfx.graph.any_size import RECURRENT
from autocastfx.graph.node import value
from autocastfx.graph.sizes import example

__all__ = ["abstract_call", "concrete_sizes", "dtypes_of", "in_dtype_of"]


def dtypes_of(abstract: Any) -> tuple[torch.dtype, ...]:
    """Return the dtypes of all tensors in an abstract value."""
    return tuple(leaf.dtype for leaf in pytree.tree_leaves(abstract) if isinstance(leaf, torch.Tensor))


def concrete_sizes(graph: fx.Graph) -> Callable[[Any], Any]:
    """Return a function that gives abstract values of ``graph`` the sizes of the example inputs.

    It is the identity if any size in the graph depends on data, because such a size has no example. Data-dependent
    floats and booleans become 1: no dtype depends on them.
    """
    leaves = [leaf for node in graph.nodes for leaf in pytree.tree_leaves(value(node))]
    if any(isinstance(leaf, (torch.Tensor, torch.SymInt)) and _depends_on_data(leaf) for leaf in leaves):
        return lambda abstract: abstract
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # imports sympy, which takes long

    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())  # for a number that a tensor holds
    made: dict[int, tuple[FakeTensor, Any]] = {}  # keeps the abstract value alive, so that its id is not reused

    def concrete(leaf: Any) -> Any:
        if isinstance(leaf, FakeTensor):
            if id(leaf) not in made:
                made[id(leaf)] = leaf, _of_example_sizes(leaf, mode)
            return made[id(leaf)][1]
        found = example(leaf)
        return leaf.node.pytype(1) if found is None and isinstance(leaf, (torch.SymFloat, torch.SymBool)) else found

    def concrete_value(abstract: Any) -> Any:
        is_leaf = isinstance(abstract, torch.Tensor)
        return concrete(abstract) if is_leaf else pytree.tree_map(concrete, abstract)

    return concrete_value


def in_dtype_of(captured: Any, actual: Any) -> Any:
    """The abstract value ``captured`` in the dtype of ``actual``."""
    if not isinstance(captured, torch.Tensor) or captured.dtype == actual.dtype:
        return captured
    if not isinstance(captured, FakeTensor) or captured.layout != torch.strided:
        return actual
    with captured.fake_mode:
        return torch.empty_strided(captured.shape, captured.stride(), dtype=actual.dtype, device=captured.device)


def abstract_call(target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call ``target`` on abstract values, without gradients and without an ambient autocast."""
    leaves = pytree.tree_leaves((args, kwargs))
    mode = next((leaf.fake_mode for leaf in leaves if isinstance(leaf, FakeTensor)), None)
    if mode is None:
        return target(*args, **kwargs)
    with mode, torch._C._DisableAutocast(), enable_python_dispatcher(), torch.no_grad():  # it knows symbolic sizes
        return RECURRENT.get(target, target)(*args, **kwargs)


def _of_example_sizes(abstract: FakeTensor, mode: FakeTensorMode) -> FakeTensor:
    """Do as ``torch.empty_strided`` under ``mode``, but without dispatch, which takes most of the time."""
    sizes = [example(n) for n in abstract.shape], [example(n) for n in abstract.stride()]
    with no_dispatch():
        elements = torch.empty_strided(*sizes, dtype=abstract.dtype, device="meta")
    return FakeTensor(mode, elements, abstract.device)


def _depends_on_data(leaf: torch.Tensor | torch.SymInt) -> bool:
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    if isinstance(leaf, torch.Tensor) and leaf.layout != torch.strided:
        return True
    return bool(free_unbacked_symbols(leaf))
