"""The role of an instance, with the sockets and threads that it needs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from distserve.core.blocks import BlockManager
from distserve.core.config import EngineConfig
from distserve.core.decode_scheduler import DecodeScheduler
from distserve.core.model_config import ModelConfig
from distserve.core.parsing import ConfigError
from distserve.core.prefill_scheduler import PrefillScheduler
from distserve.core.scheduler import Limits
from distserve.core.secret_file import shared_secret
from distserve.core.shapes import Shape
from distserve.core.unified_scheduler import UnifiedScheduler
from distserve.engine.decode_role import DecodeRole, Puller
from distserve.engine.inbox import Inbox
from distserve.engine.ops import Op
from distserve.engine.prefill_role import Leases, PrefillRole, Source
from distserve.engine.roles import Role, UnifiedRole
from distserve.transfer.errors import TransferError
from distserve.transfer.fanout import open_agents
from distserve.transfer.fanout_leases import FanoutLeases, InstanceSource
from distserve.transfer.fanout_puller import FanoutPuller
from distserve.transfer.handle import Layout
from distserve.transfer.leases import LeaseTable
from distserve.transfer.puller import KVPuller
from distserve.transfer.source import KVSource
from distserve.worker.executor import Executor
from distserve.worker.kv_cache import KVCache
from distserve.worker.rank_executor import RankExecutor
from distserve_kernels.layout import default_layout


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
    executor: Executor,
    layout: Layout,
    epoch: int,
    inbox: Inbox[Op],
) -> Role:
    """Raises `ConfigError` for transfer settings that cannot be."""
    limits, stages = Limits.of(config), executor.depth
    if config.role == "unified":
        return UnifiedRole(UnifiedScheduler(limits, blocks, config.policy, stages), blocks)
    if config.role == "decode":
        scheduler = DecodeScheduler(limits, blocks, stages)
        puller = make_puller(config, executor, layout, epoch)
        return DecodeRole(scheduler, blocks, puller, inbox, config.transfer_timeout_s)
    leases, source = make_source(config, executor, layout, epoch, inbox.poke)
    return PrefillRole(
        PrefillScheduler(limits, blocks, config.ordering()),
        blocks,
        leases,
        source,
        instance=config.instance,
        epoch=epoch,
        layout=layout,
        lease_s=config.lease_s,
        stages=stages,
    )


def make_puller(config: EngineConfig, executor: Executor, layout: Layout, epoch: int) -> Puller:
    """Pulls into the pages of all ranks."""
    secret, backend = shared_secret(config.transfer_secret_file), backend_of(executor.kv_cache)
    place = (Shape(config.tp, config.pp), 0, layout, config.instance, epoch)
    if not isinstance(executor, RankExecutor):
        return KVPuller(executor.kv_cache, *place, secret=secret, backend=backend)
    identity = {"layout": layout.to_wire(), "instance": config.instance, "epoch": epoch}
    open_agents(executor, {"op": "puller", **identity, "backend": backend})
    puller = FanoutPuller(KVPuller(executor.kv_cache, *place, secret=secret, backend=backend), executor)
    executor.listen_side(puller.take)
    return puller


def make_source(
    config: EngineConfig, executor: Executor, layout: Layout, epoch: int, on_release: Callable[[], None]
) -> tuple[Leases, Source]:
    """Offers the pages of all ranks. Raises `ConfigError` if an address cannot be had."""
    common: dict[str, Any] = {
        "backend": backend_of(executor.kv_cache),
        "timeout_s": config.transfer_timeout_s,
    }
    here = common | {
        "host": config.transfer_host,
        "secret": shared_secret(config.transfer_secret_file),
    }
    identity = {"layout": layout.to_wire(), "instance": config.instance, "epoch": epoch}
    place = (Shape(config.tp, config.pp), 0, layout, config.instance, epoch)
    try:
        if not isinstance(executor, RankExecutor):
            table = LeaseTable(time.monotonic, on_release)
            return table, InstanceSource(KVSource(executor.kv_cache, table, *place, **here))
        others = open_agents(executor, {"op": "source", **identity, **common})
        shared = FanoutLeases(time.monotonic, executor, on_release)
        executor.listen_side(shared.take)
        local = KVSource(executor.kv_cache, shared.local, *place, **here)
    except (TransferError, ValueError, OSError) as error:
        raise ConfigError(f"transfer_host={config.transfer_host!r}: {error}") from error
    return shared, InstanceSource(local, others, shared, config.rank_timeout_s)


def backend_of(cache: KVCache) -> str:
    return "nccl" if cache.pages(0)[0].device.type == "cuda" else "gloo"
