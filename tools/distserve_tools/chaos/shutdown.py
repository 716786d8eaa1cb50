"""SIGTERM of a whole deployment with streams in flight."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from distserve_tools.chaos.deployment import TWO_OF_EACH, write_repository
from distserve_tools.chaos.invariants import Aftermath
from distserve_tools.chaos.load import Job, Result, jobs
from distserve_tools.chaos.model import TinyModel, tiny_model
from distserve_tools.chaos.outcome import Outcome
from distserve_tools.client import Client, Completion, RequestError
from distserve_tools.processes import descendants, session_members, wait_gone

STREAMS = 20
_END_S = 40.0


def terminate(name: str, folder: Path, seed: int) -> Outcome:
    """`distserve serve` gets SIGTERM: streams end within the drain limit, exit code 0, and neither process
    nor shared memory stays.
    """
    model = tiny_model(folder / "model")
    repository = write_repository(folder / "repository", model, TWO_OF_EACH)
    command = [sys.executable, "-m", "distserve_tools", "serve", "--model-repository", str(repository)]
    command += ["--no-openai", "--log", str(folder / "tritonserver.log"), "--drain-timeout", "15"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            with Client(_grpc_url(process)) as client:
                return _terminate(name, process, client, model, seed)
        finally:
            process.kill()


def _terminate(
    name: str, process: subprocess.Popen[str], client: Client, model: TinyModel, seed: int
) -> Outcome:
    todo = [Job(job.prompt, 200) for job in jobs(STREAMS, seed)]
    left: list[str] = []
    with ThreadPoolExecutor(STREAMS) as pool:
        calls = [pool.submit(_answer, client, job) for job in todo]
        end = time.monotonic() + 20.0
        while client.control("status")["requests"] < STREAMS // 2 and time.monotonic() < end:
            time.sleep(0.01)
        members = {m for child in descendants(process.pid) for m in session_members(child.pid)}
        began_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(_END_S)
            if code:
                left.append(f"exit code {code}")
        except subprocess.TimeoutExpired:
            left.append(f"still running {_END_S:g} s after SIGTERM")
        seconds = time.monotonic() - began_s
        answers = [call.result(_END_S) for call in calls]
    results = [_judge(answer, model, job) for answer, job in zip(answers, todo, strict=True)]
    left += [f"{len(gone)} processes stayed" for gone in [wait_gone(members, 2.0)] if gone]
    files = [f for f in os.listdir("/dev/shm") if f.startswith(f"distserve_{process.pid}_")]
    left += [f"{len(files)} files in /dev/shm"] if files else []
    counts = Counter[str](result.fate for result in results)
    notes = list(dict.fromkeys(result.note for result in results if result.fate == "lost"))
    return Outcome(name, seed, counts, Aftermath(seconds, 0, tuple(left)), notes)


def _answer(client: Client, job: Job) -> Completion | RequestError:
    try:
        return client.complete(job.prompt, 60.0, **job.sampling)
    except RequestError as error:
        return error


def _judge(answer: Completion | RequestError, model: TinyModel, job: Job) -> Result:
    if isinstance(answer, RequestError):
        return Result("refused" if answer.code == "UNAVAILABLE" else "lost", str(answer))
    if len(answer.token_ids) != job.max_tokens:
        return Result("lost", f"{len(answer.token_ids)} tokens")
    wrong = model.greedy_mismatch(job.prompt, answer.token_ids)
    return Result("finished") if wrong is None else Result("lost", f"wrong text: token {wrong}")


def _grpc_url(process: subprocess.Popen[str]) -> str:
    """Waits until `distserve serve` has printed how it is reached; its own start limit bounds the wait."""
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        if "Ctrl-C stops it." in line:
            found = re.search(r"grpc (\S+)", text)
            if found is not None:
                return found[1]
    raise RuntimeError(f"distserve serve ended: {text}")
