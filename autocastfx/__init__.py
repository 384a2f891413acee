"""Mixed precision for PyTorch as a graph rewrite: every cast is a node, every decision has a reason."""

# ruff: noqa: E402
from autocastfx.cli.interrupt import end_when_interrupted

end_when_interrupted()  # before the other imports, which take seconds

from autocastfx.calibration import calibrate
from autocastfx.conversion import convert
from autocastfx.errors import (
    AutocastFXError,
    BannedOpError,
    BisectError,
    CalibrationError,
    CaptureError,
    EvaluationsError,
    GpuError,
    LossScaleError,
    ManyVariantsWarning,
    MissingExtraError,
    NodeError,
    NotCapturedError,
    OpListError,
    PlanError,
    ScaledGradientsWarning,
    SensitivityError,
    SkippedStepWarning,
    StateWarning,
    UncapturedGraphWarning,
    UnmatchedPlanWarning,
    UnmatchedRuleWarning,
    UnsupportedError,
    VariantError,
    VerifyError,
)
from autocastfx.integrations.backend import CompileBackend, backend_of, disable, enable
from autocastfx.numerics.bisect import Bisection, Place, bisect
from autocastfx.numerics.check import Check, CheckedValue, check
from autocastfx.numerics.compare import compare
from autocastfx.numerics.find_overflow import InputRange, Overflow, find_overflow
from autocastfx.numerics.gradient_histogram import Exponents, GradientHistogram, Margin, Shares, gradient_histogram
from autocastfx.numerics.logprob_gap import LogprobGap, logprob_gap
from autocastfx.numerics.plan_search import Budget, Point
from autocastfx.numerics.sensitivity import sensitivity
from autocastfx.numerics.tune import Tuned, tune
from autocastfx.numerics.watch import SkippedStep, Watch, WatchedNode, watch
from autocastfx.plan.plan import (
    Cause,
    Decision,
    Forced,
    Placement,
    Plan,
    PlannedCast,
    PlannedCopy,
    PlannedNode,
    Precision,
    Recomposed,
    Why,
)
from autocastfx.plan.plan_diff import Difference, PlanDiff, diff
from autocastfx.plan.ranges import Range, Ranges
from autocastfx.plan.sensitivity import Effect, Sensitivity
from autocastfx.policy.op_list import OpList, load_op_list, presets
from autocastfx.policy.rule import Category, ModuleRule, Rule
from autocastfx.policy.write_list import Change
from autocastfx.report.comparison import (
    Beginning,
    ComparedNode,
    ComparedParameter,
    ComparedVariant,
    Comparison,
    Deviation,
)
from autocastfx.report.compiled_graph import CompiledGraph
from autocastfx.report.dump import Page, dump, show
from autocastfx.report.explain import explain
from autocastfx.report.lint.lint import Lint, OpEstimate, lint
from autocastfx.report.lint.odd_size import OddSize
from autocastfx.report.lint.roofline import Gpu, Total
from autocastfx.runtime.amp_module import AmpModule
from autocastfx.training.grad_scaler import GradScaler
from autocastfx.training.loss_scale import DynamicLossScale, NoLossScale, StaticLossScale, suggest_loss_scale
from autocastfx.training.loss_scaler import LossScaler
from autocastfx.training.optimizer import LossScalingOptimizer, StepResult

__version__ = "0.1.0"

__all__ = [
    "AmpModule",
    "AutocastFXError",
    "BannedOpError",
    "Beginning",
    "BisectError",
    "Bisection",
    "Budget",
    "CalibrationError",
    "CaptureError",
    "Category",
    "Cause",
    "Change",
    "Check",
    "CheckedValue",
    "ComparedNode",
    "ComparedParameter",
    "ComparedVariant",
    "Comparison",
    "CompileBackend",
    "CompiledGraph",
    "Decision",
    "Deviation",
    "Difference",
    "DynamicLossScale",
    "Effect",
    "EvaluationsError",
    "Exponents",
    "Forced",
    "Gpu",
    "GpuError",
    "GradScaler",
    "GradientHistogram",
    "InputRange",
    "Lint",
    "LogprobGap",
    "LossScaleError",
    "LossScaler",
    "LossScalingOptimizer",
    "ManyVariantsWarning",
    "Margin",
    "MissingExtraError",
    "ModuleRule",
    "NoLossScale",
    "NodeError",
    "NotCapturedError",
    "OddSize",
    "OpEstimate",
    "OpList",
    "OpListError",
    "Overflow",
    "Page",
    "Place",
    "Placement",
    "Plan",
    "PlanDiff",
    "PlanError",
    "PlannedCast",
    "PlannedCopy",
    "PlannedNode",
    "Point",
    "Precision",
    "Range",
    "Ranges",
    "Recomposed",
    "Rule",
    "ScaledGradientsWarning",
    "Sensitivity",
    "SensitivityError",
    "Shares",
    "SkippedStep",
    "SkippedStepWarning",
    "StateWarning",
    "StaticLossScale",
    "StepResult",
    "Total",
    "Tuned",
    "UncapturedGraphWarning",
    "UnmatchedPlanWarning",
    "UnmatchedRuleWarning",
    "UnsupportedError",
    "VariantError",
    "VerifyError",
    "Watch",
    "WatchedNode",
    "Why",
    "__version__",
    "backend_of",
    "bisect",
    "calibrate",
    "check",
    "compare",
    "convert",
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
    "tune",
    "watch",
]
