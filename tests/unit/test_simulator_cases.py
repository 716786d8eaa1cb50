"""The simulator against closed forms and against cases that can be worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from distserve.core.scheduler import Limits
from distserve_planner.cluster import Link
from distserve_planner.coefficients import DecodePiece, Degree, PrefillPiece
from distserve_planner.latency import LatencyModel
from distserve_planner.models_catalog import model_dimensions
from distserve_planner.queueing import md1_ttft_s, pipeline_ttft_s, two_way_tensor_ttft_s
from distserve_planner.simulator.rounds import DecodeRounds
from distserve_planner.simulator.spec import InstanceSpec, Route, SystemSpec
from distserve_planner.simulator.system import Simulation

PROMPT = 512
SERVICE_S = 0.1
ALONE = Limits(64, PROMPT)  # no batching: each prompt fills a batch


def latency(prefill_s: float = SERVICE_S, decode_s: float = 0.02, per_token_s: float = 0.0) -> LatencyModel:
    degree = Degree(1, (PrefillPiece(prefill_s, per_token_s),), (DecodePiece(decode_s, 0.0),))
    return LatencyModel("opt-125m", model_dimensions("opt-125m"), "test", "fp16", (degree,))


def instance(model: LatencyModel, pp: int = 1, limits: Limits = ALONE, blocks: int = 10_000) -> InstanceSpec:
    return InstanceSpec(model.instance(1, pp, stage_link=Link(1e15)), blocks, limits)


def mean_ttft(spec: InstanceSpec, rate: float, count: int = 60_000) -> float:
    arrivals = np.cumsum(np.random.default_rng(7).standard_exponential(count)) / rate
    run = Simulation(SystemSpec(prefill=(spec,)), arrivals.tolist(), [PROMPT] * count, [1] * count)
    run.run()
    return float(run.outcome(1000).ttft_s.mean())


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_one_prefill_instance_is_an_md1_queue(load: float) -> None:
    rate = load / SERVICE_S
    assert mean_ttft(instance(latency()), rate) == pytest.approx(md1_ttft_s(rate, SERVICE_S), rel=0.02)


@pytest.mark.parametrize("load", [0.6, 1.4])
def test_two_pipeline_stages_follow_equation_2(load: float) -> None:
    rate = load / SERVICE_S
    expected = pipeline_ttft_s(rate, SERVICE_S, SERVICE_S / 2)
    assert mean_ttft(instance(latency(), pp=2), rate) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("load", [0.5, 1.1])
def test_two_way_tensor_parallelism_follows_equation_3(load: float) -> None:
    speedup, rate = 1.6, load / SERVICE_S
    spec = instance(latency(prefill_s=SERVICE_S / speedup))
    assert mean_ttft(spec, rate) == pytest.approx(two_way_tensor_ttft_s(rate, SERVICE_S, speedup), rel=0.02)


def test_short_prompts_share_a_batch_and_long_ones_run_alone() -> None:
    model = latency(prefill_s=0.01, per_token_s=1e-3)
    run = Simulation(SystemSpec(prefill=(instance(model),)), [0.0] * 5, [100, 200, 300, 1000, 100], [1] * 5)
    run.run()
    # 100 arrives first and starts alone; 200 + 300 fit into Lm = 512; 1000 is longer than Lm; then 100
    assert run.outcome().first.tolist() == pytest.approx([0.11, 0.62, 0.62, 1.63, 1.74])


def test_a_long_batch_ahead_makes_a_bubble_in_the_pipeline() -> None:
    model = latency(prefill_s=0.0, per_token_s=2e-3)
    run = Simulation(SystemSpec(prefill=(instance(model, pp=2),)), [0.0, 0.0], [500, 100], [1, 1])
    run.run()
    # stages of 0.5 s and 0.1 s: the second enters at 0.5 s, waits for the first to leave stage 2 at 1.0 s
    assert run.outcome().first.tolist() == pytest.approx([1.0, 1.1])


def test_transfers_share_a_link_first_come_first_served() -> None:
    model = latency()
    system = SystemSpec(
        prefill=(instance(model),) * 2,
        decode=(instance(model),) * 2,
        routes={(i, j): Route((0,), 0.001, 1e-4) for i in range(2) for j in range(2)},
    )
    run = Simulation(system, [0.0, 0.0], [PROMPT, PROMPT], [3, 3])
    run.run()
    outcome = run.outcome()
    one = 0.001 + 1e-4 * PROMPT
    assert outcome.first.tolist() == pytest.approx([0.1, 0.1])
    assert (outcome.ready - outcome.first).tolist() == pytest.approx([one, 2 * one])
    assert (outcome.finish - outcome.ready).tolist() == pytest.approx([0.04, 0.04])


def test_prefill_waits_while_its_memory_holds_what_decode_has_not_pulled() -> None:
    model = latency()
    per_prompt = PROMPT // 16
    system = SystemSpec(
        prefill=(instance(model, blocks=2 * per_prompt),),
        decode=(instance(model, limits=Limits(1, PROMPT)),),  # one request at a time
    )
    run = Simulation(system, [0.0] * 4, [PROMPT] * 4, [11] * 4)
    run.run()
    outcome = run.outcome()
    # each decodes for 10 x 20 ms. The third prompt begins when the second request is pulled, at 0.3 s
    assert outcome.finish.tolist() == pytest.approx([0.3, 0.5, 0.7, 0.9])
    assert outcome.admitted.tolist() == pytest.approx([0.1, 0.3, 0.5, 0.7])
    assert outcome.started.tolist() == pytest.approx([0.0, 0.1, 0.2, 0.3])


def test_request_joins_at_the_end_of_the_round_in_progress() -> None:
    model = latency(prefill_s=0.01)
    system = SystemSpec(prefill=(instance(model),), decode=(instance(model),))
    run = Simulation(system, [0.0, 0.021], [10, 10], [101, 2])
    run.run()
    outcome = run.outcome()
    # rounds of 20 ms from 0.01 s on; the second has its token at 0.031 s and joins at 0.05 s
    assert outcome.first[1] == pytest.approx(0.031)
    assert outcome.finish.tolist() == pytest.approx([2.01, 0.07])


def test_pipelined_decode_gives_every_micro_batch_one_token_per_trip() -> None:
    degree = Degree(1, (PrefillPiece(0.1, 0.0),), (DecodePiece(0.04, 1e-6, 1e-3),))
    model = LatencyModel("opt-125m", model_dimensions("opt-125m"), "test", "fp16", (degree,))
    hop_bytes = 2 * model.model.hidden_size
    rounds = DecodeRounds(model.instance(1, 2, stage_link=Link(hop_bytes * 1e3, 0.001)))
    # 8 requests, 2 micro-batches of 4 with 400 of 800 tokens: 40 + 4 + 0.4 ms through both stages, and a hop
    assert rounds.span_s(8, 800, 1) == pytest.approx(0.0444 + 0.001 + 4e-3, rel=1e-6)
    assert rounds.steps_within(8, 800, rounds.span_s(8, 800, 7) + 1e-9) == 7
    assert rounds.steps_within(8, 800, rounds.span_s(8, 800, 7) - 1e-6) == 6


def test_chunked_prefill_spreads_a_prompt_over_steps() -> None:
    model = latency(prefill_s=0.05)
    spec = InstanceSpec(model.instance(1), 1000, Limits(8, 512, chunk_tokens=100))
    run = Simulation(SystemSpec(unified=(spec,), policy="chunked_prefill"), [0.0], [250], [3])
    run.run()
    assert run.outcome().first[0] == pytest.approx(3 * 0.05)
    assert run.outcome().finish[0] == pytest.approx(3 * 0.05 + 2 * 0.02)


def test_prefill_first_interrupts_decoding() -> None:
    model = latency(prefill_s=0.05)
    run = Simulation(
        SystemSpec(unified=(instance(model),), policy="prefill_first"), [0.0, 0.061], [10, 10], [11, 2]
    )
    run.run()
    # decoding from 0.05 s in steps of 20 ms; the prompt of 0.061 s runs from 0.07 to 0.12 s
    assert run.outcome().first[1] == pytest.approx(0.12)
    assert run.outcome().finish.tolist() == pytest.approx([0.05 + 10 * 0.02 + 0.05, 0.14])


def test_more_work_goes_to_the_instance_with_less() -> None:
    model = latency(prefill_s=0.0, per_token_s=1e-3)
    run = Simulation(SystemSpec(prefill=(instance(model),) * 2), [0.0, 0.0, 0.05], [500, 100, 100], [1] * 3)
    run.run()
    assert run.outcome().first.tolist() == pytest.approx([0.5, 0.1, 0.2])
