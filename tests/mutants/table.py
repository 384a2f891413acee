"""Which modules mutants are planted into, and the tests that concern each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

MODULES = (
    "passes/*.py",
    "passes/*/*.py",
    "capture/masks.py",
    *(f"graph/{name}.py" for name in ("alias", "sizes", "magnitude", "node")),
    *(f"plan/{name}.py" for name in ("plan", "edited_plan")),
    *(
        f"training/{name}.py"
        for name in ("optimizer", "gradients", "loss_scale", "loss_scaler", "masters", "split_masters")
    ),
    "policy/*.py",
    *(f"runtime/{name}.py" for name in ("working_copies", "captures")),
    *(f"numerics/{name}.py" for name in ("compare", "bisect", "find_overflow", "mended_run", "paired_run", "watch")),
)

# Beside the test file and the folder that mirror a module: the others that exercise it, the quickest first.
_LISTS = (
    "policy/test_op_list.py",
    "policy/test_yaml_tree.py",
    "policy/test_match.py",
    "policy/test_read_rules.py",
    "policy/test_write_list.py",
)
_STEPS = (
    "training/test_optimizer.py",
    "training/test_gradients.py",
    "training/test_masters.py",
    "training/test_loss_scaler.py",
)
_MANY = ("training/loss_scale/test_host_copy.py", "training/optimizer/test_optimizer_distributed.py")
_PLACING = ("passes/test_place.py", "passes/analysis/test_place_cheaply.py")
_WRITES = (
    "passes/recompose/test_merge_repeated.py",
    "invariants/test_mutation.py",
    "capture/masks/test_constant_masks.py",
)
_AUTOCAST = ("passes/torch_autocast/test_insert_casts.py", "passes/torch_autocast/test_expand.py")
_LOW_WEIGHTS = ("runtime/test_stored_low.py", "runtime/test_working_copies.py")
_FLOAT8 = ("passes/test_float8.py", "numerics/test_float8_search.py", "numerics/check/test_float8_check.py")
_OTHERS = "test_conversion.py"
_VARIANTS = ("runtime/amp_module/test_module_protocol.py", "capture/mended/test_python_state.py", _OTHERS)

ALSO: dict[str, tuple[str, ...]] = {
    "passes/decide/checks.py": (
        "graph/sizes/test_product.py",
        "passes/analysis/value_ranges/test_masks.py",
        "policy/test_match.py",
        "passes/analysis/exact_numbers/test_whole_numbers.py",
    ),
    "passes/insert_casts.py": (
        "passes/test_casts.py",
        "passes/analysis/units/test_cross_entropy.py",
        "invariants/test_casts.py",
        "passes/analysis/value_ranges/test_masks.py",
        *_PLACING,
        *_LOW_WEIGHTS,
        "invariants/test_tying.py",
    ),
    "passes/pipeline.py": (
        *("passes/test_state.py", _OTHERS),
        "runtime/test_stored_low.py",
        "plan/test_edited_plan.py",
        "test_calibration.py",
        *_VARIANTS,
        *("plan/test_plan.py", "report/test_dump.py", *_AUTOCAST[:1], *_LOW_WEIGHTS),
        "plan/plan/test_cause.py",
        "graph/sizes/test_product.py",
    ),
    "passes/casts.py": ("invariants/test_casts.py", *_PLACING, "invariants/test_tying.py", *_AUTOCAST),
    "passes/place.py": (
        *_PLACING,
        "plan/test_edited_plan.py",
        *_LOW_WEIGHTS,
        "numerics/test_plan_search.py",
        "numerics/test_tune.py",
    ),
    "passes/recompose.py": (
        "passes/patterns/test_patterns.py",
        "passes/patterns/patterns/test_attention.py",
        "runtime/operators/test_short_attention.py",
    ),
    "passes/verify.py": ("passes/torch_autocast/test_insert_casts.py", "invariants/test_mutation.py", *_FLOAT8[:1]),
    "passes/analysis/node_errors.py": _FLOAT8,
    "policy/float8.py": _FLOAT8[:1],
    "passes/analysis/place_cheaply.py": (*_PLACING, *_LOW_WEIGHTS, "invariants/test_islands.py"),
    "passes/widen.py": ("passes/decide/test_widening.py",),
    "passes/decide/widening.py": ("passes/test_widen.py",),
    "passes/analysis/units.py": (
        "runtime/operators/test_cross_entropy_loss.py",
        "passes/test_insert_casts.py",
        "invariants/test_mutation.py",
        *_PLACING,
    ),
    "passes/analysis/exact_numbers.py": (
        *("passes/decide/checks/test_classify.py", "passes/test_insert_casts.py", "test_calibration.py"),
        *_AUTOCAST,
        "passes/decide/test_demands.py",
    ),
    "passes/analysis/value_ranges.py": (
        "passes/decide/checks/test_classify.py",
        "invariants/test_masks.py",
        "test_calibration.py",
    ),
    "passes/analysis/min_cut.py": ("passes/analysis/test_place_cheaply.py",),
    "passes/state.py": (
        "passes/analysis/test_backward_adds.py",
        "passes/test_recompose.py",
        "passes/recompose/test_replace_attention.py",
        "test_calibration.py",
        _OTHERS,
    ),
    "passes/patterns/patterns.py": ("passes/test_recompose.py",),
    "passes/torch_autocast/dispatch.py": (*_AUTOCAST, "presets/test_registrations.py"),
    "passes/torch_autocast/expand.py": ("passes/torch_autocast/test_insert_casts.py",),
    "passes/torch_autocast/insert_casts.py": (*_AUTOCAST, _OTHERS),
    "capture": ("capture/masks/test_known_values.py", "capture/masks/test_constant_masks.py"),
    "graph/alias.py": (*_WRITES, "passes/test_insert_casts.py", "passes/recompose/test_replace_attention.py"),
    "graph/sizes.py": ("passes/decide/checks/test_classify.py",),
    "graph/magnitude.py": ("passes/analysis/value_ranges/test_masks.py", "capture/masks/test_constant_masks.py"),
    "graph/node.py": (
        "graph/sizes/test_product.py",
        "passes/analysis/exact_numbers/test_whole_numbers.py",
        "graph/test_sizes.py",
        "runtime/amp_module/test_observe.py",
    ),
    "training": ("training/test_loss_scale.py", *_STEPS, "training/optimizer/test_replayed_step.py", *_MANY),
    "policy/op_list.py": (
        "policy/float8/test_float8_list.py",
        "presets/test_registrations.py",
        "policy/test_match.py",
    ),
    "policy": _LISTS,
    "runtime/working_copies.py": ("runtime/test_stored_low.py",),
    "runtime/captures.py": _VARIANTS,
    "numerics/compare.py": ("numerics/paired_run/test_paired_backward.py",),
    "numerics/paired_run.py": (
        "numerics/test_compare.py",
        "numerics/test_find_overflow.py",
        "numerics/test_gradient_histogram.py",
        *_FLOAT8[:1],
    ),
    "policy/match.py": (*_LISTS, *_FLOAT8[:1]),
    "policy/read_rules.py": ("policy/float8/test_float8_list.py",),
    "policy/write_list.py": ("policy/float8/test_float8_list.py",),
    "plan/plan.py": ("report/test_dump.py", "report/test_explain.py", "report/test_reason.py", *_FLOAT8[:1]),
    "plan/proposed_list.py": ("numerics/test_mended_run.py", "numerics/test_bisect.py"),
    "numerics/find_overflow.py": ("numerics/test_mended_run.py",),
}


def modules(package: Path) -> list[str]:
    """All modules of the table, by their paths in the package."""
    found = (path for pattern in MODULES for path in sorted(package.glob(pattern)) if path.name != "__init__.py")
    return list(dict.fromkeys(path.relative_to(package).as_posix() for path in found))


def concerned(module: str, tests: Path) -> list[Path]:
    """The test files that concern ``module``, its mirror first; those of conversions where the table knows none."""
    return list(dict.fromkeys(path for path in _candidates(module, tests) if path.is_file())) or [tests / _OTHERS]


def _candidates(module: str, tests: Path) -> Iterator[Path]:
    room, _, name = module.rpartition("/")
    yield tests / room / f"test_{name}"
    yield from sorted((tests / module.removesuffix(".py")).glob("test_*.py"))
    for known in (module, room):
        yield from (tests / name for name in ALSO.get(known, ()))
