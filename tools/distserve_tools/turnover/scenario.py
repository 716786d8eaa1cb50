"""What is served and asked: three instances on two cores, and requests that turn from long prompts to long
answers.

Everything follows from the profile of a core, so that the load means the same on each machine: one decode
instance is too little for the second mix, two are enough, and two prefill instances have room in the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from distserve_planner.placement_file import PLACEMENT_SCHEMA
from distserve_planner.profile_file import Profile
from distserve_planner.slo import Slo
from distserve_planner.workload import Trace

SPREAD = 0.25  # lengths are uniform within this share of their mean
KV_BYTES = 128 << 20
MEMORY_GIB = 2.0  # of a device, for the planner
BLOCK_SIZE = 16
MAX_BATCH = 2  # see `Scenario`; small, since three engines and the server share two cores and one memory
SHORT, LONG = 24, 64  # tokens in and out of the second mix
FEW = 6  # tokens out of the first
DECODE_LOAD = 1.1  # of one decode instance by the second mix
PREFILL_LOAD = 0.35  # of each of two prefill instances by the first
TTFT_FACTOR, TPOT_FACTOR = 8.0, 2.5  # objectives over what a prompt, and a step of a full batch, take


@dataclass(frozen=True)
class Mix:
    """Mean tokens in and out."""

    input_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Scenario:
    """A rate, two mixes, how long each lasts, objectives, and the limits of all instances.

    max_batch: requests that decode at once in an instance. It stands for KV memory: what a core's own memory
    holds of this model would never be the limit.
    """

    model: str
    first: Mix
    second: Mix
    rate_rps: float
    ttft_s: float
    tpot_s: float
    first_s: float = 90.0
    second_s: float = 180.0
    max_batch: int = MAX_BATCH
    window_s: float = 15.0
    seed: int = 0

    @classmethod
    def sized(cls, model: str, profile: Profile, **values: float) -> Scenario:
        """For the speed of a core; `values` are further fields."""
        core = profile.latency_model().instance(1)
        step_s = core.decode_total_s(MAX_BATCH, MAX_BATCH * (SHORT + LONG / 2))
        rate = DECODE_LOAD * MAX_BATCH / step_s / LONG
        longest = profile.model.max_context // 2
        prompt = next(
            (
                n
                for n in range(longest, SHORT, -1)
                if core.prefill_total_s(n, n**2, 1) * rate <= 2 * PREFILL_LOAD
            ),
            SHORT,
        )
        ttft_s = TTFT_FACTOR * core.prefill_total_s(prompt, prompt**2, 1)
        return cls(
            model,
            Mix(prompt, FEW),
            Mix(SHORT, LONG),
            rate,
            ttft_s,
            TPOT_FACTOR * step_s,
            **values,  # type: ignore[arg-type]
        )

    @property
    def slo(self) -> Slo:
        return Slo(self.ttft_s, self.tpot_s)

    def trace(self) -> Trace:
        """Poisson arrivals; the mix turns at `first_s`."""
        rng = np.random.default_rng(self.seed)
        end_s = self.first_s + self.second_s
        count = rng.poisson(self.rate_rps * end_s)
        arrival = np.sort(rng.random(count)) * end_s
        turned = arrival >= self.first_s
        first, second = self.first, self.second

        def lengths(before: int, after: int) -> NDArray[np.int64]:
            means = np.where(turned, after, before)
            spread = rng.uniform(1 - SPREAD, 1 + SPREAD, count)
            drawn: NDArray[np.int64] = np.maximum(1, np.rint(means * spread)).astype(np.int64)
            return drawn

        inputs = lengths(first.input_tokens, second.input_tokens)
        outputs = lengths(first.output_tokens, second.output_tokens)
        return Trace(arrival, inputs, outputs, "turning")

    def placement(self, cores: tuple[int, int], batch_tokens: int, request_log: Path) -> str:
        """Two prefill instances and one for decode. The prefill instance that would stay shares a core with
        the decode instance, and in either mix one of these two has little to do."""
        common: dict[str, Any] = {
            "kv_bytes": KV_BYTES,
            "max_batch_size": self.max_batch,
            "max_batch_tokens": batch_tokens,
        }
        listed = [("prefill", cores[1]), ("prefill", cores[0]), ("decode", cores[1])]
        values = {
            "schema": PLACEMENT_SCHEMA,
            "model": self.model,
            "block_size": BLOCK_SIZE,
            "oversubscribe": True,
            "orchestrator": {
                "slo_ttft_s": self.ttft_s,
                "slo_tpot_s": self.tpot_s,
                "request_log": str(request_log),
            },
            "instances": [{"role": role, "devices": [f"cpu:{core}"], **common} for role, core in listed],
        }
        return str(yaml.safe_dump(values, sort_keys=False))

    def watch_words(self, profile: Path) -> list[str]:
        """Arguments of `planner watch` that describe the case."""
        words = ["--model", self.model, "--device", str(profile), "--devices-per-node", "3"]
        words += ["--device-memory-gib", f"{MEMORY_GIB:g}", "--max-batch-size", str(self.max_batch)]
        words += [
            "--workload",
            "sharegpt",
            "--ttft",
            f"{self.slo.ttft_s:g}",
            "--tpot",
            f"{self.slo.tpot_s:g}",
        ]
        words += ["--families", "high", "--fixed-devices", "--jobs", "1", "--window-s", f"{self.window_s:g}"]
        return [*words, "--load-s", "15", "--drain-s", "5"]
