"""Mixed precision for PyTorch as a graph rewrite: every cast is a node, every decision has a reason."""

from autocastfx.amp_module import AmpModule
from autocastfx.convert import convert
from autocastfx.dump import dump
from autocastfx.errors import (
    AutocastFXError,
    BannedOpError,
    CaptureError,
    OpListError,
    UnsupportedError,
    VariantError,
    VerifyError,
)
from autocastfx.op_list import Category, OpList, load_op_list, presets
from autocastfx.plan import Decision, Placement, Plan, PlannedCast, PlannedNode, Precision, Recomposed

__version__ = "0.1.0"

__all__ = [
    "AmpModule",
    "AutocastFXError",
    "BannedOpError",
    "CaptureError",
    "Category",
    "Decision",
    "OpList",
    "OpListError",
    "Placement",
    "Plan",
    "PlannedCast",
    "PlannedNode",
    "Precision",
    "Recomposed",
    "UnsupportedError",
    "VariantError",
    "VerifyError",
    "__version__",
    "convert",
    "dump",
    "load_op_list",
    "presets",
]
