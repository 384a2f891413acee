"""Keep what capture and conversion execute apart from the caller's thread state in torch."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["own_thread_state"]

_C: Any = torch._C
_autograd: Any = _C._autograd
_functorch: Any = _C._functorch


@contextmanager
def own_thread_state() -> Generator[None, None, None]:
    """Trace and run graphs without the caller's hooks on saved tensors; afterwards torch's thread state is as before.

    Activation checkpointing has such hooks, and counts what is saved; others copy each tensor, which a traced one does
    not allow. A graph may hold the halves of what Python pairs: it opens a level of ``torch.func``, forbids such hooks,
    or switches gradients, and closes or switches back in a later node, which an error, or a run of some nodes alone,
    never reaches.
    """
    hooks, forbidden = _take_hooks(), _autograd._saved_tensors_hooks_get_disabled_error_message()
    _autograd._saved_tensors_hooks_enable()
    depth: int = _functorch.get_dynamic_layer_stack_depth()
    restored = [(switch, read()) for read, switch in _SWITCHES]
    autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    keys = _C._dispatch_tls_local_include_set(), _C._dispatch_tls_local_exclude_set()
    try:
        with _C._ForceDispatchKeyGuard(*keys):  # an error inside a transform leaves keys of its level
            yield
    finally:
        while _functorch.get_dynamic_layer_stack_depth() > depth:  # torch 2.11's own loop fails below the first level
            _CLOSE[_functorch.peek_interpreter_stack().key().name]()
        for switch, value in restored:
            switch(value)
        for kind, is_on, dtype in autocast:
            torch.set_autocast_enabled(kind, is_on)
            torch.set_autocast_dtype(kind, dtype)
        _autograd._saved_tensors_hooks_enable()
        for pair in reversed(hooks):
            _autograd._push_saved_tensors_default_hooks(*pair)
        if forbidden is not None:
            _autograd._saved_tensors_hooks_disable(forbidden, False)


_SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (_C.is_grad_enabled, _C._set_grad_enabled),
    (_C._is_fwd_grad_enabled, _C._set_fwd_grad_enabled),
    (_C.is_autocast_cache_enabled, _C.set_autocast_cache_enabled),
    (_functorch.get_inplace_requires_grad_allowed, _functorch.set_inplace_requires_grad_allowed),
)


_CLOSE: Mapping[str, Callable[[], object]] = {
    "Vmap": _functorch._vmap_decrement_nesting,
    "Grad": _functorch._grad_decrement_nesting,
    "Jvp": _functorch._jvp_decrement_nesting,
    "Functionalize": _functorch._func_decrement_nesting,
}


def _take_hooks() -> list[tuple[Any, Any]]:
    """Take the thread's hooks on saved tensors away, and return them, the innermost first."""
    found: list[tuple[Any, Any]] = []
    while (pair := _autograd._top_saved_tensors_default_hooks(True)) is not None:
        found.append(pair)
        _autograd._pop_saved_tensors_default_hooks()
    return found
