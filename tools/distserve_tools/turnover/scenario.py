"""What is served and asked: three instances on two cores, and requests that turn from long prompts to long
answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from distserve_planner.placement_file import PLACEMENT_SCHEMA
from distserve_planner.slo import Slo
from distserve_planner.workload import Trace

SPREAD = 0.25  # lengths are uniform within this share of their mean
KV_BYTES = 128 << 20
MEMORY_GIB = 2.0  # of a device, for the planner
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Mix:
    """Mean tokens in and out."""

    input_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Scenario:
    """A rate, two mixes, how long each lasts, and the limits of all instances.

    max_batch: requests that decode at once in an instance. It stands for KV memory: what a core's own memory
    holds of this model would never be the limit.
    """

    model: str
    first: Mix = Mix(320, 8)
    second: Mix = Mix(24, 96)
    rate_rps: float = 2.4
    first_s: float = 90.0
    second_s: float = 210.0
    ttft_s: float = 1.5  # objectives
    tpot_s: float = 0.06
    max_batch: int = 4
    window_s: float = 15.0
    seed: int = 0

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
