"""The systems that are compared, each a placement on the same two cores, and how they are served."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from distserve.core.parsing import ConfigError
from distserve_planner.generate import generate
from distserve_planner.placement_file import PLACEMENT_SCHEMA, parse_placement
from distserve_tools.client import Client
from distserve_tools.launch import ServerOptions, TritonServer
from distserve_tools.load.target import Target
from distserve_tools.load.triton_target import TritonTarget
from distserve_tools.readiness import probe, wait_until_serving
from distserve_tools.testbed.engine_counters import Counters, engine_counters

DISAGGREGATED, PREFILL_FIRST, CHUNKED = "disaggregated", "prefill_first", "chunked_prefill"
SYSTEMS = (DISAGGREGATED, PREFILL_FIRST, CHUNKED)
_READY_S = 120.0


@dataclass(frozen=True)
class EngineLimits:
    """What all engines of a reproduction share."""

    max_batch_tokens: int
    chunk_tokens: int
    kv_bytes: int = 384 << 20
    max_batch_size: int = 64
    block_size: int = 16


@dataclass(frozen=True)
class Served:
    """A system that takes requests."""

    name: str
    pids: tuple[int, ...]  # of its servers, for the account of processor time
    target: Callable[[float, float], Target]  # start of the run, seconds per request
    blocks: int  # of KV in each instance; 0 if not known
    counters: Callable[[], Counters]  # of its engines; empty if they tell none


def cores() -> tuple[int, int]:
    """The two cores that stand for two devices. Raises `ConfigError` on a machine with one."""
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        raise ConfigError(f"cores={allowed}: the test-bed needs two; one core stands for one device")
    return allowed[0], allowed[1]


def placement_text(system: str, model: str, limits: EngineLimits) -> str:
    """The placement file of one of `SYSTEMS`."""
    common: dict[str, Any] = {
        "kv_bytes": limits.kv_bytes,
        "max_batch_tokens": limits.max_batch_tokens,
        "max_batch_size": limits.max_batch_size,
    }
    unified: dict[str, Any] = {"role": "unified", "policy": system}
    if system == CHUNKED:
        unified["chunk_tokens"] = limits.chunk_tokens
    roles = [{"role": "prefill"}, {"role": "decode"}] if system == DISAGGREGATED else [unified, unified]
    instances = [
        {**role, "devices": [f"cpu:{core}"], **common} for role, core in zip(roles, cores(), strict=True)
    ]
    values = {
        "schema": PLACEMENT_SCHEMA,
        "model": model,
        "block_size": limits.block_size,
        "instances": instances,
    }
    return str(yaml.safe_dump(values, sort_keys=False))


@contextlib.contextmanager
def serving(
    names: Sequence[str], model: str, limits: EngineLimits, folder: Path, say: Callable[[str], None]
) -> Iterator[Mapping[str, Served]]:
    """All systems at once, each a tritonserver of its own on free ports: an idle one takes next to nothing,
    and runs can take turns without a start in between."""
    with contextlib.ExitStack() as stack:
        served = {}
        for name in names:
            say(f"starting {name}")
            repository = folder / name
            text = placement_text(name, model, limits)
            generate(parse_placement(text), repository, force=True)
            options = ServerOptions(repository, log_path=folder / f"{name}.log")
            server = stack.enter_context(TritonServer(options))
            with Client(server.grpc_url) as client:
                status = wait_until_serving(client, _READY_S)
                probe(client)
            blocks = min(int(entry["blocks_total"]) for entry in status["instances"])
            names_of = tuple(str(entry["instance"]) for entry in status["instances"])
            counters = functools.partial(engine_counters, server.grpc_url, names_of, server.access)
            served[name] = Served(name, (server.pid,), _triton(server.grpc_url), blocks, counters)
        yield served


def _triton(url: str) -> Callable[[float, float], Target]:
    return lambda start_s, timeout_s: TritonTarget(url, start_s, timeout_s)
