"""Fixtures that tests of several folders share."""

from __future__ import annotations

import pytest

from model_zoo import Zoo


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """`zoo(name)` is a small random checkpoint (see `model_zoo.NAMES`), made once per session."""
    return Zoo(tmp_path_factory.mktemp("zoo"))
