"""Shared by all tests: one OpenMP thread for each process, and no silent skips where everything must run."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from rich.logging import RichHandler

# Before any test loads the engine library: several processes share two cores (ARCHITECTURE.md).
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples in each run, however slow: other tests share this machine.
settings.register_profile("tests", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

TINY_MOE = Path(__file__).parent.parent / "examples" / "tiny_moe"


@pytest.fixture(scope="session")
def tiny_moe() -> Path:
    """The folder of the embedded model."""
    return TINY_MOE


@pytest.fixture(autouse=True)
def _root_logger_as_it_was() -> Iterator[None]:
    """Undo what a command's logging setup does to this process: its handler writes to a stream that ends with its test."""
    root = logging.getLogger()
    level = root.level
    yield
    root.setLevel(level)
    for handler in root.handlers[:]:
        if type(handler) in (
            logging.StreamHandler,
            RichHandler,
        ):  # pytest's own are of other types and look after themselves
            root.removeHandler(handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail what was skipped when SWARM_REQUIRE_E2E is set, as .ci/run does."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("SWARM_REQUIRE_E2E"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which SWARM_REQUIRE_E2E forbids: {report.longrepr}"
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a test that no part of `make test` would run: those that run alone are looked for below tests/e2e."""
    for item in items:
        if item.get_closest_marker("alone") is not None and not item.nodeid.startswith("tests/e2e/"):
            raise pytest.UsageError(f"{item.nodeid} is marked `alone`: expected below tests/e2e")


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: pytest.TestReport) -> None:
    """Give what ended its process a name that .ci/run gives no second chance: after it other tests have not run."""
    report.nodeid = f"crash in {crashitem}"
