"""The rules of the authors' released simulator, so that our figures can be compared with theirs.

One prefill and one decode instance (or one colocated one), as `simdistserve/` of the DistServe repository
has them: prompts are batched without `Lm` up to the KV capacity, decode takes up to 50,000 tokens a step
and never waits for memory, KV moves in no time, the first stage of every iteration costs 2 ms and 0.1 us
per token more, a prefill stage 1 ms per stage of its pipeline. Decode batches go round a ring of stages and
merge where they queue. An output of n tokens takes n decode rounds, and TPOT is their time over n. P90 of
TTFT and of TPOT are tested apart, strictly.

Unlike the original this does not step through every token where nothing changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distserve_planner.simulator.authors import AuthorsPhase, prefill_times
from distserve_planner.simulator.authors_colocated import colocated_times
from distserve_planner.simulator.authors_ring import decode_times
from distserve_planner.simulator.records import Times
from distserve_planner.slo import Slo, percentile


@dataclass(frozen=True, eq=False)
class Latencies:
    """Per request, float64 [n], seconds."""

    ttft_s: Times
    tpot_s: Times

    def passes(self, slo: Slo) -> bool:
        """Both percentiles below their objectives."""
        return (
            percentile(self.ttft_s, slo.attainment) < slo.ttft_s
            and percentile(self.tpot_s, slo.attainment) < slo.tpot_s
        )


def simulate(
    prefill: AuthorsPhase,
    decode: AuthorsPhase | None,
    arrival_s: list[float],
    input_tokens: list[int],
    output_tokens: list[int],
) -> Latencies:
    """All requests, until the last has ended. decode=None: `prefill` does both, as their vLLM model."""
    if decode is None:
        ready, last = colocated_times(prefill, arrival_s, input_tokens, output_tokens)
    else:
        ready = prefill_times(prefill, arrival_s, input_tokens)
        last = decode_times(decode, ready, input_tokens, output_tokens)
    first = np.array(ready)
    outputs = np.array(output_tokens, float)
    tpot = np.where(outputs > 0, (np.array(last) - first) / np.maximum(outputs, 1), 0.0)
    return Latencies(first - np.array(arrival_s), tpot)
