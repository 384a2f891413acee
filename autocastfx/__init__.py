"""Mixed precision for PyTorch as a graph rewrite: every cast is a node, every decision has a reason."""

from autocastfx.amp_module import AmpModule
from autocastfx.calibrate import calibrate
from autocastfx.convert import convert
from autocastfx.dump import dump
from autocastfx.errors import (
    AutocastFXError,
    BannedOpError,
    BisectError,
    CalibrationError,
    CaptureError,
    EvaluationsError,
    LossScaleError,
    MissingExtraError,
    NodeError,
    NotCapturedError,
    OpListError,
    PlanError,
    UnmatchedPlanWarning,
    UnmatchedRuleWarning,
    UnsupportedError,
    VariantError,
    VerifyError,
)
from autocastfx.explain import explain
from autocastfx.exponents import Exponents, Shares
from autocastfx.gradient_histogram import GradientHistogram, gradient_histogram
from autocastfx.loss_scale import DynamicLossScale, NoLossScale, StaticLossScale, suggest_loss_scale
from autocastfx.loss_scaler import LossScaler
from autocastfx.numerics.bisect import Bisection, Place, bisect
from autocastfx.numerics.compare import compare
from autocastfx.numerics.comparison import ComparedNode, ComparedParameter, ComparedVariant, Comparison
from autocastfx.numerics.deviation import Deviation
from autocastfx.numerics.find_overflow import InputRange, Overflow, find_overflow
from autocastfx.op_list import Category, Change, ModuleRule, OpList, Rule, load_op_list, presets
from autocastfx.optimizer import LossScalingOptimizer
from autocastfx.plan import Decision, Placement, Plan, PlannedCast, PlannedCopy, PlannedNode, Precision, Recomposed
from autocastfx.plan_diff import Difference, PlanDiff, diff
from autocastfx.ranges import Range, Ranges
from autocastfx.step_result import StepResult

__version__ = "0.1.0"

__all__ = [
    "AmpModule",
    "AutocastFXError",
    "BannedOpError",
    "BisectError",
    "Bisection",
    "CalibrationError",
    "CaptureError",
    "Category",
    "Change",
    "ComparedNode",
    "ComparedParameter",
    "ComparedVariant",
    "Comparison",
    "Decision",
    "Deviation",
    "Difference",
    "DynamicLossScale",
    "EvaluationsError",
    "Exponents",
    "GradientHistogram",
    "InputRange",
    "LossScaleError",
    "LossScaler",
    "LossScalingOptimizer",
    "MissingExtraError",
    "ModuleRule",
    "NoLossScale",
    "NodeError",
    "NotCapturedError",
    "OpList",
    "OpListError",
    "Overflow",
    "Place",
    "Placement",
    "Plan",
    "PlanDiff",
    "PlanError",
    "PlannedCast",
    "PlannedCopy",
    "PlannedNode",
    "Precision",
    "Range",
    "Ranges",
    "Recomposed",
    "Rule",
    "Shares",
    "StaticLossScale",
    "StepResult",
    "UnmatchedPlanWarning",
    "UnmatchedRuleWarning",
    "UnsupportedError",
    "VariantError",
    "VerifyError",
    "__version__",
    "bisect",
    "calibrate",
    "compare",
    "convert",
    "diff",
    "dump",
    "explain",
    "find_overflow",
    "gradient_histogram",
    "load_op_list",
    "presets",
    "suggest_loss_scale",
]
