"""An instance's transfers over all its ranks: what the engine asks for happens on every rank, or on none.

The leader's own rank is served by the objects that an instance of one rank has (`KVSource` with its
`LeaseTable`, `KVPuller`); the others by a `RankAgent` each, over a channel that the executor provides.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from distserve.core.parsing import ConfigError
from distserve.worker.parallel import RankLost

OPEN_S = 60.0

Message = dict[str, Any]


class Ranks(Protocol):
    """The way to the agents of ranks 1 to `count` - 1.

    A message that cannot be sent means that its rank is lost, which the executor tells the engine loop, and
    every listener by a message `lost`.
    """

    count: int

    def send_side(self, rank: int, message: Message) -> None: ...

    def listen_side(self, on_message: Callable[[int, Message], None]) -> None: ...


def open_agents(ranks: Ranks, message: Message) -> list[str]:
    """Opens the other ranks' ends and returns their addresses. Raises `ConfigError` with a rank's reason.

    It listens to the ranks itself meanwhile; who comes next must do so afterwards.
    """
    answers: dict[int, Message] = {}
    changed = threading.Condition()

    def take(rank: int, answer: Message) -> None:
        with changed:
            answers[rank] = answer
            changed.notify()

    ranks.listen_side(take)
    others = range(1, ranks.count)
    for rank in others:
        ranks.send_side(rank, message)
    with changed:
        if not changed.wait_for(lambda: 0 in answers or len(answers) == len(others), OPEN_S):
            raise RankLost(f"ranks {sorted(set(others) - set(answers))} have not opened their transfer end")
    if 0 in answers:
        raise RankLost(answers[0]["why"])
    for rank in others:
        if "error" in answers[rank]:
            raise ConfigError(f"rank {rank}: {answers[rank]['error']}")
    return [answers[rank]["address"] for rank in others]
