"""The steps that the executor has and whose tokens are not known, and what waits for them to end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distserve.core.batch import Batch, Item
from distserve.engine.step_times import StepShape
from distserve.serving.schema import ServingError


@dataclass(frozen=True, slots=True)
class Flight:
    """One step. `sampling`: those of the items that get a token. `booked`: the scheduler counts it as done
    since it began.
    """

    batch: Batch
    items: Sequence[Item]
    sampling: Sequence[Item]
    shape: StepShape
    began_s: float
    began_cpu_s: float
    booked: bool = False

    @classmethod
    def of(cls, batch: Batch, began_s: float, began_cpu_s: float, booked: bool = False) -> Flight:
        """began_s, began_cpu_s: now, by the engine's clock and by the processor time of its thread."""
        decode = batch.decode_items()
        items = [*decode, *batch.prefill]
        sampling = [item for item in items if item.samples]
        return cls(batch, items, sampling, StepShape.of(batch.prefill, decode), began_s, began_cpu_s, booked)


class Flights:
    """In the order in which they began, which is the order in which they end."""

    def __init__(self) -> None:
        self._flights: deque[Flight] = deque()
        self._keys: set[str] = set()
        self._doomed: dict[str, ServingError | None] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def __contains__(self, key: str) -> bool:
        """Is the request in one of them, and its counts not booked?"""
        return key in self._keys

    @property
    def booked(self) -> bool:
        """Are all of them booked?"""
        return all(flight.booked for flight in self._flights)

    def began_s(self) -> float | None:
        """When the oldest one began."""
        return self._flights[0].began_s if self._flights else None

    def add(self, flight: Flight) -> None:
        self._flights.append(flight)
        if not flight.booked:
            self._keys.update(item.request.id for item in flight.items)

    def land(self) -> Flight:
        """The oldest one has ended."""
        return self._out(self._flights.popleft())

    def withdraw(self) -> Flight:
        """The youngest one could not begin; nothing more will be done to its requests."""
        flight = self._out(self._flights.pop())
        for _ in self.doomed(flight):
            pass
        return flight

    def doom(self, key: str, error: ServingError | None) -> None:
        """A request in flight is to end after its step: with an error, or cancelled (None)."""
        self._doomed.setdefault(key, error)

    def doomed(self, flight: Flight) -> Iterator[tuple[str, ServingError | None]]:
        """What is to be done to the requests of a flight that has landed; each is named once."""
        for item in flight.items:
            if item.request.id in self._doomed:
                yield item.request.id, self._doomed.pop(item.request.id)

    def _out(self, flight: Flight) -> Flight:
        if not flight.booked:
            self._keys.difference_update(item.request.id for item in flight.items)
        return flight
