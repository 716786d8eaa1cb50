"""One disaggregated server that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from serving import Deployment, deployed

from model_zoo import Zoo


@pytest.fixture(scope="session")
def shared_deployment(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """1 prefill + 1 decode instance of a small random LLaMA."""
    with deployed(tmp_path_factory.mktemp("e2e"), zoo("llama")) as deployment:
        yield deployment


@pytest.fixture
def deployment(shared_deployment: Deployment) -> Iterator[Deployment]:
    """The shared server; after the test every block must be free again and nothing pending."""
    yield shared_deployment
    shared_deployment.wait_idle()
