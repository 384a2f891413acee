"""A user's code, as a type checker sees it beside the installed wheel; `make wheel` runs basedpyright on it, strictly.

It is no pytest module. ``assert_type`` fails if the package's types do not reach a user, as without ``py.typed``.
"""

from __future__ import annotations

import torch
from torch import nn
from typing_extensions import assert_type

import autocastfx

model = nn.Sequential(nn.Linear(4, 4))
amp_model = autocastfx.convert(model, torch.ones(2, 4), dtype="bfloat16", op_list=["default"])
assert_type(amp_model, autocastfx.AmpModule)
assert_type(amp_model.plan, autocastfx.Plan)
assert_type([node.name for node in amp_model.plan.nodes], list[str])
assert_type(autocastfx.dump(amp_model, "model.html"), str)
assert_type(autocastfx.enable(model), nn.Sequential)
assert_type(autocastfx.disable(model), nn.Sequential)
assert_type(autocastfx.convert(torch.softmax, dtype="bfloat16"), autocastfx.AmpModule)
assert_type(autocastfx.convert_function(torch.softmax), autocastfx.AmpModule)
assert_type(autocastfx.convert_function(dtype="bfloat16")(torch.softmax), autocastfx.AmpModule)
optimizer = autocastfx.LossScalingOptimizer(torch.optim.SGD(amp_model.parameters(), lr=0.1))
assert_type(optimizer.last_step.skipped, bool)
autocastfx.convert(model, dtype=16)  # pyright: ignore[reportArgumentType]
