"""Models on a CUDA device that is not there: tensors have its name and sizes, but no memory."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from benchmarks.models.families import FullModel

# torch enters a tensor's device around many calls. Without CUDA it has nothing to enter it with.
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
using Guard = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>;
C10_REGISTER_GUARD_IMPL(CUDA, Guard);
"""


@cache
def stand_in_for_cuda() -> None:
    """Let torch enter CUDA devices, for the rest of the process. Skip the test where CUDA or no compiler is there."""
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is there: benchmarks.gpu converts on it")
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile a device guard with")
    folder, home = Path(mkdtemp()), Path(torch.__file__).parent
    source, library = folder / "guard.cpp", folder / "guard.so"
    source.write_text(GUARD)
    options = ("-shared", "-fPIC", "-std=c++20", f"-I{home / 'include'}", f"-L{home / 'lib'}", "-lc10")
    subprocess.run((compiler, str(source), "-o", str(library), *options), check=True)
    ctypes.CDLL(str(library))
    shutil.rmtree(folder)


def on_fake_cuda(full: FullModel) -> tuple[nn.Module, dict[str, Tensor]]:
    """Build a model in training mode and its inputs, all as fake tensors of a CUDA device."""
    stand_in_for_cuda()
    with torch.device("meta"):
        model = full.build().train()
    inputs, mode, fakes = full.inputs(), FakeTensorMode(), dict[int, Any]()

    def fake(tensor: Tensor) -> Tensor:
        with mode:
            made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cuda")
        return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made

    stores: Iterable[Any] = (inputs, *(s for owner in model.modules() for s in (owner._parameters, owner._buffers)))
    for store in stores:
        for name, tensor in store.items():
            if tensor is not None:
                if id(tensor) not in fakes:  # ties are kept; the original too, so that no other has its address
                    fakes[id(tensor)] = (tensor, fake(tensor))
                store[name] = fakes[id(tensor)][1]
    return model, inputs
