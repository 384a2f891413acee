"""Mixed precision for PyTorch as a graph rewrite: every cast is a node, every decision has a reason.

A name is imported when it is first asked for. Errors and warnings are in :mod:`autocastfx.errors`.
"""

# ruff: noqa: E402
from autocastfx.cli.before_import import begin_command

__version__ = "0.1.0"

begin_command(__version__)  # before the other imports, which take seconds

from importlib import import_module
from typing import TYPE_CHECKING, Any

# What saved graphs call by name is there as soon as the package is.
for _name in ("casts", "cross_entropy_loss", "float8", "norms", "quick_gelu", "short_attention", "tf32", "wide_linear"):
    import_module(f"autocastfx.runtime.operators.{_name}")
import_module("autocastfx.capture.data_writes")

if TYPE_CHECKING:
    from autocastfx.calibration import calibrate
    from autocastfx.conversion import convert, convert_function
    from autocastfx.integrations.backend import CompileBackend, backend_of, disable, enable
    from autocastfx.numerics.bisect import bisect
    from autocastfx.numerics.check import check
    from autocastfx.numerics.compare import compare
    from autocastfx.numerics.find_overflow import find_overflow
    from autocastfx.numerics.gradient_histogram import gradient_histogram
    from autocastfx.numerics.logprob_gap import logprob_gap
    from autocastfx.numerics.plan_search import Budget
    from autocastfx.numerics.sensitivity import sensitivity
    from autocastfx.numerics.time import time
    from autocastfx.numerics.tune import tune
    from autocastfx.numerics.watch import watch
    from autocastfx.plan.plan import Plan
    from autocastfx.plan.plan_diff import diff
    from autocastfx.plan.ranges import Ranges
    from autocastfx.plan.sensitivity import Sensitivity
    from autocastfx.policy.op_list import OpList, load_op_list, presets
    from autocastfx.report.comparison import Comparison
    from autocastfx.report.dump import dump, show
    from autocastfx.report.explain import explain
    from autocastfx.report.lint.lint import lint
    from autocastfx.report.lint.roofline import Gpu
    from autocastfx.runtime.amp_module import AmpModule
    from autocastfx.training.grad_scaler import GradScaler
    from autocastfx.training.loss_scale import DynamicLossScale, NoLossScale, StaticLossScale, suggest_loss_scale
    from autocastfx.training.loss_scaler import LossScaler
    from autocastfx.training.optimizer import LossScalingOptimizer, StepResult

__all__ = [
    "AmpModule",
    "Budget",
    "Comparison",
    "CompileBackend",
    "DynamicLossScale",
    "Gpu",
    "GradScaler",
    "LossScaler",
    "LossScalingOptimizer",
    "NoLossScale",
    "OpList",
    "Plan",
    "Ranges",
    "Sensitivity",
    "StaticLossScale",
    "StepResult",
    "__version__",
    "backend_of",
    "bisect",
    "calibrate",
    "check",
    "compare",
    "convert",
    "convert_function",
    "diff",
    "disable",
    "dump",
    "enable",
    "explain",
    "find_overflow",
    "gradient_histogram",
    "lint",
    "load_op_list",
    "logprob_gap",
    "presets",
    "sensitivity",
    "show",
    "suggest_loss_scale",
    "time",
    "tune",
    "watch",
]

# The modules that have the names above.
_HOMES = {
    "calibration": "calibrate",
    "conversion": "convert convert_function",
    "integrations.backend": "CompileBackend backend_of disable enable",
    "numerics.bisect": "bisect",
    "numerics.check": "check",
    "numerics.compare": "compare",
    "numerics.find_overflow": "find_overflow",
    "numerics.gradient_histogram": "gradient_histogram",
    "numerics.logprob_gap": "logprob_gap",
    "numerics.plan_search": "Budget",
    "numerics.sensitivity": "sensitivity",
    "numerics.time": "time",
    "numerics.tune": "tune",
    "numerics.watch": "watch",
    "plan.plan": "Plan",
    "plan.plan_diff": "diff",
    "plan.ranges": "Ranges",
    "plan.sensitivity": "Sensitivity",
    "policy.op_list": "OpList load_op_list presets",
    "report.comparison": "Comparison",
    "report.dump": "dump show",
    "report.explain": "explain",
    "report.lint.lint": "lint",
    "report.lint.roofline": "Gpu",
    "runtime.amp_module": "AmpModule",
    "training.grad_scaler": "GradScaler",
    "training.loss_scale": "DynamicLossScale NoLossScale StaticLossScale suggest_loss_scale",
    "training.loss_scaler": "LossScaler",
    "training.optimizer": "LossScalingOptimizer StepResult",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'autocastfx' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"autocastfx.{_HOME_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    return [*__all__]
