"""Requests under way while something breaks, and what became of each."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from distserve_tools.chaos.deployment import Deployment
from distserve_tools.chaos.model import random_prompt
from distserve_tools.client import RequestError

Fate = Literal["finished", "continued", "refused", "cancelled", "lost"]
JOIN_S = 90.0
_FIRST_TOKENS_S = 30.0


@dataclass(frozen=True)
class Job:
    """One request: greedy where `seed` is None, else sampled."""

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int | None = None

    @property
    def sampling(self) -> dict[str, Any]:
        chosen: dict[str, Any] = {"max_tokens": self.max_tokens, "ignore_eos": True}
        if self.seed is None:
            return {**chosen, "temperature": 0.0}
        return {**chosen, "temperature": 0.9, "top_p": 0.95, "seed": self.seed, "presence_penalty": 0.3}


@dataclass(frozen=True)
class Result:
    """What a client got. `error_after_s`: from the fault (or the request's start, if later) to its error."""

    fate: Fate
    note: str = ""
    error_after_s: float = 0.0


@dataclass(frozen=True)
class Expectation:
    """Which errors may end a request that could not be saved, and how soon they must come."""

    codes: tuple[str, ...] = ("UNAVAILABLE",)
    within_s: float = 10.0
    client_timeout_s: float = 60.0


def jobs(count: int, seed: int, max_tokens: int = 160) -> list[Job]:
    """Half greedy, half sampled with a seed; prompts from one token to ten blocks."""
    rng = random.Random(seed)
    out = []
    for i in range(count):
        prompt = tuple(random_prompt(rng.choice((1, 15, 16, 17, 33, 64, rng.randrange(1, 160))), rng))
        out.append(Job(prompt, max_tokens, None if i % 2 == 0 else rng.getrandbits(40)))
    return out


def references(deployment: Deployment, todo: Sequence[Job]) -> dict[Job, tuple[int, ...]]:
    """Each job's tokens, computed undisturbed; the greedy ones are checked with transformers.

    Raises `AssertionError` for one that differs.
    """
    out: dict[Job, tuple[int, ...]] = {}
    lock = threading.Lock()
    waiting = list(dict.fromkeys(todo))

    def work() -> None:
        while True:
            with lock:
                if not waiting:
                    return
                job = waiting.pop()
            tokens = deployment.client.complete(job.prompt, 60.0, **job.sampling).token_ids
            with lock:
                out[job] = tokens

    threads = [threading.Thread(target=work, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
    missing = len(set(todo)) - len(out)
    if missing:
        raise AssertionError(f"{missing} reference requests failed on an undisturbed server")
    for job, tokens in out.items():
        if job.seed is None:
            wrong = deployment.model.greedy_mismatch(job.prompt, tokens)
            if wrong is not None:
                raise AssertionError(
                    f"prompt of {len(job.prompt)} tokens: token {wrong} is not the greedy one"
                )
    return out


@dataclass
class Streams:
    """Clients that send their jobs one after the other; `counts` and `notes` once they have ended."""

    fault_s: float = 0.0  # time.monotonic() of the fault
    results: list[Result] = field(default_factory=list)

    @property
    def counts(self) -> Counter[str]:
        return Counter(result.fate for result in self.results)

    def why(self, fate: Fate) -> list[str]:
        """What their clients were told, or saw, each once."""
        return list(dict.fromkeys(result.note for result in self.results if result.fate == fate))


@contextmanager
def streaming(
    deployment: Deployment,
    todo: Sequence[Job],
    expected: Mapping[Job, tuple[int, ...]],
    clients: int = 20,
    expectation: Expectation | None = None,
) -> Iterator[Streams]:
    """Streams under way when the block begins: half of the first requests have their first token.

    The block does the damage; its end waits for all of them.
    """
    streams = Streams()
    allowed = expectation or Expectation()
    begun = threading.Semaphore(0)

    def client(number: int) -> None:
        for job in todo[number::clients]:
            streams.results.append(_follow(deployment, job, expected[job], streams, allowed, begun.release))

    threads = [threading.Thread(target=client, args=(i,), daemon=True) for i in range(clients)]
    for thread in threads:
        thread.start()
    try:
        end = time.monotonic() + _FIRST_TOKENS_S
        for _ in range(clients // 2):  # those that never come are going to be counted as lost
            begun.acquire(timeout=max(0.0, end - time.monotonic()))
        yield streams
    finally:
        end = time.monotonic() + JOIN_S
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        hanging = len(todo) - len(streams.results)
        streams.results += [Result("lost", "no end")] * hanging


def _follow(
    deployment: Deployment,
    job: Job,
    expected: Sequence[int],
    streams: Streams,
    allowed: Expectation,
    first_token: Callable[[], None],
) -> Result:
    began_s = time.monotonic()
    got: list[int] = []
    reason, recoveries = None, 0
    try:
        for chunk in deployment.client.stream(job.prompt, allowed.client_timeout_s, **job.sampling):
            if not got:
                first_token()
            got += chunk.token_ids
            if reason is not None:
                return Result("lost", "a message after the last one")
            if chunk.finish_reason is not None:
                reason, recoveries = chunk.finish_reason, int(chunk.stage_times.get("recoveries", 0))
    except RequestError as error:
        return _failed(error, got, expected, max(streams.fault_s, began_s), allowed)
    except Exception as error:
        return Result("lost", repr(error))
    if reason is None:
        return Result("lost", f"the stream ended without an end after {len(got)} tokens")
    if got != list(expected):
        return Result("lost", f"wrong text: {difference(got, expected)}; recoveries={recoveries}")
    return Result("continued" if recoveries else "finished")


def _failed(
    error: RequestError, got: Sequence[int], expected: Sequence[int], since_s: float, allowed: Expectation
) -> Result:
    after_s = time.monotonic() - since_s
    if list(got) != list(expected[: len(got)]):
        return Result("lost", f"wrong text before an error: {difference(got, expected)}")
    if error.code not in allowed.codes:
        return Result("lost", f"{error} after {len(got)} tokens")
    if after_s > allowed.within_s:
        return Result("lost", f"{error} only after {after_s:.1f} s")
    return Result("refused", str(error), after_s)


def difference(got: Sequence[int], expected: Sequence[int]) -> str:
    """Where two outputs part."""
    at = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), None)
    if at is None:
        return f"{len(got)} tokens, {len(expected)} expected"
    return f"token {at} of {len(expected)} is {got[at]}, {expected[at]} expected"
