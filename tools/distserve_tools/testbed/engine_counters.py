"""What engines count about themselves, asked of each instance's model directly, past the orchestrator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distserve.serving.access import Access
from distserve_tools.instance_caller import InstanceCaller

KEYS = ("steps", "execute_s", "loop_s", "transfers", "transfer_bytes", "transfer_wait_s", "transfer_wire_s")

Counters = Mapping[str, Mapping[str, float]]
"""By instance, then by key."""


def engine_counters(url: str, instances: Sequence[str], access: Access) -> Counters:
    """Totals since each engine's start. Raises `grpc.RpcError`, `ServingError`."""
    found = {}
    for name in instances:
        with InstanceCaller(url, name, "testbed", access) as caller:
            reply = caller.call("status")
        found[name] = {key: float(reply[key]) for key in KEYS}
    return found


def counted_since(now: Counters, before: Counters) -> dict[str, dict[str, float]]:
    return {name: {key: now[name][key] - before[name][key] for key in KEYS} for name in now}


def loop_share(counted: Mapping[str, float]) -> float:
    """Of an engine's busy time, what it spends outside the model: scheduling, bookkeeping, messages."""
    busy = counted["execute_s"] + counted["loop_s"]
    return counted["loop_s"] / busy if busy > 0 else 0.0
