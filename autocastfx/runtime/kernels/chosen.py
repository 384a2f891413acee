"""Decides where an operator computes with its Triton kernels.

On CUDA they are chosen where op_lists/kernel_facts.yaml says that they are measured faster. The environment variable
``AUTOCASTFX_TRITON`` chooses instead: names of operators separated by commas, or ``all``, or ``none``. It is read once.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

from torch import Tensor

from autocastfx.errors import MissingExtraError, UnsupportedError
from autocastfx.policy.kernel_facts import load_kernel_facts

KERNELS = frozenset({"cross_entropy_loss", "quantize", "rms_norm", "optimizer_step"})  # the last: training/copying_step
VARIABLE = "AUTOCASTFX_TRITON"


def is_chosen(name: str, tensor: Tensor) -> bool:
    """True if the operator of this name computes with Triton kernels on the device of ``tensor``.

    Raises:
        UnsupportedError: ``AUTOCASTFX_TRITON`` names an operator without Triton kernels.
        MissingExtraError: it asks for kernels, and Triton is not installed.
    """
    return tensor.is_cuda and name in names_chosen()


@cache
def names_chosen() -> frozenset[str]:
    """Return the operators that use Triton kernels on CUDA."""
    asked = os.environ.get(VARIABLE)
    if asked is None:
        faster = load_kernel_facts().triton_faster.get("cuda", frozenset())
        return faster & KERNELS if find_spec("triton") else frozenset()
    names = KERNELS if asked == "all" else frozenset(filter(None, asked.replace("none", "").split(",")))
    if unknown := names - KERNELS:
        raise UnsupportedError(
            f"{VARIABLE}={asked}: no operator named {', '.join(sorted(unknown))} has Triton kernels; "
            f"name some of {', '.join(sorted(KERNELS))}, or all, or none."
        )
    if names and not find_spec("triton"):
        raise MissingExtraError(f"{VARIABLE}={asked}: the package triton is not installed: install it, or unset this.")
    return names
