"""Shows the instances of a running server: phase, queues, KV blocks, requests. Live in a terminal."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from distserve.core.parsing import ConfigError
from distserve_tools.client import Client, RequestError

_COLUMNS = (
    ("run", "running"),
    ("queue", "queued"),
    ("tokens", "queued_tokens"),
    ("lease", "leases"),
    ("pull", "transfers_pending"),
    ("preempt", "preemptions"),
    ("restart", "restarts"),
)
_TOTALS = (("requests", "requests"), ("queued", "queued"), ("queued tokens", "queued_tokens"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `distserve status`."""
    parser.add_argument("--grpc", metavar="HOST:PORT", help="default: the one server on this machine")
    parser.add_argument("--once", action="store_true", help="print one table and end")
    parser.add_argument("--json", action="store_true", help="print the status as JSON and end")
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS")
    parser.add_argument("--timeout", type=float, default=5.0, metavar="SECONDS", help="of one question")


def run(args: argparse.Namespace) -> int:
    """Returns 0 if the server is ready, 3 if it answers but can't serve, 1 if it does not answer."""
    with Client(args.grpc or only_local_server()) as client:
        try:
            status = client.control("status", timeout_s=args.timeout)
            if args.json:
                sys.stdout.write(json.dumps(status, indent=1) + "\n")
            elif args.once or not sys.stdout.isatty():
                Console().print(status_table(status))
            else:
                _watch(client, status, args)
        except RequestError as error:
            sys.stderr.write(f"distserve status: {error}\n")
            return 1
    return 0 if status.get("ready", False) else 3


def _watch(client: Client, status: dict[str, Any], args: argparse.Namespace) -> None:
    with Live(status_table(status), auto_refresh=False) as live:
        while True:
            time.sleep(args.interval)
            live.update(status_table(client.control("status", timeout_s=args.timeout)), refresh=True)


def status_table(status: dict[str, Any]) -> RenderableType:
    """A line of totals and a table with a row per instance."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    for name in ("instance", "role", "state", "KV blocks"):
        table.add_column(name, no_wrap=name != "state", min_width=8 if name == "state" else None)
    for label, _ in _COLUMNS:
        table.add_column(label, justify="right", no_wrap=True)
    for entry in status["instances"]:
        cells = [str(entry.get(key, "")) for _, key in _COLUMNS]
        table.add_row(entry["instance"], entry["role"], _state(entry), _blocks(entry), *cells)
    totals = "  ".join(f"{label} {status[key]}" for label, key in _TOTALS)
    if status.get("server_restarts"):
        totals += f"  server restarts {status['server_restarts']}"
    totals += _attainment(status)
    ready = "[green]ready[/green]" if status["ready"] else "[red]not ready[/red]"
    return Group(Text.from_markup(f"{ready}  {escape(status['model'])}  {totals}"), table)


def _attainment(status: dict[str, Any]) -> str:
    """Nothing where no request has had objectives lately."""
    window = status.get("attainment", {})
    if not window.get("requests"):
        return ""
    return "  attainment " + ", ".join(f"{name} {window[name]:.0%}" for name in ("both", "ttft", "tpot"))


def _state(entry: dict[str, Any]) -> str:
    if entry.get("draining"):
        return "drained" if entry.get("drained") else "draining"
    if entry.get("usable"):
        return "[green]up[/green]"
    return f"[red]{entry.get('phase')}[/red] {escape(entry.get('reason') or '')}".strip()


def _blocks(entry: dict[str, Any]) -> str:
    total, free = entry.get("blocks_total"), entry.get("blocks_free")
    if not total or free is None:
        return ""
    return f"{total - free}/{total}"


def only_local_server() -> str:
    """gRPC address of the only tritonserver on this machine. Raises `ConfigError` for none or several."""
    found = sorted(_local_servers())
    if len(found) == 1:
        return found[0]
    if not found:
        raise ConfigError("no tritonserver runs on this machine; give --grpc HOST:PORT")
    raise ConfigError(f"several servers run on this machine; choose with --grpc: {', '.join(found)}")


def _local_servers() -> set[str]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_text(errors="replace").split("\0")
        except OSError:
            continue
        if Path(words[0]).name == "tritonserver":
            options = dict(re.findall(r"--(grpc-port|grpc-address)=(\S+)", " ".join(words)))
            host = options.get("grpc-address", "127.0.0.1").replace("0.0.0.0", "127.0.0.1")
            found.add(f"{host}:{options.get('grpc-port', '8001')}")
    return found
