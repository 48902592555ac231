"""Keep the checkout root off sys.path: its kernels/ would shadow Hugging Face's ``kernels``."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [p for p in sys.path if Path(p or os.getcwd()).resolve() != ROOT]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tiny models: with more threads than cores torch waits for itself, here and in subprocesses.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

HAS_GPU = torch.cuda.is_available()
REQUIRE_GPU = os.environ.get("MOELORA_REQUIRE_GPU") == "1"
if not HAS_GPU:
    # Triton reads this when it is first imported, and importing peft imports Triton.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU and not REQUIRE_GPU:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):  # type: ignore[no-untyped-def]
    """With MOELORA_REQUIRE_GPU=1 a skipped gpu test is a failure: nothing was tested."""
    outcome = yield
    report = outcome.get_result()
    if REQUIRE_GPU and report.skipped and item.get_closest_marker("gpu"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid}: skipped although MOELORA_REQUIRE_GPU=1"
