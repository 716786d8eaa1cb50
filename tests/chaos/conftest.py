"""One deployment of 2 prefill + 2 decode instances that the scenarios of this folder break in turn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distserve_tools.chaos.deployment import Deployment, deployed


@pytest.fixture(scope="session")
def two_of_each(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with deployed(tmp_path_factory.mktemp("chaos")) as deployment:
        yield deployment
