"""Lightning's Trainer trains converted modules, in bfloat16 and in float16."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autocastfx import GradScaler
from autocastfx.errors import UncapturedGraphWarning
from tests.helpers import sampled
from tests.integrations.trained import BATCH, CASES, HALF, OVERFLOWS, STEPS, let_overflow, made, same_weights

pytest.importorskip("lightning", reason="needs lightning: make integrations")

import lightning.pytorch as pl

from autocastfx.integrations import lightning
from autocastfx.integrations.lightning import AutocastFXPrecision

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    # Lightning's own: it reads pytree's LeafSpec, and advises on workers, loggers and the folder of checkpoints.
    pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.rank_zero.LightningDeprecationWarning"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
]
HALF_OF_THEM = [(torch.float16, "BERT"), (torch.bfloat16, "char GPT")]
SOME = sampled(CASES, lambda _, case: case in HALF_OF_THEM)


class Trained(pl.LightningModule):
    """Holds a model of transformers, and remembers norms of gradients and learning rates."""

    def __init__(self, task: str, *, fused: bool = False) -> None:
        super().__init__()
        self.model, self.data = made(task)
        self.fused, self.norms, self.losses = fused, [], []

    def training_step(self, _: Tensor, index: int) -> Tensor:
        # By the step: Lightning's checkpoints hold no random state and, at an epoch's end, no place in the data.
        step = self.global_step
        torch.manual_seed(step)
        batch = torch.utils.data.default_collate([self.data[step * BATCH + i] for i in range(BATCH)])
        loss = self.model(**batch).loss
        self.losses.append(float(loss.detach()))
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        self.norms.append(float(nn.utils.get_total_norm(grads)))

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scaler = self.trainer.precision_plugin.scaler  # type: ignore[attr-defined]
        if scaler is None or not scaler.step_was_skipped:
            scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 3e-3, fused=self.fused)
        self.schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.schedule, "interval": "step"}}

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.arange(HALF))  # type: ignore[arg-type]


def fitted(module: Trained, low: torch.dtype, folder: Path, checkpoint: Path | None = None) -> Any:
    plugin = AutocastFXPrecision(low, device="cpu", inner="eager")
    trainer = pl.Trainer(
        **{"max_steps": STEPS, "accelerator": "cpu", "plugins": [plugin], "gradient_clip_val": 1.0, "logger": False},
        **{"enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": str(folder)},
        callbacks=[pl.callbacks.ModelCheckpoint(str(folder), "{step}", every_n_epochs=1, save_top_k=-1)],
    )
    trainer.fit(module, ckpt_path=None if checkpoint is None else str(checkpoint), weights_only=False)
    return plugin


@pytest.mark.parametrize("case", SOME, ids=str)
def test_the_trainer(case: tuple[torch.dtype, str], tmp_path: Path) -> None:
    low, task = case
    fused = task == "BERT"
    module, resumed = Trained(task, fused=fused), Trained(task, fused=fused)
    if low is torch.float16:
        let_overflow(module.model)
        let_overflow(resumed.model, done=HALF)
    plugin = fitted(module, low, tmp_path)
    assert plugin.backend.graphs
    assert all(graph.plan is not None for graph in plugin.backend.graphs)
    assert sum(module.losses[-20:]) / 20 < module.losses[0]
    skips = OVERFLOWS if low is torch.float16 else ()
    assert [n + 1 for n, norm in enumerate(module.norms) if not norm < 100] == [*skips], "all others are unscaled"
    assert module.schedule.last_epoch == STEPS - len(skips)
    again = fitted(resumed, low, tmp_path, tmp_path / f"step={HALF}.ckpt")
    assert resumed.losses == module.losses[HALF:]
    assert same_weights(resumed.model, module.model)
    if low is torch.float16:
        assert plugin.scaler.skipped_steps == again.scaler.skipped_steps == len(skips)
        assert plugin.scaler.state_dict() == again.scaler.state_dict()
    module.model.save_pretrained(str(tmp_path / "saved"))  # type: ignore[operator]
    assert same_weights(type(module.model).from_pretrained(str(tmp_path / "saved")), module.model)  # type: ignore[attr-defined]


class Mixed(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.loss = nn.Linear(4, 4), nn.Linear(4, 1), nn.MSELoss()
        self.factor = nn.Parameter(torch.ones(()))


def test_modules_with_parameters_are_converted_and_others_are_told() -> None:
    plugin, module = AutocastFXPrecision(torch.bfloat16, device="cpu", inner="eager"), Mixed()
    with pytest.warns(UncapturedGraphWarning, match="the parameters factor belong to no module that is converted"):
        assert plugin.convert_module(module) is module
    module.second(module.first(torch.ones(2, 4)))
    assert len(plugin.backend.graphs) == 2
    assert module.loss._compiled_call_impl is None
    chosen = AutocastFXPrecision(torch.bfloat16, device="cpu", inner="eager", modules=["second"])
    with pytest.warns(UncapturedGraphWarning, match=r"the parameters factor, first\.weight, first\.bias belong"):
        chosen.convert_module(Mixed())
    with pytest.raises(AttributeError, match="third"):
        AutocastFXPrecision(torch.bfloat16, modules=["third"]).convert_module(Mixed())


def test_its_scaler() -> None:
    assert AutocastFXPrecision(torch.bfloat16).scaler is None
    assert isinstance(AutocastFXPrecision(torch.float16, device="cpu").scaler, GradScaler)
    given = GradScaler("cpu", init_scale=4.0)
    assert AutocastFXPrecision(torch.float16, device="cpu", scaler=given).scaler is given
    with pytest.raises(ValueError, match=r"dtype is torch\.float16 or torch\.bfloat16"):
        AutocastFXPrecision(torch.float32)


class Normed(pl.LightningModule):
    """Has a batch norm, whose statistics averaged weights need anew."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return self.model(batch).float().square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-2)

    def train_dataloader(self) -> Any:
        data = torch.randn(32, 8, generator=torch.Generator().manual_seed(0)) * 3 + 1
        return torch.utils.data.DataLoader(data, batch_size=8)  # type: ignore[arg-type]


def test_averaged_weights_get_the_statistics_of_batch_norms() -> None:
    def averaged(*plugins: AutocastFXPrecision) -> list[Tensor]:
        trainer = pl.Trainer(
            **{"max_epochs": 3, "accelerator": "cpu", "plugins": [*plugins], "logger": False},
            **{"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False},
            callbacks=[pl.callbacks.StochasticWeightAveraging(1e-2, swa_epoch_start=1)],
        )
        trainer.fit(module := Normed())
        return [*module.parameters(), *(b for b in module.buffers() if b.is_floating_point())]

    scaler = GradScaler("cpu", init_scale=16.0)
    plugin = AutocastFXPrecision(torch.float16, device="cpu", inner="eager", scaler=scaler)
    with pytest.warns(UncapturedGraphWarning, match="batchnorm"):  # it asks its counter for the weight of a batch
        found = averaged(plugin)
    for low, exact in zip(found, averaged(), strict=True):
        torch.testing.assert_close(low, exact, rtol=5e-3, atol=5e-3)


def test_it_is_a_plugin_of_both_of_lightnings_names(monkeypatch: pytest.MonkeyPatch) -> None:
    clipped: list[str] = []

    class MixedPrecision:
        def _clip_gradients(self, model: Any, *args: Any, **kwargs: Any) -> None:
            clipped.append("other")

    for name in ("pytorch_lightning", "pytorch_lightning.plugins", "pytorch_lightning.plugins.precision"):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.MixedPrecision = MixedPrecision  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    again = types.ModuleType("again")
    exec(compile(Path(str(lightning.__file__)).read_text(), "again", "exec"), vars(again))
    plugin = again.AutocastFXPrecision(torch.bfloat16, device="cpu")
    assert isinstance(plugin, MixedPrecision)
    assert isinstance(plugin, pl.plugins.MixedPrecision)
    plugin._clip_gradients(nn.Linear(1, 1), None)
    assert clipped == ["other"]
