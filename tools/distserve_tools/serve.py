"""Serves a model repository (default: the demo model, 1 prefill + 1 decode) until it is stopped."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from distserve.core.parsing import ConfigError
from distserve_planner.placement_file import read_placement
from distserve_tools.console import StepLines
from distserve_tools.demo_model import DemoModelError, ensure_demo_model
from distserve_tools.demo_placement import demo_placement
from distserve_tools.launch import ServerOptions, ServerStartError
from distserve_tools.log_echo import LogEcho
from distserve_tools.readiness import NotServingError
from distserve_tools.repository import NodeRepository, node_repository, repository_for
from distserve_tools.server_files import ServerNotFoundError
from distserve_tools.stack import Stack, running

START_ERRORS = (ServerNotFoundError, ServerStartError, NotServingError, DemoModelError)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `distserve serve`."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model-repository", type=Path, help="folder that `planner generate` wrote")
    source.add_argument("--placement", type=Path, help="placement file; its repository is kept in the cache")
    parser.add_argument("--node", help="which node of a repository for several")
    parser.add_argument("--no-openai", action="store_true", help="do not start the OpenAI front end")
    parser.add_argument("--openai-port", type=int, default=0, metavar="PORT", help="0: any free one")
    parser.add_argument("--echo-log", action="store_true", help="copy the server's log to stderr")
    add_server_arguments(parser)


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of every command that starts a server."""
    for name in ("http", "grpc", "metrics"):
        parser.add_argument(f"--{name}-port", type=int, default=0, metavar="PORT", help="0: any free one")
    parser.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--tritonserver", metavar="PROGRAM", help="default: on PATH, or the wheel's")
    parser.add_argument("--log", type=Path, metavar="FILE", help="the server's log (default: temporary)")
    parser.add_argument("--start-timeout", type=float, default=300.0, metavar="SECONDS")
    parser.add_argument(
        "--drain-timeout", type=float, default=10.0, metavar="SECONDS", help="for requests in flight, on stop"
    )


def server_options(args: argparse.Namespace, repository: NodeRepository) -> ServerOptions:
    """`ServerOptions` from the command line."""
    return ServerOptions(
        repository=repository.folder,
        host=args.host or repository.host or "127.0.0.1",
        http_port=args.http_port,
        grpc_port=args.grpc_port or repository.grpc_port or 0,
        metrics_port=args.metrics_port,
        tritonserver=args.tritonserver,
        log_path=args.log,
        start_timeout_s=args.start_timeout,
        drain_timeout_s=args.drain_timeout,
    )


def run(args: argparse.Namespace) -> int:
    """Returns when the server was stopped (0), did not start or died (1)."""
    lines = StepLines()
    with signals_interrupt(), contextlib.suppress(KeyboardInterrupt):
        try:
            repository = _repository(args, lines)
            options = server_options(args, repository)
            with (
                _echo(options, args.echo_log) as options,
                running(options, lines, _openai_port(args), repository) as stack,
            ):
                sys.stdout.write(how_to_use(stack))
                sys.stdout.flush()
                while stack.supervisor.given_up is None:
                    time.sleep(0.5)
                raise ServerStartError(stack.supervisor.given_up)
        except START_ERRORS as error:
            sys.stderr.write(f"distserve serve: {error}\n")
            return 1
    lines.say("stopped")
    return 0


def _repository(args: argparse.Namespace, lines: StepLines) -> NodeRepository:
    if args.model_repository is not None:
        return node_repository(args.model_repository, args.node)
    if args.placement is not None:
        file = read_placement(args.placement)
        return node_repository(repository_for(file, args.placement.stem), args.node)
    ensure_demo_model(lines.say)
    return node_repository(repository_for(demo_placement(), "demo"), args.node)


@contextlib.contextmanager
def _echo(options: ServerOptions, wanted: bool) -> Iterator[ServerOptions]:
    """The options with a log file that is copied to stderr, if that is wanted."""
    if not wanted:
        yield options
        return
    with tempfile.TemporaryDirectory(prefix="distserve-") as folder:
        path = options.log_path or Path(folder) / "tritonserver.log"
        with LogEcho(path):
            yield replace(options, log_path=path)


def _openai_port(args: argparse.Namespace) -> int | None:
    if args.no_openai:
        return None
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        if args.openai_port:
            raise ConfigError(
                f"--openai-port {args.openai_port}: {', '.join(missing)} is not installed; "
                "fix: pip install 'distserve-triton[openai]'"
            )
        return None
    return int(args.openai_port)


@contextlib.contextmanager
def signals_interrupt() -> Iterator[None]:
    """The first SIGTERM or SIGINT raises `KeyboardInterrupt`; later ones do not disturb the clean-up."""
    interrupted = False

    def handle(number: int, frame: object) -> None:
        nonlocal interrupted
        if not interrupted:
            interrupted = True
            raise KeyboardInterrupt

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def how_to_use(stack: Stack) -> str:
    """Addresses, and lines that work when pasted into a shell."""
    server = stack.server
    text = (
        f"\nhttp {server.http_url}   grpc {server.grpc_url}   metrics http://{server.metrics_url}/metrics\n"
    )
    if stack.client is None:
        return text + "This node has no orchestrator; requests go to the node that has it.\n"
    body = '{"text_input": "The capital of France is", "stream": true, "max_tokens": 16, "temperature": 0}'
    text += f"""
curl -sN http://{server.http_url}/v2/models/orchestrator/generate_stream -d '{body}'

{sys.executable} -c '
from distserve_tools.client import Client
for chunk in Client("{server.grpc_url}").stream("The capital of France is", max_tokens=16, temperature=0):
    print(chunk.text, end="", flush=True)
print()'
"""
    if stack.openai_url is not None:
        messages = '"messages": [{"role": "user", "content": "Say hello."}], "stream": true, "max_tokens": 16'
        chat = f'{{"model": "{stack.model_name}", {messages}}}'
        text += f"""
curl -sN {stack.openai_url}/v1/chat/completions -H 'Content-Type: application/json' -d '{chat}'
"""
    text += f"""
{Path(sys.executable).parent / "distserve"} status --grpc {server.grpc_url}

Ctrl-C stops it.
"""
    return text
