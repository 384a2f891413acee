"""``transformers.Trainer`` and loops of Accelerate train converted models, in bfloat16 and in float16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import autocastfx
from autocastfx import CompileBackend, GradScaler
from autocastfx.errors import UnsupportedError
from tests.helpers import sampled
from tests.integrations.trained import CASES, HALF, OVERFLOWS, STEPS, let_overflow, made, same_weights

pytest.importorskip("accelerate", reason="needs accelerate: make integrations")

from accelerate import Accelerator

from autocastfx.integrations.accelerate import use_grad_scaler

# Dynamo looks for the gradient of a result, where a graph begins behind a break, and torch warns of it.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
HALF_OF_THEM = [(torch.float16, "char GPT"), (torch.bfloat16, "BERT")]
SOME = sampled(CASES, lambda _, case: case in HALF_OF_THEM)
_t: Any = transformers


class Run:
    """A run of the Trainer, from the beginning or from a checkpoint."""

    def __init__(self, folder: Path, task: str, low: torch.dtype | None, checkpoint: Path | None = None) -> None:
        self.model, data = made(task)
        self.rows: list[dict[str, float]] = []
        rows = self.rows

        class Log(_t.TrainerCallback):
            def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
                rows.append(dict(logs))

        if low is not None:
            self.backend = CompileBackend(dtype=low, inner="eager")
            self.backend.compile(self.model)
        arguments = _t.TrainingArguments(
            **{"output_dir": str(folder), "max_steps": STEPS, "save_steps": HALF, "logging_steps": 1, "report_to": []},
            **{"max_grad_norm": 1.0, "learning_rate": 3e-3, "use_cpu": True, "disable_tqdm": True, "seed": 1},
        )
        self.trainer = _t.Trainer(model=self.model, args=arguments, train_dataset=data, callbacks=[Log()])
        self.trainer.remove_callback(_t.PrinterCallback)
        self.scaler = use_grad_scaler(self.trainer.accelerator) if low is torch.float16 else None
        if self.scaler is not None:
            let_overflow(self.model, done=0 if checkpoint is None else HALF)
        self.trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))

    def losses(self) -> list[float]:
        return [row["loss"] for row in self.rows if "loss" in row]


@pytest.mark.parametrize("case", SOME, ids=str)
def test_the_trainer(case: tuple[torch.dtype, str], tmp_path: Path) -> None:
    low, task = case
    exact, run = Run(tmp_path / "exact", task, None), Run(tmp_path / "run", task, low)
    begin = exact.losses()[0]
    ours, theirs = (sum(r.losses()[-20:]) / 20 for r in (run, exact))
    assert max(ours, theirs) < begin
    assert abs(ours - theirs) <= 0.02 * begin
    assert all(graph.plan is not None for graph in run.backend.graphs)
    assert not run.backend.skipped
    norms = [row["grad_norm"] for row in run.rows if "grad_norm" in row]
    if run.scaler is None:
        assert max(norms) < 100
    else:
        assert run.scaler.skipped_steps == len(OVERFLOWS)
        assert run.trainer.lr_scheduler.last_epoch == STEPS - len(OVERFLOWS)
        assert [n + 1 for n, norm in enumerate(norms) if not norm < 100] == [*OVERFLOWS], "all others are unscaled"
    resumed = Run(tmp_path / "resumed", task, low, tmp_path / "run" / f"checkpoint-{HALF}")
    assert same_weights(resumed.model, run.model)
    assert resumed.losses() == run.losses()[HALF:]
    if run.scaler is not None and resumed.scaler is not None:
        assert resumed.scaler.state_dict() == run.scaler.state_dict()
    run.trainer.save_model(str(tmp_path / "saved"))
    assert same_weights(type(run.model).from_pretrained(str(tmp_path / "saved")), run.model)  # type: ignore[attr-defined]


def test_the_trainer_recomputes_blocks_and_loads_the_best_model(tmp_path: Path) -> None:
    losses: list[float] = []
    for recomputes in (False, True):
        model, data = made("char GPT")
        autocastfx.enable(model, dtype=torch.bfloat16)
        arguments = _t.TrainingArguments(
            **{"output_dir": str(tmp_path / str(recomputes)), "max_steps": 10, "save_steps": 5, "logging_steps": 5},
            **{"eval_strategy": "steps", "eval_steps": 5, "load_best_model_at_end": True, "learning_rate": 3e-3},
            **{"activation_checkpointing": recomputes, "report_to": [], "use_cpu": True, "disable_tqdm": True},
        )
        few = torch.utils.data.Subset(data, range(16))
        trainer = _t.Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=few)
        trainer.remove_callback(_t.PrinterCallback)
        trainer.train()
        losses.append(trainer.evaluate()["eval_loss"])
        assert losses[-1] == trainer.state.best_metric
        backend = autocastfx.backend_of(model)
        assert backend is not None
        assert not backend.skipped
        assert all(graph.plan is not None for graph in backend.graphs)
    assert abs(losses[0] - losses[1]) < 4 * torch.finfo(torch.bfloat16).eps * losses[0]


class Loop:
    """A loop of Accelerate with clipping, a schedule and checkpoints."""

    def __init__(self, task: str, low: torch.dtype, *, fused: bool = False) -> None:
        model, data = made(task)
        self.accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=True)
        self.scaler = use_grad_scaler(self.accelerator) if low is torch.float16 else None
        CompileBackend(dtype=low, inner="eager").compile(model)
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3, fused=fused)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
        batches = torch.utils.data.DataLoader(data, batch_size=8)
        self.inner = schedule
        self.model, self.optimizer, self.batches, self.schedule = self.accelerator.prepare(
            model, optimizer, batches, schedule
        )

    def run(self, start: int, end: int) -> list[float]:
        norms = []
        for number, batch in enumerate(self.batches):
            if start <= number < end:
                self.optimizer.zero_grad()
                self.accelerator.backward(self.model(**batch).loss)
                norms.append(float(self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)))
                self.optimizer.step()
                self.schedule.step()
        return norms


@pytest.mark.parametrize("case", SOME, ids=str)
def test_a_loop_of_accelerate(case: tuple[torch.dtype, str], tmp_path: Path) -> None:
    low, task = case
    fused = task == "char GPT"
    whole = Loop(task, low, fused=fused)
    resumed = Loop(task, low, fused=fused)
    if low is torch.float16:
        let_overflow(whole.model)
        let_overflow(resumed.model, done=HALF)
    torch.manual_seed(1)
    norms = whole.run(0, HALF)
    whole.accelerator.save_state(str(tmp_path))
    norms += whole.run(HALF, STEPS)
    resumed.accelerator.load_state(str(tmp_path))
    resumed.run(HALF, STEPS)
    assert same_weights(resumed.model, whole.model)
    skips = OVERFLOWS if low is torch.float16 else ()
    assert [n + 1 for n, norm in enumerate(norms) if not norm < 100] == [*skips]
    assert whole.inner.last_epoch == resumed.inner.last_epoch == STEPS - len(skips)
    if whole.scaler is not None and resumed.scaler is not None:
        assert whole.scaler.skipped_steps == resumed.scaler.skipped_steps == len(skips)
        assert whole.scaler.state_dict() == resumed.scaler.state_dict()


def test_values_are_clipped_unscaled_and_one_optimizer_alone_can_be_unscaled() -> None:
    accelerator = Accelerator(cpu=True)
    scaler = use_grad_scaler(accelerator, GradScaler("cpu", init_scale=2.0**10))
    layers = [torch.nn.Linear(2, 1, bias=False) for _ in range(2)]
    optimizers = [accelerator.prepare(torch.optim.SGD(layer.parameters(), lr=1.0)) for layer in layers]
    accelerator.backward(sum(layer(torch.ones(1, 2)).sum() for layer in layers))
    accelerator.unscale_gradients(optimizers[0])
    assert [float(layer.weight.grad.max()) for layer in layers] == [1.0, 2.0**10]  # type: ignore[union-attr]
    accelerator.unscale_gradients([optimizers[1]])
    assert [float(layer.weight.grad.max()) for layer in layers] == [1.0, 1.0]  # type: ignore[union-attr]
    for optimizer in optimizers:
        optimizer.step()
        break
    assert scaler.get_scale() == 2.0**10


def test_what_cannot_work_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.optim.SGD(torch.nn.Linear(1, 1).parameters()))
    with pytest.raises(UnsupportedError, match=r"call use_grad_scaler before prepare\(\)"):
        use_grad_scaler(accelerator)
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()
    try:
        with pytest.raises(UnsupportedError, match=r"mixed_precision='bf16', which converts .* a second time"):
            use_grad_scaler(Accelerator(cpu=True, mixed_precision="bf16"))
    finally:
        AcceleratorState._reset_state()
