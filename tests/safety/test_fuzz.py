"""A short, fixed run of the fuzzers; ``fuzzing.py`` runs them for as long as one likes."""

from __future__ import annotations

import pytest
from fuzzing import Folder, checks
from hypothesis import HealthCheck, given, settings

_NAMES = ("headers", "keys", "adapters of keys", "configs")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("name", _NAMES)
def test_fuzzed(name: str, folder: Folder) -> None:
    check, inputs = checks(folder)[name]

    @settings(
        max_examples=200, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(inputs)
    def run(case: object) -> None:
        check(case)

    run()


def test_every_check_is_run(folder: Folder) -> None:
    assert set(checks(folder)) == set(_NAMES)
