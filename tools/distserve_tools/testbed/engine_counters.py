"""What engines count about themselves, asked of each instance's model directly, past the orchestrator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from distserve.engine.step_times import StepClasses, StepSums, from_wire
from distserve.serving.access import Access
from distserve_tools.instance_caller import InstanceCaller

KEYS = ("steps", "execute_s", "loop_s", "transfers", "transfer_bytes", "transfer_wait_s", "transfer_wire_s")


@dataclass(frozen=True)
class EngineCount:
    """Of one engine since its start, or between two moments."""

    totals: Mapping[str, float]  # by key of `KEYS`
    step_times: StepClasses = field(default_factory=dict)  # by class of step

    def since(self, before: EngineCount) -> EngineCount:
        times = {
            key: sums.minus(before.step_times.get(key, StepSums())) for key, sums in self.step_times.items()
        }
        return EngineCount(
            {key: self.totals[key] - before.totals[key] for key in self.totals},
            {key: sums for key, sums in times.items() if sums.steps},
        )

    def steps(self, prompts: bool) -> list[StepSums]:
        """The classes of steps that compute prompts, or of those that do not."""
        return [sums for (tokens, _), sums in self.step_times.items() if bool(tokens) == prompts]

    @property
    def loop_share(self) -> float:
        """Of the busy time, what goes by outside the model: scheduling, bookkeeping, messages."""
        busy = self.totals["execute_s"] + self.totals["loop_s"]
        return self.totals["loop_s"] / busy if busy > 0 else 0.0


Counters = Mapping[str, EngineCount]
"""By instance."""


def merged(counts: Iterable[EngineCount]) -> EngineCount:
    """Several engines, or several runs of one, as if they were one."""
    totals, times = dict.fromkeys(KEYS, 0.0), dict[tuple[int, int], StepSums]()
    for count in counts:
        for key, value in count.totals.items():
            totals[key] += value
        for step_class, sums in count.step_times.items():
            times[step_class] = times.get(step_class, StepSums()).plus(sums)
    return EngineCount(totals, times)


def engine_counters(url: str, instances: Sequence[str], access: Access) -> Counters:
    """Since each engine's start. Raises `grpc.RpcError`, `ServingError`."""
    found = {}
    for name in instances:
        with InstanceCaller(url, name, "testbed", access) as caller:
            reply = caller.call("status", step_times=True)
        found[name] = EngineCount({key: float(reply[key]) for key in KEYS}, from_wire(reply["step_times"]))
    return found


def counted_since(now: Counters, before: Counters) -> Counters:
    return {name: now[name].since(before[name]) for name in now}
