"""A run of the test-bed against a server as it serves it: records, processor time, what the engines count."""

from __future__ import annotations

from pathlib import Path

import pytest

from distserve_tools.chaos.model import tiny_model
from distserve_tools.testbed.engine_counters import merged
from distserve_tools.testbed.plan import ScaledWorkload
from distserve_tools.testbed.runs import run_once
from distserve_tools.testbed.systems import CHUNKED, DISAGGREGATED, EngineLimits, serving
from distserve_tools.testbed.traces import requests_at

REQUESTS = 8


@pytest.mark.parametrize("system", [DISAGGREGATED, CHUNKED])
def test_a_run_is_measured(system: str, tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    workload = ScaledWorkload("chat", "sharegpt", 0.1)
    trace = requests_at(workload, 20.0, REQUESTS, 1, max_context=400)
    limits = EngineLimits(256, 32, kv_bytes=8 << 20)
    with serving((system,), str(model.folder), limits, tmp_path, print) as served:
        run = run_once(served[system], served.values(), trace, 20.0, 0, vocab=200)
    assert [record.error for record in run.records] == [None] * REQUESTS
    # in this order, which is the simulation's
    assert list(run.engines) == (
        ["prefill_0", "decode_0"] if system == DISAGGREGATED else ["unified_0", "unified_1"]
    )
    together = merged(run.engines.values())
    total = together.totals
    assert sum(sums.steps for sums in together.step_times.values()) == total["steps"]
    prompt_tokens = sum(sums.prompt_tokens for sums in together.step_times.values())
    assert prompt_tokens == sum(record.input_tokens for record in run.records)
    assert 0 < sum(sums.cpu_s for sums in together.step_times.values()) < run.cpu.parts["engines"] + 0.5
    assert total["steps"] > 0
    assert total["execute_s"] > 0
    longer = sum(record.output_tokens > 1 for record in run.records)
    assert total["transfers"] == (2 * longer if system == DISAGGREGATED else 0)  # both ends count them
    assert run.cpu.parts["engines"] > 0
