"""Pipelines in the simulator against the engine's schedulers, stepped micro-batch by micro-batch.

The simulator takes a round of all micro-batches as one closed form. Here every micro-batch passes every stage
by itself, as in the engine: up to pp steps in flight, the scheduler asked for the next one whenever the first
stage is free.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from itertools import count
from math import inf

import numpy as np
import pytest
from numpy.typing import NDArray

from distserve.core.batch import Batch
from distserve.core.blocks import CountingBlocks
from distserve.core.config import Policy
from distserve.core.decode_scheduler import DecodeScheduler
from distserve.core.request import Request
from distserve.core.scheduler import Limits
from distserve.core.unified_scheduler import UnifiedScheduler
from distserve_planner.cluster import Link
from distserve_planner.coefficients import DecodePiece, Degree, PrefillPiece
from distserve_planner.instance_latency import InstanceLatency
from distserve_planner.latency import LatencyModel
from distserve_planner.models_catalog import model_dimensions
from distserve_planner.simulator.spec import InstanceSpec, SystemSpec
from distserve_planner.simulator.system import Simulation

LIMITS = Limits(max_batch_size=128, max_batch_tokens=512, chunk_tokens=256)
BLOCKS = 4000
DEGREE = Degree(1, (PrefillPiece(0.01, 2e-4, 1e-8),), (DecodePiece(0.02, 1e-6, 1.5e-4),))


def latency(pp: int) -> InstanceLatency:
    model = LatencyModel("opt-125m", model_dimensions("opt-125m"), "test", "fp16", (DEGREE,))
    return model.instance(1, pp, stage_link=Link(1e9, 1e-4))


def requests(rate: float, total: int) -> tuple[list[float], list[int], list[int]]:
    generator = np.random.default_rng(3)
    arrivals = np.cumsum(generator.standard_exponential(total)) / rate
    return (
        arrivals.tolist(),
        generator.integers(20, 800, total).tolist(),
        generator.integers(2, 300, total).tolist(),
    )


def stepped(
    scheduler: DecodeScheduler | UnifiedScheduler,
    pp: int,
    arrivals: list[float],
    inputs: list[int],
    outputs: list[int],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """First and last token of each request, every step of every micro-batch by itself."""
    times, first, last = latency(pp), np.zeros(len(arrivals)), np.zeros(len(arrivals))
    free = [0.0] * pp  # when each stage is
    flights: deque[tuple[float, Batch]] = deque()
    order, position, now = count(), 0, 0.0
    events: list[tuple[float, int]] = []

    def step_s(batch: Batch) -> tuple[float, float]:
        tokens = batch.prefill_tokens
        squares = sum((i.start + i.num_tokens) ** 2 - i.start**2 for i in batch.prefill)
        size = batch.num_decodes
        context = batch.context_tokens + size
        return times.mixed_stage_s(tokens, squares, size, context, len(batch.prefill)), tokens + size

    while position < len(arrivals) or flights or scheduler.decoding or scheduler.waiting:
        upcoming = arrivals[position] if position < len(arrivals) else inf
        due = min(events[0][0] if events else inf, upcoming)
        assert due < inf, "nothing happens any more"
        now = due
        while events and events[0][0] <= now:
            heappop(events)
        while position < len(arrivals) and arrivals[position] <= now:
            request = Request(str(position), inputs[position], outputs[position], arrivals[position])
            if isinstance(scheduler, DecodeScheduler):
                request.generated, request.computed = 1, request.prompt_len
                first[position] = now
            scheduler.add(request)
            position += 1
        while flights and flights[0][0] <= now:
            batch = flights.popleft()[1]
            for item in batch.prefill:
                if item.samples and not item.request.generated:
                    first[int(item.request.id)] = now
            for ended in scheduler.complete(batch):
                last[int(ended.id)] = now
        if isinstance(scheduler, DecodeScheduler):
            for request in scheduler.admit():
                scheduler.start(request)
        while len(flights) < pp and free[0] <= now:
            batch = scheduler.schedule()
            if batch is None:
                break
            stage, tokens = step_s(batch)
            leaves = now + stage
            free[0] = leaves
            heappush(events, (leaves, next(order)))
            for index in range(1, pp):
                leaves = max(leaves + times.hop_s(tokens), free[index]) + stage
                free[index] = leaves
            flights.append((leaves, batch))
            heappush(events, (leaves, next(order)))
    return first, last


@pytest.mark.parametrize(("pp", "rate"), [(2, 4.0), (2, 9.0), (4, 9.0), (4, 16.0)])
def test_decode_rounds_are_those_of_the_schedulers_micro_batches(pp: int, rate: float) -> None:
    arrivals, inputs, outputs = requests(rate, 1500)
    system = SystemSpec(decode=(InstanceSpec(latency(pp), BLOCKS, LIMITS),))
    run = Simulation(system, arrivals, inputs, outputs)
    run.run()
    scheduler = DecodeScheduler(LIMITS, CountingBlocks(BLOCKS, 16), stages=pp)
    first, last = stepped(scheduler, pp, arrivals, inputs, outputs)
    theirs = (last - first)[200:1300] / (np.array(outputs)[200:1300] - 1)
    ours = run.outcome(200, 1300).tpot_s
    for share in (50, 90, 99):
        assert np.percentile(ours, share) == pytest.approx(np.percentile(theirs, share), rel=0.05)


@pytest.mark.parametrize("policy", ["prefill_first", "chunked_prefill"])
@pytest.mark.parametrize(("pp", "rate"), [(1, 2.5), (2, 4.0), (4, 6.0)])
def test_colocated_pipelines_are_those_of_the_scheduler(policy: Policy, pp: int, rate: float) -> None:
    arrivals, inputs, outputs = requests(rate, 1200)
    system = SystemSpec(unified=(InstanceSpec(latency(pp), BLOCKS, LIMITS),), policy=policy)
    run = Simulation(system, arrivals, inputs, outputs)
    run.run()
    scheduler = UnifiedScheduler(LIMITS, CountingBlocks(BLOCKS, 16), policy, stages=pp)
    first, last = stepped(scheduler, pp, arrivals, inputs, outputs)
    outcome = run.outcome(200, 1000)
    ttft = (first - np.array(arrivals))[200:1000]
    tpot = ((last - first) / np.maximum(np.array(outputs) - 1, 1))[200:1000]
    for share in (50, 90):
        assert np.percentile(outcome.tpot_s, share) == pytest.approx(np.percentile(tpot, share), rel=0.1)
        assert np.percentile(outcome.ttft_s, share) == pytest.approx(np.percentile(ttft, share), rel=0.1)
