"""Whether a server, or an OpenAI front end, takes requests. Exit code 0 or 1, for health checks.

Triton alone says "ready" for a model whose process is dead, so on a node with an orchestrator that one is
asked: it is ready when an instance of each phase lives.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
from typing import Any

from distserve_planner.placement_check import ORCHESTRATOR


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `distserve health`."""
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--http", metavar="HOST:PORT", help="of a tritonserver")
    which.add_argument("--openai", metavar="HOST:PORT", help="of an OpenAI front end")
    parser.add_argument("--timeout", type=float, default=5.0, metavar="SECONDS", help="of each question")


def run(args: argparse.Namespace) -> int:
    """Returns 0 if it takes requests; else 1, with the reason on stderr."""
    if args.openai is not None:
        problem = front_end_problem(args.openai, args.timeout)
    else:
        problem = server_problem(args.http, args.timeout)
    if problem is not None:
        sys.stderr.write(f"distserve health: {problem}\n")
    return 0 if problem is None else 1


def server_problem(url: str, timeout_s: float) -> str | None:
    """Why the server at `url` (host:port) can't take requests; `None` if it can."""
    try:
        if _ask(url, "GET", "/v2/health/ready", None, timeout_s)[0] != 200:
            return f"{url}: Triton is not ready"
        if _ask(url, "GET", f"/v2/models/{ORCHESTRATOR}", None, timeout_s)[0] != 200:
            return None  # a node with instances only
        body = {"control": json.dumps({"op": "status"})}
        code, answer = _ask(url, "POST", f"/v2/models/{ORCHESTRATOR}/generate", body, timeout_s)
        if code != 200 or "control_output" not in answer:
            return f"{url}: the orchestrator answers {answer.get('error', code)}"
        status = json.loads(answer["control_output"])
    except (OSError, http.client.HTTPException, ValueError) as error:
        return f"{url}: {error}"
    if status["ready"]:
        return None
    reasons = [
        f"{entry['instance']}: {entry.get('reason')}" for entry in status["instances"] if not entry["usable"]
    ]
    return "; ".join([f"{url}: not ready", *reasons])


def front_end_problem(url: str, timeout_s: float) -> str | None:
    """The same for the OpenAI front end at `url` (host:port)."""
    try:
        code, answer = _ask(url, "GET", "/health", None, timeout_s)
    except (OSError, http.client.HTTPException, ValueError) as error:
        return f"{url}: {error}"
    return None if code == 200 else f"{url}: {answer.get('reason', 'not ready')}"


def _ask(url: str, method: str, path: str, body: Any, timeout_s: float) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection(url, timeout=timeout_s)
    try:
        connection.request(method, path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        text = response.read()
    finally:
        connection.close()
    answer = json.loads(text) if text else {}
    return response.status, answer if isinstance(answer, dict) else {}
