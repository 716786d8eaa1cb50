"""KV transfers that compete for links."""

from __future__ import annotations

from distserve_planner.simulator.spec import Route


class Links:
    """When each port is free again. First come, first served: a transfer begins when its ports are free."""

    __slots__ = ("_free", "busy_s")

    def __init__(self) -> None:
        self._free: dict[int, float] = {}
        self.busy_s: dict[int, float] = {}

    def transfer(self, route: Route, tokens: int, ready: float) -> float:
        """Books the KV of `tokens` tokens from `ready` on; returns when the last byte has arrived."""
        free = self._free
        begin = ready
        for port in route.ports:
            if free.get(port, 0.0) > begin:
                begin = free[port]
        took = route.latency_s + route.s_per_token * tokens
        for port in route.ports:
            free[port] = begin + took
            self.busy_s[port] = self.busy_s.get(port, 0.0) + took
        return begin + took
