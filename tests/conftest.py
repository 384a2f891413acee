"""Tests that need what this machine lacks are skipped, with the reason; none fails because the machine is busy."""

from __future__ import annotations

import gc
import os
import warnings
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings

from autocastfx.runtime.around import is_inside
from tests.thread_state import thread_state

HAS_TRITON = find_spec("triton") is not None
IS_INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"

# `make test` draws the same examples and values in each run, `make test-all` new ones.
settings.register_profile("same", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.register_profile("new", settings.get_profile("same"), derandomize=False)
settings.load_profile("same")


def read_sampled() -> dict[str, int]:
    """How many cases of a test `make test` runs, by its name in sampled.txt."""
    lines = Path(__file__).with_name("sampled.txt").read_text("utf-8").splitlines()
    pairs = (line.split() for line in lines if not line.startswith("#"))
    return {name: int(cases) for cases, name in pairs}


SAMPLED = read_sampled()


def profile_of(config: pytest.Config) -> str:
    """``settings.get_current_profile_name`` may say another: that of a library that loaded its own."""
    return cast("str | None", config.getoption("--hypothesis-profile")) or "same"


def pytest_collectstart(collector: pytest.Collector) -> None:
    """A file that was read before may have imported torch's own tests, which load a profile of hypothesis."""
    settings.load_profile(profile_of(collector.config))


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    settings.load_profile(profile_of(config))
    cases = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        name = item.nodeid.removeprefix("tests/").partition("[")[0]
        if name in SAMPLED:
            cases[name].append(item)
    for name, all_cases in cases.items():
        count = SAMPLED[name]
        kept = {round(number * (len(all_cases) - 1) / max(count - 1, 1)) for number in range(count)}
        for number, item in enumerate(all_cases):
            if number not in kept:
                item.add_marker(pytest.mark.slow)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none"))


@pytest.fixture(autouse=True)
def _same_values(request: pytest.FixtureRequest) -> None:
    """Each test starts from the same seed: its result does not depend on which tests ran before it."""
    if profile_of(request.config) == "same":
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _switches_as_before() -> Iterator[None]:
    """A test, and what it calls, leaves torch's switches as they were: no error of a later test comes from there."""
    before = _switches()
    yield
    assert _switches() == before


def _switches() -> dict[str, object]:
    return {**thread_state(random_numbers=False), "inside of something": is_inside()}


@pytest.fixture(scope="module", autouse=True)
def _short_collections() -> None:
    """What is alive when a file begins, imported modules above all, is left out of the garbage collections in it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)  # a capture makes many objects that live as long as it


@pytest.fixture
def threads_kept() -> Iterator[None]:
    """The main function of a benchmark sets the number of torch's threads."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Dynamo without what other tests have compiled."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        # Dynamo reads deprecated attributes of modules while it guards them
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
        # and ``grad`` of results, from which it hides its own warning, unless warnings are errors
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
        yield
    torch._dynamo.reset()


@pytest.fixture
def process_group() -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def interpreter() -> None:
    """Triton's kernels run on a CPU by its interpreter: ``make kernels``."""
    if not IS_INTERPRETED:
        pytest.skip("needs the package triton and TRITON_INTERPRET=1: make kernels")


@pytest.fixture(scope="session")
def compiler() -> None:
    if not HAS_TRITON:
        pytest.skip("needs the package triton: make kernels")
