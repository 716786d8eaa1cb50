"""Configuration of one engine, as the planner writes it and the engine reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from distserve.core.order import Order, Ordering
from distserve.core.parsing import ConfigError, parse

Role = Literal["prefill", "decode", "unified"]
Dtype = Literal["fp32", "bf16", "fp16"]
Policy = Literal["prefill_first", "chunked_prefill"]
Collectives = Literal["memory", "gloo"]
LogFormat = Literal["text", "json"]

DTYPE_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class EngineConfig:
    """One instance: a full copy of the weights on tp x pp devices.

    Sizes are in tokens, times in seconds. `num_blocks` or `kv_bytes` fixes the KV pool; with neither the
    engine takes what the device has left.
    """

    instance: str
    role: Role
    model: str  # a folder, or cache:NAME
    devices: tuple[str, ...] = ("cpu:0",)
    dtype: Dtype = "fp32"
    tp: int = 1
    pp: int = 1
    block_size: int = 16
    num_blocks: int | None = None
    kv_bytes: int | None = None
    max_context: int | None = None  # default: the model's
    max_batch_size: int = 64  # sequences in one decode step
    max_batch_tokens: int = 512  # Lm: prompts are batched up to this many tokens, longer ones run alone
    policy: Policy = "prefill_first"  # unified instances only
    chunk_tokens: int = 256  # chunked_prefill: tokens of one step, decode tokens included
    prefill_chunk_tokens: int | None = None  # prefill instances: pieces of longer prompts, to be overtaken
    prefill_order: Order = "fcfs"  # of the prompts that wait at a prefill instance
    ageing_tokens_per_s: float = 1000.0  # prefill_order "shortest": what a second of waiting counts
    reserve_tokens: int | None = 0  # decode admission: output room assured; null: all of max_tokens
    max_queue: int = 1024
    lease_s: float = 10.0
    transfer_timeout_s: float = 10.0
    heartbeat_s: float = 1.0
    rank_timeout_s: float = 120.0  # tp x pp > 1: no answer from a rank, and the instance starts again
    collectives: Collectives | None = None  # between CPU ranks; default: memory. GPUs use NCCL
    log_format: LogFormat = "text"
    attention_backend: str | None = None  # default: chosen by device
    decode_graphs: bool | None = None  # recorded batch sizes, read back late; default: on GPUs
    transfer_host: str = "127.0.0.1"
    transfer_secret_file: str | None = None
    rank_servers: tuple[str, ...] | None = None  # gRPC address by rank; "": rank 0's node

    def __post_init__(self) -> None:
        for name in (
            "tp",
            "pp",
            "block_size",
            "max_batch_size",
            "max_batch_tokens",
            "chunk_tokens",
            "max_queue",
        ):
            _at_least(name, getattr(self, name), 1)
        for name in ("num_blocks", "kv_bytes", "max_context", "prefill_chunk_tokens"):
            value = getattr(self, name)
            if value is not None:
                _at_least(name, value, 1)
        for name in ("lease_s", "transfer_timeout_s", "heartbeat_s", "rank_timeout_s"):
            value = getattr(self, name)
            if not value > 0:
                raise ConfigError(f"{name}={value}: must be above 0")
        self.ordering()
        if len(self.devices) != self.tp * self.pp:
            raise ConfigError(
                f"devices={list(self.devices)}: tp={self.tp} x pp={self.pp} needs "
                f"{self.tp * self.pp}, one per rank"
            )
        self._check_rank_servers()

    def _check_rank_servers(self) -> None:
        servers = self.rank_servers
        if servers is None:
            return
        if len(servers) != self.tp * self.pp or servers[0]:
            raise ConfigError(
                f"rank_servers={list(servers)}: must have {self.tp * self.pp}, one per rank, the first one ''"
            )
        for server in servers:
            host, _, port = server.rpartition(":")
            if server and not (host and port.isdigit() and 0 < int(port) < 65536):
                raise ConfigError(f"rank_servers={list(servers)}: {server!r} must be host:port")
        if self.collectives == "memory" and any(servers):
            raise ConfigError("collectives='memory': an instance over several nodes needs 'gloo' or NCCL")

    @property
    def pipe_messages(self) -> int:
        """Steps that can be on their way between two pipeline stages."""
        return 2 * self.pp if self.role == "prefill" else self.pp

    @property
    def remote_ranks(self) -> dict[str, tuple[int, ...]]:
        """Ranks that other nodes host, by the gRPC address of their server."""
        servers = self.rank_servers or ()
        return {s: tuple(r for r, other in enumerate(servers) if other == s) for s in servers if s}

    def host_of(self, rank: int) -> str:
        """The address at which other processes reach a rank."""
        server = self.rank_servers[rank] if self.rank_servers is not None else ""
        return server.rpartition(":")[0] if server else self.transfer_host

    def ordering(self) -> Ordering:
        """Of waiting prompts. Raises `ConfigError`."""
        return Ordering(self.prefill_order, self.ageing_tokens_per_s)

    @classmethod
    def load(cls, values: object, where: str = "engine") -> EngineConfig:
        """Parses a mapping; unknown keys are refused by name (`ConfigError`)."""
        return parse(cls, values, where)


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise ConfigError(f"{name}={value}: must be at least {low}")
