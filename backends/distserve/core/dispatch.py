"""Which instance a request goes to, by least work.

Pure, without a clock: the orchestrator and the planner's simulator choose by the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableSequence
from enum import Enum
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class PromptLoad(NamedTuple):
    """What counts of an instance that computes prompts, in tokens except where it says otherwise."""

    waiting_tokens: int  # of work that a new prompt finds there
    requests: int  # that it has, whatever their phase
    credits: int  # what it can take and start within its next two batches
    max_batch_tokens: int  # Lm
    idle: bool  # it computes no prompt
    longs: int = 0  # requests that it computes in pieces
    pieces_above: int | None = None  # longer prompts are computed in pieces; None: none are

    def in_pieces(self, tokens: int) -> bool:
        """Others overtake a prompt of this length."""
        return self.pieces_above is not None and tokens > self.pieces_above

    def has_room(self, tokens: int) -> bool:
        """Whether a prompt can go there now.

        One above the credits goes where nothing waits, and is next to be computed. One that is computed in
        pieces goes where there is no other such prompt.
        """
        if self.in_pieces(tokens):
            return self.longs == 0 and self.credits > 0
        if tokens <= self.credits:
            return True
        return self.credits >= 2 * self.max_batch_tokens or (self.credits > 0 and self.idle)


class DecodeLoad(NamedTuple):
    """What counts of a decode instance."""

    requests: int  # that it has, admitted or not
    max_batch_size: int


def choose_prefill(tokens: int, loads: Iterable[PromptLoad]) -> int | None:
    """Index of the instance for a prompt of `tokens` tokens: the least work of those with room.

    Of equals the one with fewer requests: unified instances with an empty prefill queue would leave all the
    decoding to the first one. None: it waits.
    """
    best, best_load = None, None
    for index, load in enumerate(loads):
        if best_load is not None and load[:2] >= best_load[:2]:
            continue
        if load.has_room(tokens):
            best, best_load = index, load
    return best


def choose_decode(loads: Iterable[DecodeLoad]) -> int | None:
    """Index of the instance with the fewest requests for its size; None without any."""
    best, least = None, 0.0
    for index, load in enumerate(loads):
        share = load.requests / load.max_batch_size
        if best is None or share < least:
            best, least = index, share
    return best


class Binding(Enum):
    """What became of a request that waits for an instance."""

    BOUND = "it has one"
    BLOCKS = "it waits, and so do all behind it"
    PASSED = "it waits for nothing that those behind it need"
    LONG = "it is computed in pieces and waits for another such prompt: shorter ones pass"


def bind_in_order(queue: MutableSequence[T], bind: Callable[[T, bool], Binding]) -> None:
    """Takes out of the queue all that can be bound now; nothing overtakes its head but what `Binding` says.

    bind: binds a request if it can. Its second argument says that a prompt before it waits which is computed
    in pieces, as no other such prompt may overtake it.
    """
    place, stuck = 0, False
    while place < len(queue):
        what = bind(queue[place], stuck)
        if what is Binding.BOUND:
            del queue[place]
            continue
        if what is Binding.BLOCKS:
            return
        stuck = stuck or what is Binding.LONG
        place += 1
