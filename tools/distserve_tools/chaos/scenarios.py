"""All scenarios by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distserve_tools.chaos import faults, overload, pressure, soak, storm
from distserve_tools.chaos.deployment import PARALLEL, TWO_OF_EACH, Deployment, Setting
from distserve_tools.chaos.handles import abandoned_kv, bad_handles
from distserve_tools.chaos.load import Expectation
from distserve_tools.chaos.outcome import Outcome
from distserve_tools.chaos.shutdown import terminate

STORM_REQUESTS = 10_000
SOAK_TOKENS = 4_000_000  # about 17,000 requests: memory grows in steps of 3 to 4 MB
OVERLOAD_S = 120.0


@dataclass(frozen=True)
class Scenario:
    """`run(deployment, seed)` on a server of this setting; `alone(folder, seed)` starts its own.

    `long`: only when it is named.
    """

    summary: str
    run: Callable[[Deployment, int], Outcome] | None = None
    alone: Callable[[Path, int], Outcome] | None = None
    setting: Setting = TWO_OF_EACH
    long: bool = False


def scenarios(
    storm_requests: int = STORM_REQUESTS, soak_tokens: int = SOAK_TOKENS, overload_s: float = OVERLOAD_S
) -> dict[str, Scenario]:
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
        "kill-rank": killed("kill-rank", "decode_0", "rank", setting=PARALLEL),
        "kill-tritonserver": Scenario(
            "kill -9 of tritonserver itself",
            lambda deployment, seed: faults.kill_server("kill-tritonserver", deployment, seed),
        ),
        "bad-handles": Scenario(
            "stale, forged, reused and foreign handles, straight to decode instances",
            lambda deployment, seed: bad_handles("bad-handles", deployment, seed),
        ),
        "abandoned-kv": Scenario(
            "KV that nobody fetches: freed with its lease, kept while it is renewed",
            lambda deployment, seed: abandoned_kv("abandoned-kv", deployment, seed),
        ),
        "cancel-storm": Scenario(
            f"{storm_requests} requests cancelled at random moments, transfers slowed",
            lambda deployment, seed: storm.cancel_storm("cancel-storm", deployment, seed, storm_requests),
        ),
        "soak": Scenario(
            f"{soak_tokens} tokens over 256 streams: no error, memory flat",
            lambda deployment, seed: soak.soak("soak", deployment, seed, soak_tokens),
            long=True,
        ),
        "kv-pressure": Scenario(
            "20 streams on a decode instance with room for three: preempted, right, none refused",
            lambda deployment, seed: pressure.kv_pressure("kv-pressure", deployment, seed),
            setting=pressure.NARROW,
        ),
        "long-output": Scenario(
            "a request of 100,000 tokens among 20 short ones: nobody starves",
            lambda deployment, seed: pressure.long_output("long-output", deployment, seed),
            setting=pressure.LONG_CONTEXT,
        ),
        "long-prompt": Scenario(
            "a prompt of 30,000 tokens before 100 short ones, which overtake it",
            lambda deployment, seed: pressure.long_prompt("long-prompt", deployment, seed),
            setting=pressure.LONG_CONTEXT,
        ),
        "overload": Scenario(
            f"2 and 5 times the capacity, then half of it, {overload_s:g} s each",
            lambda deployment, seed: overload.overload("overload", deployment, seed, overload_s),
            setting=overload.COSTLY_PROMPTS,
            long=True,
        ),
        "terminate": Scenario(
            "SIGTERM with 20 streams in flight",
            alone=lambda folder, seed: terminate("terminate", folder, seed),
        ),
    }
