import importlib
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from autocastfx.runtime import working_copies
from tests.training.recorded import record

TRAINING = ("train_digits", "train_char_gpt", "train_gan", "finetune_minilm")
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    # demo.py imports the two scripts by name, as it does when it is run.
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # embed_sentences sets it; here it is taken back


@pytest.fixture
def embed_sentences(_importable: None):
    pytest.importorskip("transformers")
    return importlib.import_module("embed_sentences")


@pytest.fixture
def train_digits(_importable: None):
    pytest.importorskip("sklearn")
    return importlib.import_module("train_digits")


def test_the_encoder_agrees_with_float32(embed_sentences, capsys):
    texts = embed_sentences.sentences()[-14:]  # a full batch and a smaller one
    (result,) = results = embed_sentences.run([torch.bfloat16], texts, repeats=1)
    assert embed_sentences.report(results)
    assert result.min_cosine >= 0.999
    assert result.sentences == 14
    assert len(result.amp_model.variants) == 2, "one for training, one for inference: batches and lengths share it"
    assert "bfloat16: passed" in capsys.readouterr().out


def test_a_swap_wider_than_rounding_is_not_hidden(embed_sentences, monkeypatch):
    result = embed_sentences.Result(
        dtype=torch.bfloat16,
        amp_model=None,
        sentences=40,
        min_cosine=0.9999,
        same_order=39,
        autocast_same_order=39,
        widest_swap=0.02,
        seconds_per_batch=1.0,
        float32_seconds_per_batch=1.0,
    )
    assert not result.passed
    assert "FAILED" in str(result)
    assert "in the other 1, more than near-ties change places" in str(result)
    monkeypatch.setattr(embed_sentences, "run", lambda dtypes: [result])
    monkeypatch.setattr("sys.argv", ["embed_sentences.py"])
    assert embed_sentences.main() == 1


def test_the_order_of_neighbours_is_compared(embed_sentences):
    # Unit vectors by their angles: the second and the third change places, so every order of neighbours changes.
    angles = torch.tensor([[0.0, 0.1, 0.25, 0.6], [0.0, 0.25, 0.1, 0.6]])
    expected, found = torch.stack([angles.cos(), angles.sin()], dim=-1)
    cosine, same_order, swap = embed_sentences.compare(expected, found)
    assert cosine == pytest.approx(math.cos(0.15))
    assert same_order == 0
    assert swap == pytest.approx(math.cos(0.35) - math.cos(0.5), abs=1e-6)  # the neighbours of the fourth
    assert embed_sentences.compare(expected, expected) == (pytest.approx(1), 4, 0)


def test_the_sentences_are_real_and_distinct(embed_sentences):
    texts = embed_sentences.sentences()
    assert 35 <= len(set(texts)) == len(texts)


def test_the_digits_train_in_both_precisions(train_digits, capsys):
    (result,) = results = train_digits.run(seeds=[0], epochs=2)
    train_digits.report(results, epochs=2)
    assert result.float32 > 80
    assert result.low > 80
    assert all(p.dtype == torch.float32 for p in result.amp_model.parameters())
    assert "test accuracy in percent" in capsys.readouterr().out


def test_the_demo_describes_a_plan(embed_sentences, train_digits, tmp_path, capsys):
    demo = importlib.import_module("demo")
    (result,) = train_digits.run(seeds=[0], epochs=0)
    path = tmp_path / "made" / "digits.txt"
    demo.describe(result.amp_model, "Digits", path)
    printed = capsys.readouterr().out
    assert "conv2d" in printed
    assert f"casts: {len(result.amp_model.plan.casts)} (" in printed
    assert "ops that no list names: none" in printed
    assert "conv2d" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("script", ["embed_sentences", *TRAINING, "train_ddp", "cuda_graph", "resume"])
def test_help(script, monkeypatch, capsys):
    pytest.importorskip("transformers")
    module = importlib.import_module(script)
    monkeypatch.setattr("sys.argv", [f"{script}.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        module.main()
    assert ("--dtype" in capsys.readouterr().out) == (script != "resume")


@pytest.mark.parametrize("script", TRAINING)
def test_a_bad_result_is_a_failed_run(script, monkeypatch, capsys):
    pytest.importorskip("transformers")
    module = importlib.import_module(script)
    monkeypatch.setattr(module, "run", lambda *args, **kwargs: "result")
    monkeypatch.setattr(module, "report", lambda result, *args: False)
    monkeypatch.setattr("sys.argv", [f"{script}.py"])
    assert module.main() == 1


def test_a_vit_trains_with_working_copies(train_digits):
    (result,) = train_digits.run(torch.bfloat16, [0], 3, "vit", "cached")
    assert result.low > 20  # by chance 10
    assert abs(result.low - result.float32) < 10


def test_a_character_gpt_trains(monkeypatch, capsys):
    gpt = importlib.import_module("train_char_gpt")
    text = gpt.load()
    assert len(text.train) > 8 * len(text.validation) > 100_000
    assert "import" in bytes(text.train.tolist()).decode("ascii")
    short = gpt.Text(text.train, text.validation[:3000])
    assert 4 < gpt.validation_loss(gpt.CharGPT(), short) < 6  # log(128) is 4.85
    monkeypatch.setattr(gpt, "load", lambda device: short)
    monkeypatch.setattr(gpt, "BATCH_SIZE", 8)
    (result,) = results = gpt.run(torch.float16, [0], 20, "cached")
    assert result.float32 < 4
    assert gpt.report(results, 20)
    assert "nats a character" in capsys.readouterr().out
    assert not gpt.report([gpt.Result(0, 2.0, 2.1, result.amp_model)])


def test_a_batch_holds_the_characters_that_follow():
    gpt = importlib.import_module("train_char_gpt")
    characters, following = gpt.batch_of(torch.arange(200), torch.tensor([0, 7]))
    assert characters.shape == (2, gpt.CONTEXT)
    assert torch.equal(following, characters + 1)


def test_the_networks_of_the_gan_have_a_scale_each(monkeypatch, capsys):
    pytest.importorskip("sklearn")
    gan = importlib.import_module("train_gan")
    optimizer_of, made = gan.optimizer_of, []

    def recorded(model, dtype):
        made.append(optimizer_of(model, dtype))
        return made[-1]

    def too_high(model, dtype):
        if made:  # the discriminator's
            recorded(model, dtype).loss_scaler.load_state_dict({"scale": 2.0**24, "good_steps": 0})
            return made[-1]
        return recorded(model, dtype)

    monkeypatch.setattr(gan, "optimizer_of", too_high)
    result = gan.run(torch.float16, 30)
    assert result.skipped["generator"] == 0
    assert 0 < result.skipped["discriminator"] < 20
    assert result.scales == {"generator": 2.0**16, "discriminator": 2.0 ** (24 - result.skipped["discriminator"])}
    assert len(made[0].state) == 10, "the generator's parameters were stepped"
    assert not gan.report(result, 30), "30 steps are too few"
    assert "generator     skipped 0 steps" in capsys.readouterr().out


def test_fine_tuning(capsys):
    pytest.importorskip("transformers")
    fine_tune = importlib.import_module("finetune_minilm")
    every = fine_tune.sentences()
    assert len(every) == len({text for text, _ in every}) > 300
    assert {label for _, label in every} == set(range(len(fine_tune.MODULES)))
    result = fine_tune.run(steps=4, tests=24)
    fine_tune.report(result, 4)
    assert result.low > result.before
    assert abs(result.low - result.float32) < 20
    assert "test accuracy in percent" in capsys.readouterr().out


def start(script, *options, launcher=()):
    """A script in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(EXAMPLES / script), *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=200)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no distributed package")
def test_ddp_started_with_torchrun():
    pytest.importorskip("sklearn")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = start("train_ddp.py", "--dtype", "float16", "--steps", "150", launcher=launcher)
    assert done.returncode == 0, done.stderr
    assert "DDP on 2 processes, float16: passed" in done.stdout
    assert "the same on all processes, to the bit" in done.stdout
    (skipped,) = (line.split()[2] for line in done.stdout.splitlines() if "skipped steps" in line)
    assert int(skipped.rstrip(",")) > 0


@pytest.mark.parametrize(("dtype", "weights"), [(torch.float16, "cast"), (torch.bfloat16, "cached")])
def test_replayed_steps_train_as_steps_one_by_one(cuda_graph, dtype, weights, monkeypatch):
    """A graph is played here by recorded operators. A smaller batch between replays, and steps that skip, too."""
    now = False
    monkeypatch.setattr(working_copies, "is_capturing", lambda _: now)

    def recorded(step, optimizer):
        nonlocal now
        cuda_graph.warm_up(step, optimizer)
        now = True
        graph = record(step)
        now = False
        return graph.replay

    def as_many(step, optimizer):
        cuda_graph.warm_up(step, optimizer)
        step()
        return step

    runs = [cuda_graph.train(dtype, "cpu", weights, 1, repeated) for repeated in (recorded, as_many)]
    (_, replayed, scale), (_, eager, same_scale) = runs
    assert scale == same_scale
    assert (scale < 2.0**24) == (dtype == torch.float16), "steps were skipped"
    for a, b in zip(replayed.parameters(), eager.parameters(), strict=True):
        assert torch.equal(a, b)


def test_without_a_gpu_the_steps_run_one_by_one(cuda_graph, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["cuda_graph.py", "--dtype", "float16"])
    assert cuda_graph.main() == 0
    assert "no GPU here" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_graph_trains(cuda_graph, dtype, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["cuda_graph.py", "--dtype", dtype])
    assert cuda_graph.main() == 0
    assert "replayed from a CUDA graph: passed" in capsys.readouterr().out


def test_ddp_says_how_to_start_it(monkeypatch, capsys):
    module = importlib.import_module("train_ddp")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("sys.argv", ["train_ddp.py"])
    with pytest.raises(SystemExit, match="2"):
        module.main()
    assert "start it with torchrun" in capsys.readouterr().err


@pytest.fixture
def cuda_graph(_importable: None):
    pytest.importorskip("sklearn")
    return importlib.import_module("cuda_graph")


@pytest.fixture
def resume(_importable: None):
    pytest.importorskip("sklearn")
    return importlib.import_module("resume")


@pytest.mark.parametrize("weights", ["float32", "float16"])
def test_resuming_is_never_having_stopped(resume, weights, tmp_path):
    whole = resume.run(tmp_path / "whole", 40, 100, weights=weights)
    resume.run(tmp_path / "parts", 17, 17, weights=weights)
    resume.run(tmp_path / "parts", 34, 17, weights=weights)
    again = resume.run(tmp_path / "parts", 40, 17, weights=weights)
    expected, found = whole.state_dict(), again.state_dict()
    assert found["optimizer"]["loss_scale"] == expected["optimizer"]["loss_scale"]
    assert expected["optimizer"]["loss_scale"]["scale"] != 2**20, "the scale has moved"
    assert ("masters" in expected["optimizer"]) == (weights == "float16")
    assert all(torch.equal(found["model"][name], held) for name, held in expected["model"].items())
    assert resume.digest(found) == resume.digest(expected)
    assert resume.digest(found["model"]) != resume.digest(resume.Run(weights).state_dict()["model"]), "it was trained"


@pytest.mark.parametrize("missing", ["optimizer", "random"])
def test_the_comparison_sees_what_is_not_resumed(resume, missing, tmp_path):
    whole = resume.run(tmp_path / "whole", 30, 100)
    state = resume.run(tmp_path / "part", 15, 15).state_dict()
    again = resume.Run()
    state[missing] = again.state_dict()[missing]
    again.load_state_dict(state)
    while again.step_number < 30:
        again.step()
    assert resume.digest(again.state_dict()) != resume.digest(whole.state_dict())


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_a_run_killed_while_it_saves_goes_on(resume, tmp_path):
    killed = start("resume.py", "--folder", str(tmp_path), "--steps", "30", "--save-every", "10", "--kill-at", "25")
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / "checkpoint.tmp").exists(), "it was saving"
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == 20
    again = resume.run(tmp_path, 30)
    whole = resume.run(tmp_path / "whole", 30)
    assert resume.digest(again.state_dict()) == resume.digest(whole.state_dict())


SAVES = """
import sys, torch, resume
from pathlib import Path
number = 0
while True:
    number += 1
    resume.save({"number": number, "tensor": torch.full((500_000,), float(number))}, Path(sys.argv[1]))
    print(number, flush=True)
"""


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_a_checkpoint_is_whole_whenever_the_process_is_killed(tmp_path):
    path, choice = tmp_path / "checkpoint.pt", random.Random(0)
    environment = {**os.environ, "PYTHONPATH": f"{EXAMPLES}{os.pathsep}{EXAMPLES.parent}"}
    for _ in range(2):
        command = [sys.executable, "-c", SAVES, str(path)]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(choice.randint(3, 8)):
            said = int(process.stdout.readline())
        time.sleep(choice.random() * 0.02)
        process.send_signal(signal.SIGKILL)
        rest = process.communicate(timeout=60)[0].split()
        loaded = torch.load(path, weights_only=True)
        last = int(rest[-1]) if rest else said
        assert loaded["number"] in (last, last + 1), "the last one that was announced, or one just put in its place"
        assert bool((loaded["tensor"] == loaded["number"]).all())
