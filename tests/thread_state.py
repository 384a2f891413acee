"""What a thread, and the process, has switched on in torch: no conversion may change it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

__all__ = ["thread_state"]

_functorch: Any = torch._C._functorch
_autograd: Any = torch._C._autograd


def thread_state(*, random_numbers: bool = True) -> dict[str, object]:
    """Return torch's state of this thread by name, in values that compare."""
    level = torch._C._enter_dual_level()  # the first that is free
    torch._C._exit_dual_level(level=level)
    stack = _functorch.get_interpreter_stack() or []
    kinds = torch._C._autocast_supported_devices()
    return {
        "dispatch keys": (
            str(torch._C._dispatch_tls_local_include_set()),
            str(torch._C._dispatch_tls_local_exclude_set()),
        ),
        "functorch levels": [(one.key(), one.level()) for one in stack],
        "inplace requires_grad": _functorch.get_inplace_requires_grad_allowed(),
        "forward-mode level": level,
        "forward-mode enabled": torch._C._is_fwd_grad_enabled(),
        "saved tensors hooks": _autograd._top_saved_tensors_default_hooks(True),
        "saved tensors hooks disabled": _autograd._saved_tensors_hooks_get_disabled_error_message(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "multithreading": torch.autograd.is_multithreading_enabled(),
        "autocast": [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds],
        "autocast cache": torch.is_autocast_cache_enabled(),
        "function modes": torch._C._len_torch_function_stack(),
        "function modes enabled": torch._C._is_torch_function_enabled(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "deterministic": (torch.are_deterministic_algorithms_enabled(), torch.get_deterministic_debug_mode()),
        "fast attention": torch.backends.mha.get_fastpath_enabled(),
        "dynamo": torch._C._dynamo.eval_frame.get_eval_frame_callback(),
        **(_random_numbers() if random_numbers else {}),
    }


def _random_numbers() -> dict[str, object]:
    return {
        "random": torch.get_rng_state().tolist(),
        "Python's random": random.getstate(),
        "numpy's random": str(np.random.get_state(legacy=False)),
    }
