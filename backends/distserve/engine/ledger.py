"""The requests that live in an engine: by key, by owner and id, by deadline."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping

from distserve.engine.requests import EngineRequest, Owner


class Ledger:
    """Of the loop thread. Owners name their requests by id, the engine by key."""

    def __init__(self) -> None:
        self._requests: dict[str, EngineRequest] = {}
        self._keys: dict[Owner, dict[str, str]] = defaultdict(dict)
        self._deadlines: list[tuple[float, str]] = []

    @property
    def by_key(self) -> Mapping[str, EngineRequest]:
        return self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, state: EngineRequest) -> None:
        self._requests[state.key] = state
        self._keys[state.owner][state.id] = state.key
        if state.deadline_s is not None:
            self._drop_old_deadlines()
            heapq.heappush(self._deadlines, (state.deadline_s, state.key))

    def remove(self, state: EngineRequest) -> None:
        del self._requests[state.key]
        keys = self._keys[state.owner]
        if keys.get(state.id) == state.key:
            del keys[state.id]
        if not keys:
            del self._keys[state.owner]

    def find(self, owner: Owner, ids: Iterable[str]) -> list[EngineRequest]:
        """Those of an owner's ids that live."""
        keys = self._keys.get(owner, {})
        return [self._requests[keys[id]] for id in ids if id in keys]

    def of(self, owner: Owner) -> list[EngineRequest]:
        """All of an owner."""
        return [self._requests[key] for key in self._keys.get(owner, {}).values()]

    def overdue(self, now: float) -> list[EngineRequest]:
        """Requests whose deadline has come; each is returned once."""
        out = []
        while self._deadlines and self._deadlines[0][0] <= now:
            state = self._requests.get(heapq.heappop(self._deadlines)[1])
            if state is not None:
                out.append(state)
        return out

    def next_deadline(self) -> float | None:
        """The next deadline, or an earlier one of a request that has ended."""
        return self._deadlines[0][0] if self._deadlines else None

    def _drop_old_deadlines(self) -> None:
        """Keeps the heap in proportion: most entries may be of requests that have ended."""
        if len(self._deadlines) > 2 * len(self._requests) + 64:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._requests]
            heapq.heapify(self._deadlines)
