"""From a scheduler's batch to what the workers compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distserve.core.batch import Item
from distserve.engine.requests import EngineRequest
from distserve.worker.step import LAST_SAMPLED, Joining, StepInput, StepItem


class StepBuilder:
    """Remembers which sequences the workers know."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._leaving: list[str] = []

    def build(self, items: Sequence[Item], requests: Mapping[str, EngineRequest]) -> StepInput:
        """The input of one step; every item's request must be in `requests`."""
        joining = [
            self._join(requests[item.request.id]) for item in items if item.request.id not in self._known
        ]
        step_items = []
        for item in items:
            request = item.request
            tokens = request.tokens
            assert tokens is not None
            start = item.start
            # one token at the end is the usual case; a slice of all tokens would be copied twice
            if item.num_tokens > 1:
                new = tokens[start : start + item.num_tokens]
            else:
                new = [tokens[start] if start < len(tokens) else LAST_SAMPLED]
            step_items.append(StepItem(request.id, new, start, request.blocks, item.samples))
        leaving, self._leaving = self._leaving, []
        return StepInput(step_items, joining, leaving)

    def leave(self, key: str) -> None:
        """The request is over: with the next step the workers forget its sampling state."""
        if key in self._known:
            self._known.discard(key)
            self._leaving.append(key)

    def _join(self, state: EngineRequest) -> Joining:
        self._known.add(state.key)
        return Joining(state.key, state.params, state.request.prompt_len, list(state.tokens))
