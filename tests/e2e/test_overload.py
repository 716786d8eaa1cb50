"""A real server that is offered more than it can do, and one that is given a very long prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from serving import BLOCK_SIZE, Deployment, deployed

from distserve_planner.workload import Trace
from distserve_tools.load.generator import make_jobs, run_open_loop
from distserve_tools.load.record import Record
from distserve_tools.load.triton_target import TritonTarget
from model_zoo import VOCAB, ZooModel, make_checkpoint

TTFT_SLO_S = 1.5
PROMPT, OUTPUT = 240, 3
HEAVY: Mapping[str, Any] = {
    "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 6,
    "num_key_value_heads": 6,
}  # fmt: skip
LONG = 30_000
SHORT, SHORTS, SHORT_RPS = 48, 100, 25.0
LIGHT: Mapping[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 32_768,
}  # fmt: skip


def offer(deployment: Deployment, arrivals: np.ndarray, prompts: np.ndarray, outputs: int) -> list[Record]:
    """Sends random prompts of these lengths at these times."""
    trace = Trace(arrivals, prompts, np.full(len(prompts), outputs, np.int64))
    jobs = make_jobs(trace, VOCAB, seed=len(prompts))
    url = deployment.server.grpc_url
    return asyncio.run(run_open_loop(lambda start: TritonTarget(url, start, 120.0), trace, jobs))


def at_rate(deployment: Deployment, rate: float, seconds: float) -> list[Record]:
    count = max(4, int(rate * seconds))
    return offer(deployment, np.arange(count) / rate, np.full(count, PROMPT, np.int64), OUTPUT)


def met(records: list[Record]) -> int:
    return sum(record.ok and record.ttft_s <= TTFT_SLO_S for record in records)


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """1 prefill + 1 decode instance of a model whose prompts cost something; late requests are refused."""
    folder = tmp_path_factory.mktemp("overload")
    model = make_checkpoint(folder / "heavy", "llama", overrides=HEAVY)
    orchestrator = {"heartbeat_s": 0.2, "slo_ttft_s": TTFT_SLO_S, "refuse_late": True}
    with deployed(folder, model, orchestrator=orchestrator) as deployment:
        yield deployment


def burst(deployment: Deployment, count: int) -> float:
    """Requests per second that come to their first token when `count` are there at once."""
    records = [r for r in offer(deployment, np.zeros(count), np.full(count, PROMPT), OUTPUT) if r.ok]
    return len(records) / (max(r.token_s[0] for r in records) - min(r.sent_s for r in records))


@pytest.mark.parametrize("times", [2, 5])
def test_goodput_stays_and_service_recovers_at_once(
    busy: Deployment, times: int, record_testsuite_property: Callable[[str, object], None]
) -> None:
    burst(busy, 8)  # what is made at first use is no part of the capacity
    capacity = burst(busy, 24)
    over = at_rate(busy, times * capacity, 5.0)
    refused = [record for record in over if not record.ok]
    assert {record.error.split(": ")[0] for record in refused if record.error} == {"RESOURCE_EXHAUSTED"}
    # 1 - 1/times must be; but the capacity is that of a short burst, perhaps on a machine with others
    assert len(refused) > max(0.0, 1 - 2 / times) * len(over)
    goodput = met(over) / max(record.planned_s for record in over)
    assert goodput > 0.5 * capacity, f"{goodput:.1f} of {capacity:.1f} requests/s were in time"
    waits = sorted(record.end_s - record.sent_s for record in refused)
    served = sorted(record.ttft_s for record in over if record.ok)
    assert waits[len(waits) // 2] < served[len(served) // 2], "refused no sooner than served"
    after = at_rate(busy, 0.5 * capacity, 4.0)
    while met(after) < 0.8 * len(after):  # excused only by a machine that others have slowed since
        slower = burst(busy, 24)
        assert slower < 0.75 * capacity, [record.error for record in after if record.error]
        capacity = slower
        after = at_rate(busy, 0.5 * capacity, 4.0)
    busy.wait_idle()
    record_testsuite_property(
        f"overload_{times}x",
        f"capacity {capacity:.1f}/s, goodput {goodput:.1f}/s; {len(over)} requests, {len(refused)} refused "
        f"(after {waits[len(waits) // 2] * 1e3:.0f} ms in the median, {waits[-1] * 1e3:.0f} ms at most), "
        f"{met(over)} in time; at half the capacity then {met(after)} of {len(after)} in time",
    )


@pytest.fixture(scope="module")
def long_context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """One prefill instance that computes long prompts in pieces, and one that does not; 1 decode instance."""
    folder = tmp_path_factory.mktemp("long")
    model: ZooModel = make_checkpoint(folder / "light", "llama", overrides=LIGHT)
    blocks = {"num_blocks": 3 * LONG // (2 * BLOCK_SIZE)}
    instances = (
        {"role": "prefill", "prefill_chunk_tokens": 512, **blocks},
        {"role": "prefill", **blocks},
        {"role": "decode", **blocks},
    )
    with deployed(folder, model, instances) as deployment:
        yield deployment


def one_long_among_short(deployment: Deployment, prefill: str) -> tuple[Record, list[Record]]:
    others = [name for name in ("prefill_0", "prefill_1") if name != prefill]
    for name in others:
        deployment.client.control("drain", instance=name)
    arrivals = np.concatenate([[0.0], 0.2 + np.arange(SHORTS) / SHORT_RPS])
    lengths = np.concatenate([[LONG], np.full(SHORTS, SHORT)]).astype(np.int64)
    records = offer(deployment, arrivals, lengths, 2)
    for name in others:
        deployment.client.control("attach", instance={"name": name, "role": "prefill"})
    assert all(record.ok for record in records), [record.error for record in records if record.error]
    return records[0], records[1:]


def test_short_prompts_overtake_one_of_30k_tokens(
    long_context: Deployment, record_testsuite_property: Callable[[str, object], None]
) -> None:
    times = {}
    for prefill in ("prefill_0", "prefill_1"):
        long, shorts = one_long_among_short(long_context, prefill)
        times[prefill] = float(np.percentile([record.ttft_s for record in shorts], 99)), long.ttft_s
        long_context.wait_idle()
    (pieces_p99, pieces_long), (whole_p99, whole_long) = times["prefill_0"], times["prefill_1"]
    record_testsuite_property(
        "long_prompt",
        f"short prompts' TTFT p99: {pieces_p99 * 1e3:.0f} ms in pieces, {whole_p99 * 1e3:.0f} ms without; "
        f"TTFT of the long one: {pieces_long:.2f} s and {whole_long:.2f} s",
    )
    assert pieces_p99 < 0.5 * whole_p99
    assert pieces_long < 4 * whole_long


def test_pieces_give_the_same_tokens(long_context: Deployment) -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(10, VOCAB, 2000).tolist()
    answers = set()
    for name, other in (("prefill_0", "prefill_1"), ("prefill_1", "prefill_0")):
        long_context.client.control("drain", instance=other)
        answer = long_context.client.complete(prompt, max_tokens=8, temperature=0.0, ignore_eos=True)
        assert answer.stage_times["prefill_instance"] == name
        answers.add(answer.token_ids)
        long_context.client.control("attach", instance={"name": other, "role": "prefill"})
    assert len(answers) == 1
    long_context.wait_idle()
