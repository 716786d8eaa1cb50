"""Four million tokens over 256 streams: no error, right text, memory that stays flat."""

from __future__ import annotations

from pathlib import Path

import pytest

from distserve_tools.chaos.deployment import deployed
from distserve_tools.chaos.scenarios import SOAK_TOKENS
from distserve_tools.chaos.soak import MAX_SLOPE_MB, soak


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_millions_of_tokens(tmp_path: Path) -> None:
    with deployed(tmp_path) as deployment:
        outcome = soak("soak", deployment, 1, SOAK_TOKENS)
        assert outcome.ok, outcome.to_json()
        assert outcome.counts["finished"] == outcome.counts.total()
        assert outcome.details["tokens"] >= SOAK_TOKENS
        assert outcome.details["dev_shm_mb_per_1000"] < MAX_SLOPE_MB
