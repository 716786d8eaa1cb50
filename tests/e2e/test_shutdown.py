"""A server that ends leaves no process, no shared memory, and no stream without its end."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from serving import deployed, greedy_mismatches, write_repository

from distserve_tools.client import Client
from distserve_tools.processes import ProcessId, descendants, session_members, wait_gone
from distserve_tools.shared_regions import sweep
from distserve_tools.status import only_local_server
from model_zoo import Zoo, prompt

GREEDY = {"temperature": 0.0, "ignore_eos": True}


def shared_memory(launcher: int) -> set[str]:
    """Regions of the servers that a process launched."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(f"distserve_{launcher}_")}


def test_streams_in_flight_end_and_nothing_stays(zoo: Zoo, tmp_path: Path) -> None:
    before = shared_memory(os.getpid())
    with deployed(tmp_path, zoo("llama")) as running, ThreadPoolExecutor(8) as pool:
        ids = [prompt(20, seed=i) for i in range(8)]
        answers = [pool.submit(running.client.complete, one, max_tokens=150, **GREEDY) for one in ids]
        deadline = time.monotonic() + 20
        while running.status()["requests"] < 8 and time.monotonic() < deadline:
            time.sleep(0.01)
        processes = session_members(running.server.pid)
        assert len(processes) >= 6  # the server, three stubs, two engines
        assert shared_memory(os.getpid()) - before
        assert running.server.stop() == 0
        for one, answer in zip(ids, answers, strict=True):
            tokens = answer.result(timeout=10).token_ids
            assert len(tokens) == 150
            assert greedy_mismatches(running.model, one, tokens) == []
    assert wait_gone(processes, 0.0) == set()
    assert shared_memory(os.getpid()) <= before


def serve_command(repository: Path, log: Path) -> list[str]:
    command = [sys.executable, "-m", "distserve_tools", "serve", "--model-repository", str(repository)]
    return [*command, "--no-openai", "--log", str(log)]


def wait_for_text(process: subprocess.Popen[str], wanted: str) -> str:
    """What the process has printed once `wanted` is in it; the test's own timeout is the deadline."""
    text = ""
    assert process.stdout is not None
    while wanted not in text:
        line = process.stdout.readline()
        assert line, f"ended: {text}"
        text += line
    return text


def test_serve_prints_lines_that_work_and_ends_on_sigterm(zoo: Zoo, tmp_path: Path) -> None:
    repository = write_repository(tmp_path / "repository", zoo("llama"))
    with subprocess.Popen(
        serve_command(repository, tmp_path / "log"), stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            text = wait_for_text(process, "Ctrl-C stops it.")
            grpc = re.search(r"grpc (\S+)", text)
            assert grpc is not None
            (server,) = [p for p in descendants(process.pid) if _name(p) == "tritonserver"]
            members = session_members(server.pid)
            with Client(grpc[1]) as client:
                expected = client.complete("The capital of France is", max_tokens=16, temperature=0).text
            assert _shell(text, r"^\S+ -c '\n.*?\nprint\(\)'$").rstrip("\n") == expected.rstrip("\n")
            if shutil.which("curl"):
                assert _shell(text, r"^curl .*generate_stream.*$").count("data: {") > 1
            status = _shell(text, r"^\S+ status --grpc \S+$")
            assert "prefill_0" in status
            assert "decode_0" in status
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
    assert wait_gone(members, 5.0) == set()
    assert shared_memory(process.pid) == set()


def test_a_killed_launcher_takes_its_server_along(zoo: Zoo, tmp_path: Path) -> None:
    repository = write_repository(tmp_path / "repository", zoo("llama"))
    with subprocess.Popen(
        serve_command(repository, tmp_path / "log"), stdout=subprocess.PIPE, text=True
    ) as process:
        wait_for_text(process, "Ctrl-C stops it.")
        (server,) = [p for p in descendants(process.pid) if _name(p) == "tritonserver"]
        members = session_members(server.pid)
        process.kill()
    assert wait_gone(members, 30.0) == set()
    assert all(name.endswith("_claim") for name in shared_memory(process.pid))  # empty
    sweep()  # as the next start does
    assert shared_memory(process.pid) == set()


def test_status_wants_an_address_when_it_cannot_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distserve_tools.status._local_servers", lambda: {"127.0.0.1:1", "127.0.0.1:2"})
    with pytest.raises(ValueError, match=r"choose with --grpc: 127.0.0.1:1, 127.0.0.1:2"):
        only_local_server()


def _shell(text: str, pattern: str) -> str:
    """Runs the first line (or lines) of `text` that match, as a shell would when they are pasted."""
    found = re.search(pattern, text, re.MULTILINE | re.DOTALL if "\\n" in pattern else re.MULTILINE)
    assert found is not None, text
    done = subprocess.run(["bash", "-c", found[0]], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _name(process: ProcessId) -> str:
    return Path(f"/proc/{process.pid}/comm").read_text().strip()
