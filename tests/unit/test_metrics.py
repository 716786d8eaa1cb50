"""What the orchestrator shows of itself and of its instances, against a back end in memory."""

from __future__ import annotations

import dataclasses
import json
import threading

import pytest

from distserve.serving.control import run_control
from distserve.serving.metric_families import FAMILIES
from distserve.serving.metrics import Metrics
from distserve.serving.schema import ServingError
from engine_double import generate
from orchestrator_bench import CONFIG, VOCAB, Bench, MemoryMetrics, scenario

PREFILL = {"instance": "prefill_0", "role": "prefill"}
DECODE = {"instance": "decode_0", "role": "decode"}
QUICK = dataclasses.replace(CONFIG, stats_s=0.1)


def last(bench: Bench, name: str, **labels: str) -> float | None:
    values = bench.metrics.values.get((name, tuple(sorted(labels.items()))))
    return values[-1] if values else None


def test_families_are_named_as_prometheus_wants_them() -> None:
    for name, family in FAMILIES.items():
        assert name.startswith("distserve_")
        assert name.endswith("_total") == (family.kind == "COUNTER")
        assert family.description
        assert name.endswith("_seconds") or family.kind != "HISTOGRAM"


@scenario(config=QUICK)
async def test_counts_times_and_state(bench: Bench) -> None:
    for n in range(4):
        sink = await bench.request([n, 1, 2], 1 + n)
        await sink.end()
    await bench.until(
        lambda: bench.metrics.total("distserve_requests_total", outcome="length", code="OK") == 4
    )
    total = bench.metrics.total
    assert (total("distserve_prompt_tokens_total"), total("distserve_output_tokens_total")) == (12, 10)
    observed = {
        name: len(bench.metrics.values[name, (("instance", instance),)])
        for name, instance in (
            ("distserve_ttft_seconds", "prefill_0"),
            ("distserve_prefill_seconds", "prefill_0"),
            ("distserve_tpot_seconds", "decode_0"),
            ("distserve_transfer_seconds", "decode_0"),
        )
    }
    assert observed == {
        "distserve_ttft_seconds": 4,
        "distserve_prefill_seconds": 4,
        "distserve_tpot_seconds": 3,  # a single token has no time per token
        "distserve_transfer_seconds": 3,  # one request ended at its first token, without decode
    }
    await bench.until(lambda: last(bench, "distserve_ready") == 1.0)
    assert last(bench, "distserve_kv_blocks", **PREFILL) == 1000
    assert last(bench, "distserve_instance_usable", **DECODE) == 1.0
    assert last(bench, "distserve_hung_calls", **DECODE) == 0.0
    await bench.until(lambda: last(bench, "distserve_requests") == 0.0)


@scenario(config=QUICK)
async def test_totals_of_engines_become_counters_across_restarts(bench: Bench) -> None:
    engine = bench.engine("decode_0")
    engine.more = {"transfers": 5, "transfers_failed": 1, "transfer_bytes": 4096, "transfer_wire_s": 0.5}

    def total(name: str, **labels: str) -> float:
        return bench.metrics.total(name, **DECODE, **labels)

    await bench.until(lambda: total("distserve_transfer_bytes_total") == 4096)
    assert total("distserve_transfers_total", outcome="ok") == 5
    assert total("distserve_transfers_total", outcome="failed") == 1
    assert total("distserve_transfer_seconds_total", part="wire") == 0.5
    engine.more = {"transfer_bytes": 5000}
    await bench.until(lambda: total("distserve_transfer_bytes_total") == 5000)
    engine.more = {"transfer_bytes": 7000}  # of another life: more than before, and all of it new
    engine.restart()
    await bench.until(lambda: total("distserve_engine_restarts_total") == 1)
    await bench.until(lambda: total("distserve_transfer_bytes_total") == 12000)


@scenario(roles=("prefill", "decode", "decode"), config=QUICK)
async def test_error_classes_and_recoveries(bench: Bench) -> None:
    sink = await bench.request([1, 2, 3], 40)
    await sink.tokens(3)
    assert bench.session.link is not None
    name = bench.session.link.name
    bench.engine(name).end_with(ServingError("INTERNAL", "the step failed"))
    await sink.end()
    assert sink.ids == generate([1, 2, 3], 40, VOCAB)
    await bench.until(lambda: bench.metrics.total("distserve_recoveries_total", code="INTERNAL") == 1)
    labels = {"instance": name, "role": "decode", "code": "INTERNAL"}
    await bench.until(lambda: bench.metrics.total("distserve_instance_errors_total", **labels) == 1)
    status = json.loads(await run_control(bench.orchestrator, '{"op": "status"}'))
    assert next(e for e in status["instances"] if e["instance"] == name)["errors"] == {"INTERNAL": 1}


@scenario(config=dataclasses.replace(CONFIG, slo_ttft_s=10.0, slo_tpot_s=1e-9, slo_window_s=30.0))
async def test_attainment(bench: Bench) -> None:
    good = await bench.request([1], 4, tpot_slo=10.0)
    await good.end()
    slow = await bench.request([2], 4)
    await slow.end()
    gone = await bench.request([3], 4000)
    await gone.tokens(2)
    bench.orchestrator.cancel(bench.session)  # left out
    bench.orchestrator.stopping = True
    refused = await bench.request([4], 4)  # has met nothing
    assert refused.error is not None
    total = bench.metrics.total
    await bench.until(lambda: total("distserve_slo_requests_total", objective="both", met="false") == 2)
    assert total("distserve_slo_requests_total", objective="both", met="true") == 1
    assert total("distserve_slo_requests_total", objective="ttft", met="true") == 2
    await bench.until(lambda: last(bench, "distserve_slo_window_requests") == 3.0)
    assert last(bench, "distserve_slo_attainment", objective="both") == pytest.approx(1 / 3)
    status = json.loads(await run_control(bench.orchestrator, '{"op": "status"}'))
    assert status["attainment"] == pytest.approx({"ttft": 2 / 3, "tpot": 1 / 3, "both": 1 / 3, "requests": 3})
    bench.orchestrator.stopping = False


def test_a_failing_or_slow_back_end_costs_updates_only() -> None:
    release = threading.Event()

    class Slow(MemoryMetrics):
        def metric(self, *args: object, **kwargs: object) -> object:  # type: ignore[override]
            release.wait(5.0)
            raise RuntimeError("no more memory")

    metrics = Metrics(Slow(), max_pending=10)  # type: ignore[arg-type]
    for _ in range(100):
        metrics.refused(ServingError("RESOURCE_EXHAUSTED", "full"))
    assert len(metrics._updates) <= 10
    release.set()
    metrics.close()
    assert not metrics._thread.is_alive()
