"""Two vLLM servers, one core each, as its users run it: the OpenAI server with default scheduling."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from distserve.core.model_config import cache_folder
from distserve.core.parsing import ConfigError
from distserve_tools import die_with_parent
from distserve_tools.engine_peers.environments import peer_python
from distserve_tools.launch import http_ok
from distserve_tools.load.openai_target import OpenAITarget
from distserve_tools.processes import descendants, free_ports, session_members, wait_gone
from distserve_tools.testbed.systems import EngineLimits, Served, cores

VLLM = "vllm"
NAME = "model"
_START_S = 900.0  # torch.compile, on one core each
_STOP_S = 20.0
LOG_LINES = 15


@contextlib.contextmanager
def vllm_serving(
    model: Path, limits: EngineLimits, folder: Path, say: Callable[[str], None]
) -> Iterator[Served]:
    """Both servers, behind least-outstanding dispatch. Same weights, fp32, KV pool of the same size.

    Raises `ConfigError` if the environment can't be made or a server does not start.
    """
    python = peer_python(VLLM, {}, cache_folder() / "peers", say)
    with contextlib.ExitStack() as stack:
        ports = free_ports(2)
        logs = [folder / f"vllm-{core}.log" for core in cores()]
        servers = [
            stack.enter_context(_server(python, model, limits, core, port, log))
            for core, port, log in zip(cores(), ports, logs, strict=True)
        ]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        deadline = time.monotonic() + _START_S
        for server, port, log in zip(servers, ports, logs, strict=True):
            _wait(server, port, deadline, log)
        yield Served(
            VLLM,
            tuple(server.pid for server in servers),
            lambda start_s, timeout_s: OpenAITarget(urls, NAME, start_s, timeout_s, token_ids=True),
            0,
            dict,
        )


@contextlib.contextmanager
def _server(
    python: str, model: Path, limits: EngineLimits, core: int, port: int, log_path: Path
) -> Iterator[subprocess.Popen[bytes]]:
    command = [python, die_with_parent.__file__, str(os.getpid()), python, "-m"]
    command += ["vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", NAME]
    command += ["--dtype", "float32", "--port", str(port), "--host", "127.0.0.1"]
    command += ["--max-num-seqs", str(limits.max_batch_size), "--max-model-len", "2048"]
    if not (model / "tokenizer.json").exists():
        command += ["--skip-tokenizer-init"]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, whole ones only
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        left = descendants(process.pid) | session_members(process.pid)
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_STOP_S)
        for straggler in wait_gone(left, 5.0):
            straggler.kill()


def _wait(server: subprocess.Popen[bytes], port: int, deadline: float, log: Path) -> None:
    while not http_ok(f"127.0.0.1:{port}", "/health"):
        problem = ""
        if server.poll() is not None:
            problem = f"a server ended with code {server.returncode}"
        elif time.monotonic() > deadline:
            problem = f"no server after {_START_S:.0f} s"
        if problem:  # the log's folder goes with the run
            last = log.read_text(errors="replace").strip().splitlines()[-LOG_LINES:]
            raise ConfigError("\n  ".join([f"vllm: {problem}; the end of its log:", *last]))
        time.sleep(0.5)
