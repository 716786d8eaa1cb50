"""In which order waiting prompts are computed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, MutableSequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from distserve.core.parsing import ConfigError

Order = Literal["fcfs", "shortest", "deadline"]
Key = tuple[int, float]
T = TypeVar("T")


@dataclass(frozen=True)
class Ordering:
    """``fcfs``: by arrival (the paper's). ``deadline``: by when the first token is due (EDF).

    ``shortest``: by length, and a second of waiting counts as `ageing_tokens_per_s` tokens less, so that no
    prompt waits for ever. As all that wait age alike, what decides between two of them does not change
    with time: length + ageing x arrival. Within each order, a lower priority value goes first.
    """

    order: Order = "fcfs"
    ageing_tokens_per_s: float = 1000.0

    def __post_init__(self) -> None:
        if not self.ageing_tokens_per_s > 0:
            raise ConfigError(f"ageing_tokens_per_s={self.ageing_tokens_per_s}: must be above 0")

    def key(self, priority: int, tokens: int, arrival_s: float, due_s: float) -> Key:
        """What to sort by; equal keys keep the order in which they came. Times are of one clock."""
        if self.order == "shortest":
            return priority, tokens + self.ageing_tokens_per_s * arrival_s
        return priority, due_s if self.order == "deadline" else arrival_s


def insert(queue: MutableSequence[T], item: T, key: Callable[[T], Key]) -> None:
    """Puts an item into its place in a sorted queue, behind its equals."""
    own = key(item)
    if not queue or own >= key(queue[-1]):
        queue.append(item)
    else:
        queue.insert(bisect_right(queue, own, key=key), item)
