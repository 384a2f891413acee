import importlib
import math
from pathlib import Path

import pytest
import torch

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


@pytest.mark.parametrize("script", ["embed_sentences", "train_digits"])
def test_help(script, request, monkeypatch, capsys):
    module = request.getfixturevalue(script)
    monkeypatch.setattr("sys.argv", [f"{script}.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        module.main()
    assert "--dtype" in capsys.readouterr().out
