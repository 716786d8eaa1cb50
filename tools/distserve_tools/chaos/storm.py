"""Cancel storms: clients go away at random moments, by cancel key, gRPC cancel, HTTP disconnect or death.

Triton 24.10 may crash when gRPC streams are cancelled (its issues 7368 and 8034). The server is started again
then; requests that were under way, or came meanwhile, count as refused, and the outcome says how often.
"""

from __future__ import annotations

import http.client
import itertools
import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from distserve_tools.chaos.deployment import Deployment, Pauses
from distserve_tools.chaos.invariants import recover, resident_mb, settle, slope
from distserve_tools.chaos.load import Job, jobs, references
from distserve_tools.chaos.model import random_prompt
from distserve_tools.chaos.outcome import Outcome
from distserve_tools.client import RequestError

CLIENTS = 32
LONGEST_S = 0.6  # a cancelled request lives between no time and this long
WHOLE_SHARE = 0.1  # of requests that nobody cancels: their text must be right
HTTP_SHARE = 0.2
KEY_SHARE = 0.3
VICTIM_STREAMS = 25
_SLOPE_FROM = 2000  # requests: below, a slope is mostly warm-up
MAX_SLOPE_MB = 1.0  # per 1,000 requests


@dataclass
class _Storm:
    deployment: Deployment
    expected: Mapping[Job, tuple[int, ...]]
    seed: int
    todo: int
    counts: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    begun: int = 0

    def next(self) -> int | None:
        with self.lock:
            if self.begun >= self.todo:
                return None
            self.begun += 1
            return self.begun

    def count(self, fate: str, note: str = "") -> None:
        with self.lock:
            self.counts[fate] += 1
            if note and note not in self.notes:
                self.notes.append(note)


def cancel_storm(name: str, deployment: Deployment, seed: int, requests: int) -> Outcome:
    """Requests with and without logprobs and stop strings, most of them cancelled in whichever stage they
    are, while prefill instances, and with them the transfers, are slowed down.
    """
    references_of = jobs(8, seed, max_tokens=40)
    expected = references(deployment, references_of)
    storm = _Storm(deployment, expected, seed, requests)
    points: list[tuple[float, dict[str, float]]] = []
    began_s, restarts = time.monotonic(), deployment.server.restarts
    prefills = [deployment.engine(entry) for entry in deployment.boot_blocks if entry.startswith("prefill")]
    with Pauses(prefills, seed):
        threads = [threading.Thread(target=_client, args=(storm, i), daemon=True) for i in range(CLIENTS)]
        victims = threading.Thread(target=_kill_victims, args=(storm,), daemon=True)
        for thread in (*threads, victims):
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.5)
            points.append((storm.begun, resident_mb(deployment)))
        victims.join(60.0)
    aftermath = settle(
        deployment, recover(deployment, references_of[0], expected[references_of[0]], time.monotonic())
    )
    restarts = deployment.server.restarts - restarts
    details = {"seconds": round(time.monotonic() - began_s, 1), **_growth(points)}
    details["server_restarts"] = float(restarts)
    notes = [*storm.notes]
    if storm.counts["refused"] and not restarts:
        notes.append(f"{storm.counts['refused']} refused by a server that lives")
    if requests > _SLOPE_FROM and details["worst_slope_mb"] > MAX_SLOPE_MB:
        notes.append(f"memory grows by {details['worst_slope_mb']} MB per 1,000 requests")
    return Outcome(name, seed, storm.counts, aftermath, notes, details)


def _growth(points: list[tuple[float, dict[str, float]]]) -> dict[str, float]:
    """Megabytes per 1,000 requests of the process that grows most, after the first third."""
    later = points[len(points) // 3 :]
    names = set(later[-1][1]) if later else set()
    slopes = {n: 1000 * slope([(x, mb[n]) for x, mb in later if n in mb]) for n in names}
    return {"worst_slope_mb": round(max(slopes.values(), default=0.0), 2)}


def _client(storm: _Storm, number: int) -> None:
    rng = random.Random(storm.seed * 1000 + number)
    known = list(storm.expected)
    while storm.next() is not None:
        draw = rng.random()
        try:
            if draw < WHOLE_SHARE:
                _whole(storm, rng.choice(known))
            elif draw < WHOLE_SHARE + HTTP_SHARE:
                _disconnect(storm, rng)
            elif draw < WHOLE_SHARE + HTTP_SHARE + KEY_SHARE:
                _close(storm, rng)
            else:
                _cancel(storm, rng)
        except RequestError as error:
            fate = {"CANCELLED": "cancelled", "UNAVAILABLE": "refused"}.get(error.code, "lost")
            storm.count(fate, str(error) if fate == "lost" else "")
        except (OSError, http.client.HTTPException):
            storm.count("refused")
        except Exception as error:
            storm.count("lost", repr(error))


def _whole(storm: _Storm, job: Job) -> None:
    answer = storm.deployment.client.complete(job.prompt, 60.0, **job.sampling)
    right = answer.token_ids == storm.expected[job]
    fate = "continued" if answer.stage_times.get("recoveries") else "finished"
    storm.count(fate if right else "lost", "" if right else "wrong text")


def _sampling(rng: random.Random) -> dict[str, Any]:
    chosen: dict[str, Any] = {"max_tokens": rng.randrange(1, 300), "ignore_eos": rng.random() < 0.8}
    if rng.random() < 0.5:
        chosen |= {"logprobs": rng.randrange(0, 4), "return_logprobs": True}
    if rng.random() < 0.5:
        chosen |= {"stop": ["\u00e9\u00e8", "never to be seen", "a"][: rng.randrange(1, 4)]}
    if rng.random() < 0.5:
        chosen |= {"temperature": 0.0}
    return chosen


def _cancel(storm: _Storm, rng: random.Random) -> None:
    """gRPC cancel, from before the first byte to after the last token."""
    timers: list[threading.Timer] = []
    delay_s = rng.uniform(0.0, LONGEST_S) * rng.random()

    def started(call: Any) -> None:
        timers.append(threading.Timer(delay_s, call.cancel))
        timers[0].start()

    try:
        prompt = random_prompt(rng.randrange(1, 200), rng)
        for _ in storm.deployment.client.stream(prompt, 60.0, on_call=started, **_sampling(rng)):
            pass
    finally:
        timers[0].cancel()
    storm.count("finished")


def _close(storm: _Storm, rng: random.Random) -> None:
    """A stream that its reader leaves after some messages: the client cancels it by its key."""
    stream = storm.deployment.client.stream(random_prompt(rng.randrange(1, 200), rng), 60.0, **_sampling(rng))
    wanted = rng.randrange(1, 40)
    messages = sum(1 for _ in itertools.islice(stream, wanted))
    stream.close()  # type: ignore[attr-defined]
    storm.count("finished" if messages < wanted else "cancelled")


def _disconnect(storm: _Storm, rng: random.Random) -> None:
    """An HTTP client that closes its connection, with or without having read something."""
    connection = http.client.HTTPConnection(storm.deployment.server.http_url, timeout=30.0)
    # lists travel as JSON in a string: Triton refuses them as parameters
    body = {
        "text_input": "a" * rng.randrange(1, 200),
        "stream": True,
        "sampling_parameters": json.dumps(_sampling(rng)),
    }
    try:
        connection.request("POST", "/v2/models/orchestrator/generate_stream", json.dumps(body))
        if rng.random() < 0.7:
            response = connection.getresponse()
            response.read1(rng.randrange(1, 2000))
        time.sleep(rng.uniform(0.0, LONGEST_S) * rng.random())
    finally:
        connection.close()
    storm.count("cancelled")


def _kill_victims(storm: _Storm) -> None:
    """Client processes that die with all their streams, one after the other, while the storm lasts."""
    rng = random.Random(storm.seed)
    while storm.begun < storm.todo:
        command = [sys.executable, "-m", "distserve_tools.chaos.victim", storm.deployment.server.grpc_url]
        command += [str(VICTIM_STREAMS), str(rng.getrandbits(20))]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            try:
                assert process.stdout is not None
                process.stdout.readline()
                time.sleep(rng.uniform(0.0, 2 * LONGEST_S))
            finally:
                process.kill()
        for _ in range(VICTIM_STREAMS):
            storm.count("cancelled")
