"""The role of an instance, with the sockets and threads that it needs."""

from __future__ import annotations

import time
from pathlib import Path

from distserve.core.blocks import BlockManager
from distserve.core.config import EngineConfig
from distserve.core.decode_scheduler import DecodeScheduler
from distserve.core.model_config import ModelConfig
from distserve.core.parsing import ConfigError
from distserve.core.prefill_scheduler import PrefillScheduler
from distserve.core.scheduler import Limits
from distserve.core.shapes import Shape
from distserve.core.unified_scheduler import UnifiedScheduler
from distserve.engine.decode_role import DecodeRole
from distserve.engine.inbox import Inbox
from distserve.engine.ops import Op
from distserve.engine.prefill_role import PrefillRole
from distserve.engine.roles import Role, UnifiedRole
from distserve.transfer.errors import TransferError
from distserve.transfer.handle import Layout
from distserve.transfer.leases import LeaseTable
from distserve.transfer.puller import KVPuller
from distserve.transfer.source import KVSource
from distserve.worker.kv_cache import KVCache
from distserve_kernels.layout import default_layout

MIN_SECRET_BYTES = 16


def make_layout(config: EngineConfig, model: ModelConfig, model_hash: str, cache: KVCache) -> Layout:
    """How the KV of this instance lies in memory: what another one must share to use it."""
    return Layout(
        model_hash=model_hash,
        dtype=config.dtype,
        block_size=config.block_size,
        layers=model.num_layers,
        kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        tp=config.tp,
        pp=config.pp,
        page_format=default_layout(cache.pages(0)[0].device).name,
    )


def make_role(
    config: EngineConfig,
    blocks: BlockManager,
    cache: KVCache,
    layout: Layout,
    epoch: int,
    inbox: Inbox[Op],
) -> Role:
    """Raises `ConfigError` for transfer settings that cannot be."""
    limits = Limits.of(config)
    if config.role == "unified":
        return UnifiedRole(UnifiedScheduler(limits, blocks, config.policy), blocks)
    secret = read_secret(config.transfer_secret_file)
    backend = "nccl" if cache.pages(0)[0].device.type == "cuda" else "gloo"
    place = (Shape(config.tp, config.pp), 0, layout, config.instance, epoch)
    if config.role == "decode":
        puller = KVPuller(cache, *place, secret=secret, backend=backend)
        return DecodeRole(DecodeScheduler(limits, blocks), blocks, puller, inbox, config.transfer_timeout_s)
    leases = LeaseTable(time.monotonic, inbox.poke)
    try:
        source = KVSource(
            cache,
            leases,
            *place,
            host=config.transfer_host,
            secret=secret,
            backend=backend,
            timeout_s=config.transfer_timeout_s,
        )
    except (TransferError, ValueError, OSError) as error:
        raise ConfigError(f"transfer_host={config.transfer_host!r}: {error}") from error
    return PrefillRole(
        PrefillScheduler(limits, blocks),
        blocks,
        leases,
        source,
        instance=config.instance,
        epoch=epoch,
        layout=layout,
        lease_s=config.lease_s,
    )


def read_secret(file: str | None) -> bytes | None:
    """The secret that instances of different hosts share: a file, white space around it left out."""
    if file is None:
        return None
    try:
        secret = Path(file).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"transfer_secret_file={file!r}: {error.strerror}") from None
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"transfer_secret_file={file!r}: {len(secret)} bytes; must have at least {MIN_SECRET_BYTES}"
        )
    return secret
