"""Event logs of the callers: sequence, acknowledgement, epochs, silence."""

from __future__ import annotations

import pytest

from distserve.engine.owners import ENDED_IDS, EVENTS_PER_REPLY, FORGET_AFTER, HeldPoll, OwnerLog, Owners
from distserve.engine.requests import Event, Owner
from distserve.serving.schema import ServingError

A = Owner("a", 1)


def token(owner: Owner, id: str, value: int, last: bool = False) -> Event:
    return Event(owner, id, {"type": "token", "tokens": [value]}, last)


def entered(owners: Owners, owner: Owner = A, now: float = 10.0, ids: tuple[str, ...] = ("r",)) -> OwnerLog:
    log, _ = owners.enter(owner, now)
    log.live.update(ids)
    return log


def test_unacknowledged_events_stay_in_order() -> None:
    owners = Owners(30.0)
    log = entered(owners)
    first = log.seq
    owners.deliver([token(A, "r", i) for i in range(5)])
    assert [event["tokens"][0] for event in log.unseen()] == [0, 1, 2, 3, 4]
    assert [event["seq"] for event in log.unseen()] == list(range(first + 1, first + 6))
    log.acknowledge(first + 2)
    assert [event["tokens"][0] for event in log.unseen()] == [2, 3, 4]
    log.acknowledge(first)  # a late, older acknowledgement
    assert len(log.events) == 3


def test_a_reply_takes_a_bounded_number_of_events() -> None:
    owners = Owners(30.0)
    log = entered(owners)
    owners.deliver([token(A, "r", i) for i in range(EVENTS_PER_REPLY + 7)])
    part = log.unseen()
    assert len(part) == EVENTS_PER_REPLY
    log.acknowledge(part[-1]["seq"])
    assert [event["tokens"][0] for event in log.unseen()] == list(
        range(EVENTS_PER_REPLY, EVENTS_PER_REPLY + 7)
    )


def test_nothing_comes_after_the_last_event() -> None:
    owners = Owners(30.0)
    log = entered(owners)
    owners.deliver([token(A, "r", 1, last=True), token(A, "r", 2)])
    assert [event["tokens"] for event in log.events] == [[1]]
    assert log.live == set()
    assert list(log.ended) == ["r"]


def test_ended_ids_are_remembered_in_bounded_number() -> None:
    owners = Owners(30.0)
    ids = tuple(str(i) for i in range(ENDED_IDS + 3))
    log = entered(owners, ids=ids)
    owners.deliver([token(A, id, 0, last=True) for id in ids])
    assert list(log.ended) == list(ids[3:])


def test_a_newer_epoch_replaces_the_older_one_for_good() -> None:
    owners = Owners(30.0)
    entered(owners)
    newer = Owner("a", 7)
    log, replaced = owners.enter(newer, 11.0)
    assert replaced == A
    assert not log.events
    owners.deliver([token(A, "r", 1)])
    assert not log.events
    with pytest.raises(ServingError, match=r"epoch=1: owner 'a' has a newer one, 7") as refused:
        owners.enter(A, 12.0)
    assert refused.value.code == "FAILED_PRECONDITION"
    assert owners.enter(newer, 12.0) == (log, None)


def test_polls_are_due_with_events_or_at_their_time_or_for_credits() -> None:
    owners = Owners(30.0)
    log = entered(owners)
    log.told_credits = 400

    def hold() -> None:
        log.held = HeldPoll(1, 11.0)

    hold()
    assert owners.due(10.5, 400, 512) == []
    assert owners.due(10.5, 431, 512) == []
    assert owners.due(10.5, 999, 400) == []  # it knows of a whole batch
    assert [poll.call_id for _, poll in owners.due(10.5, 432, 512)] == [1]
    assert log.held is None
    hold()
    assert len(owners.due(11.0, 400, 512)) == 1
    hold()
    owners.deliver([token(A, "r", 1)])
    assert len(owners.due(10.5, 400, 512)) == 1


def test_a_silent_owner_is_given_up_once_and_learns_of_it_when_it_comes_back() -> None:
    owners = Owners(30.0)
    log = entered(owners, ids=("r", "s"))
    owners.deliver([token(A, "r", 1)])
    assert owners.expire(39.0) == []
    assert owners.next_deadline(39.0) == pytest.approx(40.0)
    assert owners.expire(41.0) == [A]
    assert owners.expire(42.0) == []
    assert owners.next_deadline(42.0) > 71.0
    assert [(event["id"], event["error"]["code"]) for event in log.events] == [
        ("r", "UNAVAILABLE"),
        ("s", "UNAVAILABLE"),
    ]
    assert log.live == set()


def test_a_silent_owner_is_forgotten_and_never_sees_a_number_twice() -> None:
    owners = Owners(30.0)
    log = entered(owners)
    owners.deliver([token(A, "r", i) for i in range(1000)])
    last = log.seq
    owners.expire(41.0)
    owners.expire(11.0 + 30.0 * FORGET_AFTER)
    assert len(owners) == 0
    again = entered(owners, now=400.0)
    assert again.seq > last


def test_a_held_poll_is_a_sign_of_life() -> None:
    owners = Owners(30.0)
    log = entered(owners)
    log.held = HeldPoll(1, 1000.0)
    assert owners.expire(900.0) == []
