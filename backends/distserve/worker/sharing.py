"""Which ranks of an instance live on the same memory."""

from __future__ import annotations

from distserve.core.config import EngineConfig


def sharers(config: EngineConfig, rank: int) -> int:
    """Ranks that share the memory of `rank`'s device: on CPUs all of them, else those on the same GPU."""
    servers = config.rank_servers or ("",) * len(config.devices)
    here = [name for name, server in zip(config.devices, servers, strict=True) if server == servers[rank]]
    device = config.devices[rank]
    if device.startswith("cpu"):
        return sum(name.startswith("cpu") for name in here)
    return here.count(device)
