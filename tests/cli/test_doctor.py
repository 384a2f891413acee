"""``autocastfx doctor``, and what its findings mean."""

from __future__ import annotations

import json

import pytest
import torch

from autocastfx.cli.doctor import Diagnosis
from tests.cli.run_command import run


def test_doctor_tells_versions_devices_and_missing_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "doctor", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["versions"]["torch"] == torch.__version__
    assert found["devices"][0][0] == "cpu"
    assert "avg_pool3d" in found["no_kernel"]["cpu"]["float16"]
    assert "fft_fft" not in found["no_kernel"]["cpu"]["float16"], "no list lets it run in 16 bits anyway"
    assert found["speeds"]["cpu"].keys() == {"float16", "bfloat16"}
    assert all(ratio > 0 for ratio in found["speeds"]["cpu"]["bfloat16"].values())
    assert found["compilers"].keys() == {"C++ compiler", "Triton"}


def test_doctor_says_what_its_findings_mean() -> None:
    speeds = {
        "float16": {"a product": 150.4, "a convolution": None},
        "bfloat16": {"a product": 0.31, "a convolution": 2.0},
    }
    told = str(Diagnosis({}, (), {"cpu": {"float16": ("rrelu",)}}, ("xpu",), {"cpu": speeds}, {"Triton": "is there"}))
    assert told.splitlines() == [
        "on cpu these run in float32, for want of a float16 kernel: rrelu",
        "on xpu no missing kernels are known",
        "on cpu float16 takes 150 in a product and no part in a convolution of float32's time: use the other 16-bit "
        "dtype, or leave models in float32: here this one saves memory alone",
        "on cpu bfloat16 takes 0.31 in a product and 2 in a convolution of float32's time: models that are mostly "
        "convolutions become slower",
        "Triton: is there",
    ]
