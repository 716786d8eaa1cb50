"""All scenarios by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distserve_tools.chaos import faults, soak, storm
from distserve_tools.chaos.deployment import PARALLEL, TWO_OF_EACH, Deployment
from distserve_tools.chaos.handles import bad_handles
from distserve_tools.chaos.load import Expectation
from distserve_tools.chaos.outcome import Outcome
from distserve_tools.chaos.shutdown import terminate

STORM_REQUESTS = 10_000
SOAK_TOKENS = 1_000_000


@dataclass(frozen=True)
class Scenario:
    """`run(deployment, seed)` on a server of these instances; `alone(folder, seed)` starts its own."""

    summary: str
    run: Callable[[Deployment, int], Outcome] | None = None
    alone: Callable[[Path, int], Outcome] | None = None
    instances: Sequence[Mapping[str, Any]] = TWO_OF_EACH


def scenarios(storm_requests: int = STORM_REQUESTS, soak_tokens: int = SOAK_TOKENS) -> dict[str, Scenario]:
    """By name, in the order in which they are run."""

    def killed(
        name: str, model: str, part: faults.Part, expectation: Expectation | None = None, **more: Any
    ) -> Scenario:
        return Scenario(
            f"kill -9 of the {part} of {model}",
            lambda deployment, seed: faults.kill(name, deployment, seed, model, part, expectation),
            **more,
        )

    def stopped(name: str, instance: str) -> Scenario:
        return Scenario(
            f"SIGSTOP of the {instance} engine: alive but silent",
            lambda deployment, seed: faults.stop(name, deployment, seed, instance),
        )

    return {
        "kill-prefill-engine": killed("kill-prefill-engine", "prefill_0", "engine"),
        "kill-decode-engine": killed("kill-decode-engine", "decode_0", "engine"),
        "stop-prefill-engine": stopped("stop-prefill-engine", "prefill_1"),
        "stop-decode-engine": stopped("stop-decode-engine", "decode_1"),
        "kill-prefill-stub": killed("kill-prefill-stub", "prefill_0", "stub"),
        "kill-decode-stub": killed("kill-decode-stub", "decode_0", "stub"),
        "kill-orchestrator-stub": killed(
            "kill-orchestrator-stub", "orchestrator", "stub", faults.ENDED_BY_CLIENT
        ),
        "kill-rank": killed("kill-rank", "decode_0", "rank", instances=PARALLEL),
        "bad-handles": Scenario(
            "stale, forged, reused and foreign handles, straight to decode instances",
            lambda deployment, seed: bad_handles("bad-handles", deployment, seed),
        ),
        "cancel-storm": Scenario(
            f"{storm_requests} requests cancelled at random moments, transfers slowed",
            lambda deployment, seed: storm.cancel_storm("cancel-storm", deployment, seed, storm_requests),
        ),
        "soak": Scenario(
            f"{soak_tokens} tokens over 256 streams: no error, memory flat",
            lambda deployment, seed: soak.soak("soak", deployment, seed, soak_tokens),
        ),
        "terminate": Scenario(
            "SIGTERM with 20 streams in flight",
            alone=lambda folder, seed: terminate("terminate", folder, seed),
        ),
    }
