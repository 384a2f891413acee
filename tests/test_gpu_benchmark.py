"""``python -m benchmarks.gpu`` on a CPU with tiny models."""

from __future__ import annotations

import gc
import inspect
import os
import pickle
import re
import shutil
import subprocess
import sys
import unittest
import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import autocastfx
from autocastfx.runtime.regions import Region
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import rows, sides, table
from benchmarks.gpu.plan import BASIC, CALLS, LIGER, RIVALS, STEPS, TIMED, plan
from benchmarks.gpu.stage import Given, Rounds
from benchmarks.gpu.stages import samples, steps, suite, without_waiting
from benchmarks.machine import processor
from benchmarks.models import gpu as models
from benchmarks.models.families import FullModel
from benchmarks.training import (
    AUTOCAST,
    DEFAULT,
    EAGER,
    FLOAT32,
    FURTHER,
    FUSED,
    HALF,
    O2,
    RECOMPUTE,
    SIDES,
    TF32,
    Setting,
    Training,
)

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows of the first call, run in a copy of the files that it needs, without git."""
    folder = tmp_path_factory.mktemp("gpu")
    for name in ("autocastfx", "benchmarks", "op_lists"):
        (folder / name).symlink_to(ROOT / name)
    ran = _command(folder, "--out", "out", "--call", "1")
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout) <= command.SHOWN + 1
    return folder / "out"


def _command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command on a CPU as on the machine with the GPU: in the folder of the checkout, nothing installed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    asked = (sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--tiny", *arguments)
    return subprocess.run(asked, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def _all_are_there(call: int, found: list[dict[str, Any]]) -> None:
    for stage in plan([call], "cpu", is_tiny=True):
        mine = [row for row in found if row["stage"] == stage.name]
        assert mine, stage.name
        assert not [row for row in mine if "error" in row]
        assert {row["card"] for row in mine} == {f"CPU: {processor()}"}
        if stage.skip:
            assert [row["skipped"] for row in mine] == [stage.skip]
            assert stage.skip in ("needs CUDA", "needs the package liger_kernel")
        else:
            assert mine[-1]["done"]
            assert len(mine) > 1


def test_every_stage_leaves_rows_or_says_why_not(tiny: Path) -> None:
    _all_are_there(1, rows.read(tiny))
    assert {row["commit"] for row in rows.read(tiny)} == {"unknown"}, "there is no git"


@pytest.mark.slow
def test_the_second_call_goes_on_with_the_first(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path / "out")
    ran = _command(tiny.parent, "--out", str(tmp_path / "out"), "--call", "2", "--resume", str(tmp_path / "out"))
    assert ran.returncode == 0, ran.stderr
    found = rows.read(tmp_path / "out")
    assert found[: len(rows.read(tiny))] == rows.read(tiny)
    _all_are_there(2, [row for row in found if row["call"] == 2 or row["stage"] == "environment"])
    timed = [row for row in rows.latest(found) if "side" in row]
    compiled = (AUTOCAST, DEFAULT, FUSED, EAGER)
    for kind, given in (("rival", {"ResNet tiny": RIVALS}), ("compiled", {"MLP tiny": compiled})):
        _all_are_measured([row for row in timed if row["stage"].startswith(kind)], given, ("float16",))


def test_every_stage_on_a_gpu_can_be_called() -> None:
    """The part that a machine without a GPU can test."""
    stages = plan(list(CALLS), "cuda", is_tiny=False)
    assert len({stage.name for stage in stages}) == len(stages)
    for stage in stages:
        assert stage.skip in ("", "needs the package liger_kernel")
        assert [path for path in stage.paths if not (ROOT / path).exists()] == []
        assert pickle.loads(pickle.dumps(stage)) == stage
        inspect.signature(stage.function()).bind(Given("cuda"), **stage.options)
        named = stage.options.get("models", [stage.options["model"]] if "model" in stage.options else [])
        assert {*named} <= models.MODELS.keys()
        assert {*stage.options.get("sides", ())} <= {*SIDES, *FURTHER}
        assert stage.alone or "step" not in stage.name


def test_the_first_call_reaches_the_steps_of_all_models() -> None:
    """Though each takes as long as it may: smoke and eight models, with a minute to prepare them."""
    stages = plan([1], "cuda", is_tiny=False)
    assert [stage.name for stage in stages[2:10]] == [f"eager step, {model}" for model in STEPS]
    assert all(stage.options["sides"] == TIMED for stage in stages[2:10])
    assert sum(stage.seconds for stage in stages[2:10]) + 60 < 7.9 * 60


def test_all_files_with_tests_that_need_a_gpu_are_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "_tested", lambda name: {})
    ran: list[str] = []
    for stage in plan(list(CALLS), "cuda", is_tiny=False):
        if stage.name.startswith("tests"):
            ran += [row["model"] for row in stage.function()(Given("cuda"), **stage.options)]
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if suite.MARK in path.read_text(encoding="utf-8")]
    assert sorted(ran) == sorted(path.relative_to(ROOT).as_posix() for path in marked)
    assert len(ran) > 5


def test_each_side_is_measured_and_compared_with_its_baseline(tiny: Path) -> None:
    found = [row for row in rows.latest(rows.read(tiny)) if "side" in row]
    steps_of = [row for row in found if row["stage"].startswith("eager step")]
    given = {"MLP tiny": TIMED, "ResNet tiny": BASIC, "BERT tiny": BASIC}
    _all_are_measured(steps_of, given, tuple(sides.DTYPES))
    updates = [row for row in found if row["stage"] == "optimizer" and "step_ms" in row]
    assert [(row["model"], row["side"]) for row in updates] == [
        *(("4 x 16", side) for side in ("GradScaler", "LossScalingOptimizer", "bare")),
        *(("4 x 16, clipped", side) for side in ("GradScaler", "LossScalingOptimizer")),
    ]
    assert {row["side"] for row in updates if row["step_to_grad_scaler"] == [1, 1, 1]} == {"GradScaler"}
    parity = [row for row in found if row["stage"].startswith("parity")]
    assert len(parity) == 2 * 6, "float32, torch.autocast and four sides, in two dtypes"
    assert all(row["gradients_error"] < 1e-5 for row in parity if row["side"] == "float32")
    assert all(row["gradients_to_autocast"] < 1.2 for row in parity if row["side"].endswith("fold=exact"))


def _all_are_measured(
    found: list[dict[str, Any]], given: Mapping[str, Sequence[str]], dtypes: Sequence[str], baseline: str = AUTOCAST
) -> None:
    """Each side of each model was timed in all three ways, beside the others."""
    wanted = {(model, side, dtype) for model, named in given.items() for side in named for dtype in dtypes}
    for after in ("", steps.KERNELS):
        mine = [row for row in found if row["model"].endswith(steps.KERNELS) == bool(after)]
        assert {(row["model"].removesuffix(after), row["side"], row["dtype"]) for row in mine} == wanted
        for row in mine:
            assert row["rounds"] >= 2
            assert "partial" not in row
            for key in ("kernels",) if after else ("step", "queued"):
                assert row[f"{key}_ms"] > 0
                assert len(row[f"{key}_quartiles"]) == 3
                assert (row[f"{key}_to_autocast"] == [1, 1, 1]) == (row["side"] == baseline)
            if not after:
                assert row["step_ms"] > row["backward_ms"] > 0
                assert row["items"] > 0
                assert row["flops"] > 0


def test_steps_whose_kernels_were_not_reached_are_timed_again() -> None:
    def timed(*names: str) -> list[str]:
        given = Given("cpu", frozenset((name, AUTOCAST, "bfloat16") for name in names))
        found = steps.steps(given, "MLP tiny", (AUTOCAST,), ("bfloat16",), rounds=Rounds(2, 2, 0, 1, 2))
        return [row["model"] for row in found]

    both = timed("MLP tiny")
    assert both == ["MLP tiny", f"MLP tiny{steps.KERNELS}"]
    assert timed(*both) == []


IN_ONE_PROCESS = """
import sys
from pathlib import Path
from benchmarks.gpu import rows
from benchmarks.gpu.plan import plan
from benchmarks.gpu.stage import Given
for stage in plan([1], "cpu", is_tiny=True):
    made = [{"skipped": stage.skip}] if stage.skip else list(stage.function()(Given("cpu"), **stage.options))
    assert made, stage.name
    assert not [row for row in made if "error" in row]
    for row in made:
        rows.append(Path(sys.argv[1]), {"card": "card", "call": 1, "commit": "unknown", "stage": stage.name, **row})
"""


def test_each_stage_of_the_first_call_is_in_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The stages run in one process here; the command runs each in one of its own."""
    run = (sys.executable, "-c", IN_ONE_PROCESS, str(tmp_path))
    ran = subprocess.run(run, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert table.main([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert f"torch {torch.__version__}" in shown.splitlines()[0]
    times = "step, ms | step, ratio | back to back, ms | back to back, ratio | kernels, ms | kernels, ratio"
    head = f"| model | dtype | side | {times} | tokens or images/s | number of kernels | attention |"
    assert f"\nTraining steps, in milliseconds, and as ratios to {AUTOCAST}'s:\n\n{head}\n" in shown
    ratio = r" \| [\d.]+ \| [\d.]+ \([\d.]+ to [\d.]+\)"
    assert re.search(rf"\n\| BERT tiny \| float16 \| pure half({ratio}){{3}} \| [\d,]+ \| \d+ \| ", shown)
    assert "\n- graph step, ResNet tiny: needs CUDA\n" in shown


# ---- the command line -----------------------------------------------------------------------------------------------


def test_without_minutes_no_stage_starts(tmp_path: Path) -> None:
    assert command.main(["--out", str(tmp_path), "--minutes", "0", "--call", "1", "--device", "cpu", "--tiny"]) == 0
    assert rows.read(tmp_path) == []
    assert "1: not started: environment, smoke, eager step, MLP tiny" in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--call", "3"], "argument --call: invalid choice: 3"),
        (["--minutes", "-1"], "--minutes: 0 or more"),
        (["--resume", "nowhere"], "--resume: there is no folder nowhere"),
        ([], "holds rows: go on with --resume"),
    ],
)
def test_a_mistake_is_one_error(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows.append(tmp_path, {"card": "card", "stage": "one", "done": True})
    with pytest.raises(SystemExit) as stopped:
        command.main(["--out", str(tmp_path), *arguments])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_a_missing_device_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    with pytest.raises(SystemExit):
        command.main(["--out", str(tmp_path / "out")])
    assert "--device cuda: torch sees no CUDA device" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("earlier", "first"), [(1, "smoke"), (None, "tests, others")])
def test_the_second_call_begins_with_what_is_left_of_the_first(
    earlier: int | None, first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[str] = []
    monkeypatch.setattr(command, "run", lambda stages, settings: planned.extend(stage.name for stage in stages))
    if earlier:
        rows.append(tmp_path, {"card": f"CPU: {processor()}", "call": earlier, "stage": "smoke", "error": "killed"})
    asked = ["--out", str(tmp_path), "--resume", str(tmp_path), "--device", "cpu", "--tiny", "--call", "2"]
    assert command.main(asked) == 0
    assert planned[:2] == ["environment", first]
    assert "tests, others" in planned


def _only(out: Path, *names: str, resume: Path | None = None) -> int:
    more = [argument for name in names for argument in ("--only", name)]
    more += ["--resume", str(resume)] if resume else []
    return command.main(["--out", str(out), "--device", "cpu", "--tiny", "--call", "1", *more])


def test_some_stages_alone_are_measured_again_or_gone_on_with(tmp_path: Path) -> None:
    other = tmp_path / "other"

    def ended() -> list[str]:
        return [row["stage"] for row in rows.read(tmp_path) if "done" in row or "skipped" in row]

    assert _only(tmp_path, "ceil", "graph step") == 0
    assert sorted(ended()) == ["ceilings", "environment", "graph step, ResNet tiny"]
    before = rows.read(tmp_path)
    for out, rows_of in ((tmp_path, before), (other, [])):  # nothing runs anew
        assert _only(out, "ceil", "graph step", resume=tmp_path) == 0
        assert rows.read(out) == rows_of
    assert _only(tmp_path, "ceilings") == 0
    assert sorted(ended()[3:]) == ["ceilings", "environment"]


def test_a_name_that_no_stage_begins_with_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _only(tmp_path / "out", "eager", "Ceilings")
    said = capsys.readouterr().err.splitlines()[-1]
    assert "--only Ceilings: no stage begins so; there are: environment; smoke; eager step, MLP tiny; " in said
    assert not (tmp_path / "out").exists()


# ---- stages that need CUDA, with its functions replaced --------------------------------------------------------------


@pytest.fixture
def _replaced_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter(range(1000))
    for name in ("synchronize", "reset_peak_memory_stats", "set_sync_debug_mode"):
        monkeypatch.setattr(torch.cuda, name, lambda *arguments: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: next(counts))


@pytest.mark.usefixtures("_replaced_cuda")
def test_the_memory_of_each_side_is_a_row() -> None:
    found = [*steps.memory(Given("cpu"), "MLP tiny", "float16", (AUTOCAST, DEFAULT, RECOMPUTE))]
    assert [row["side"] for row in found] == [AUTOCAST, DEFAULT, RECOMPUTE]
    assert all(row["peak"] > row["before"] for row in found)


@pytest.mark.usefixtures("_replaced_cuda")
def test_a_step_that_waits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def waits(self: torch.optim.AdamW, *arguments: Any) -> None:
        raise RuntimeError("called a synchronizing CUDA operation")

    found = [*without_waiting.synchronising(Given("cpu"), ["MLP tiny"], (AUTOCAST, DEFAULT))]
    assert [row["waits"] for row in found] == [False] * 4
    monkeypatch.setattr(without_waiting, "WARM_UP", 0)
    monkeypatch.setattr(torch.optim.AdamW, "step", waits)
    found = [*without_waiting.synchronising(Given("cpu"), ["MLP tiny"], (AUTOCAST,))]
    assert [row["why"] for row in found] == ["RuntimeError: called a synchronizing CUDA operation"] * 2


@pytest.fixture
def _replaced_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams and graphs that do nothing: what is recorded runs, and a replay runs nothing."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    nothing: Any = lambda *arguments: nullcontext()  # noqa: E731
    replaced = {"Stream": lambda: stream, "current_stream": lambda: stream, "stream": nothing, "graph": nothing}
    replaced["CUDAGraph"] = lambda: SimpleNamespace(replay=lambda: None)
    for name, function in {**replaced, "synchronize": lambda: None}.items():
        monkeypatch.setattr(torch.cuda, name, function)


@pytest.mark.usefixtures("_replaced_graphs")
def test_a_graph_keeps_what_it_reads() -> None:
    one = sides.source("MLP tiny", "cpu").side(HALF, Setting("cpu", torch.bfloat16))
    alive = [weakref.ref(part) for part in (one.model, one.inputs["x"], one.optimizer)]
    replay = steps.in_a_graph(one)
    del one
    gc.collect()
    assert all(part() is not None for part in alive)
    replay()
    del replay
    gc.collect()
    assert all(part() is None for part in alive)


@pytest.mark.usefixtures("_replaced_graphs")
@pytest.mark.parametrize("fails", [False, True])
def test_no_earlier_training_is_alive_when_steps_for_a_graph_begin(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its working copies may keep autograd nodes of the parameters that all share, on the default stream."""
    trainings: list[weakref.ref[Training]] = []
    alive: list[int] = []
    of_source = sides.Source.side

    def side(self: sides.Source, name: str, setting: Setting) -> Training:
        one = of_source(self, name, replace(setting, is_capturable=False))  # on a CPU AdamW is not
        cycle: list[Any] = [one]
        cycle.append(cycle)
        trainings.append(weakref.ref(one))
        return one

    def stream(stream: Any) -> Any:
        alive.append(sum(one() is not None for one in trainings))
        if fails:
            raise RuntimeError("no stream")
        return nullcontext()

    monkeypatch.setattr(sides.Source, "side", side)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    gc.collect()
    gc.disable()
    try:
        found = [*without_waiting.graphed(Given("cpu"), ["MLP tiny"], BASIC)]
    finally:
        gc.enable()
    assert [row.get("error", "") for row in found] == ["RuntimeError: no stream" if fails else ""] * len(found)
    assert len(trainings) == 3 * len(found) == 3 * 2 * len(BASIC)
    assert alive == [1] * len(found)


# ---- the sides ------------------------------------------------------------------------------------------------------


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4)
        self.attention_dropout = 0.1

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.second(self.drop(self.first(x)).relu()).softmax(-1).square().mean(),)


def test_sides_of_one_capture_are_what_convert_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(0))}
    monkeypatch.setitem(models.MODELS, "model", FullModel(_Model, lambda: inputs))
    found = sides.source("model", "cpu", dropout=False)
    assert isinstance(found.model, _Model)
    assert found.model.drop.p == found.model.attention_dropout == 0
    for name, dtype in sides.DTYPES.items():
        for weights, fold in (("cast", "exact"), ("cached", "kernel")):
            ours = found.converted(dtype, weights, fold)
            direct: Any = {"dtype": dtype, "weights": weights, "fold": fold, "keep_output_dtype": False}
            theirs = autocastfx.convert(found.model, (), inputs, **direct)
            assert ours.plan == theirs.plan, (name, weights, fold)
            assert ours(**inputs)[0].equal(theirs(**inputs)[0])


@pytest.mark.parametrize("name", ["MLP tiny", "ResNet tiny", "ViT-L b64"])
def test_operations_are_those_that_torch_counts(name: str) -> None:
    """Without attention's backward, which computes its scores twice."""
    inputs = models.MODELS[name].inputs()
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        found = models.MODELS[name].build().train()(**{key: tensor.to("meta") for key, tensor in inputs.items()})
        (found["loss"] if isinstance(found, dict) else found[0]).backward()
    size = steps._size(name, SimpleNamespace(inputs=inputs))  # type: ignore[arg-type]
    assert size["flops"] == pytest.approx(counter.get_total_flops())
    assert size["items"] == {"MLP tiny": 8, "ResNet tiny": 2, "ViT-L b64": 64}[name]


def test_a_side_that_cannot_be_compiled_is_a_row_beside_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Region, given: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(Region, "_compile", fails)
    found = steps.steps(Given("cpu"), "MLP tiny", (AUTOCAST, FUSED), ("bfloat16",), rounds=Rounds(2, 2, 0, 1, 2))
    ends = {(row["model"], row["side"]): row.get("error", "") for row in found}
    assert ends == {
        ("MLP tiny", AUTOCAST): "",
        ("MLP tiny", FUSED): "RuntimeError: no compiler",
        (f"MLP tiny{steps.KERNELS}", AUTOCAST): "",
    }


def test_tf32_is_a_matter_of_one_side(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[tuple[bool, bool]]] = {}
    backends: Any = (torch.backends.cuda.matmul, torch.backends.cudnn)
    found = sides.source("MLP tiny", "cpu")
    before = tuple(backend.allow_tf32 for backend in backends)
    for side in (FLOAT32, TF32, AUTOCAST):
        one, noted = found.side(side, Setting("cpu", torch.bfloat16)), seen.setdefault(side, [])

        def note(*given: Any, noted: Any = noted) -> None:
            noted.append(tuple(backend.allow_tf32 for backend in backends))

        layer: Any = found.model.get_submodule("layers.0")
        hooks = [layer.register_forward_hook(note), layer.weight.register_hook(note)]
        one.forward_and_backward()
        one.step()
        for hook in hooks:
            hook.remove()
        assert tuple(backend.allow_tf32 for backend in backends) == before
    assert seen == {FLOAT32: [(False, False)] * 2, TF32: [(True, True)] * 2, AUTOCAST: [before] * 2}


@pytest.mark.parametrize("name", sides.DTYPES)
def test_masters_by_torch_are_what_adamw_makes_of_float32(name: str) -> None:
    """To the bit, weights are the masters, rounded. Where gradients overflow, the step is skipped, the scale halved."""
    found, dtype = sides.source("ResNet tiny", "cpu"), sides.DTYPES[name]
    one = found.side(O2, Setting("cpu", dtype))
    masters = [p.detach().clone().float().requires_grad_() for p in one.model.parameters()]
    plain = torch.optim.AdamW(masters, lr=1e-5, fused=True)
    scale, overflows = 2.0**16 if dtype == torch.float16 else 1.0, 0
    for _ in range(6):
        one.forward_and_backward()
        for master, low in zip(masters, one.model.parameters(), strict=True):
            assert low.grad is not None
            master.grad = low.grad.float() / scale
        one.step()
        if all(master.grad is not None and master.grad.isfinite().all() for master in masters):
            plain.step()
        else:
            scale, overflows = scale / 2, overflows + 1
        assert all(low.grad is None for low in one.model.parameters())
        for master, low in zip(masters, one.model.parameters(), strict=True):
            assert low.equal(master.to(low.dtype))
    assert overflows < 4
    norms = [module for module in one.model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert {p.dtype for norm in norms for p in norm.parameters()} == {torch.float32}
    assert {p.dtype for p in one.model.parameters()} == {torch.float32, dtype}


def test_only_calls_of_its_own_side_see_what_liger_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the package, which replaces a function and a method as Liger does."""
    from transformers.models.llama import modeling_llama

    calls: list[str] = []
    rotate: Any = modeling_llama.apply_rotary_pos_emb
    forward: Any = modeling_llama.LlamaForCausalLM.forward

    def apply(model: nn.Module) -> None:
        def rotated(*given: Any, **options: Any) -> Any:
            calls.append("function")
            return rotate(*given, **options)

        def called(self: Any, *given: Any, **options: Any) -> Any:
            calls.append("method")
            return forward(self, *given, **options)

        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rotated)
        monkeypatch.setattr(modeling_llama.LlamaForCausalLM, "forward", called)

    package = ModuleType("liger_kernel.transformers")
    package._apply_liger_kernel_to_instance = apply  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    found = sides.source("Llama tiny", "cpu")
    liger, autocast = (found.side(side, Setting("cpu", torch.bfloat16)) for side in (LIGER, AUTOCAST))
    autocast.forward_and_backward()
    assert calls == []
    liger.forward_and_backward()
    assert calls == ["method", "function"]
    assert modeling_llama.apply_rotary_pos_emb is rotate
    assert liger.model is not autocast.model


def test_samples_can_be_read_without_expecttest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "is_there", lambda: False)
    monkeypatch.delitem(sys.modules, "expecttest", raising=False)
    with samples.stand_in() as folder:
        assert sys.path[-1] == folder
        code = f"import sys; sys.path.insert(0, {folder!r}); import expecttest; print(expecttest.TestCase)"
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert ran.stdout.strip() == str(unittest.TestCase)
    assert folder not in sys.path
