"""How fast KV moves between two processes, over each channel that this host offers."""

from __future__ import annotations

from typing import Any

import torch

from distserve.core.config import EngineConfig
from distserve.core.parsing import ConfigError
from distserve.worker.device import parse_device
from distserve_tools.device_check import ceilings
from distserve_tools.device_check.settings import Settings
from distserve_tools.device_check.shapes import MODELS, model_config
from distserve_tools.transfer_sweep import TransferPeers, transfer_times

TOKENS = {"device": (256, 1024, 4096), "small": (16, 64)}


def run(settings: Settings) -> dict[str, Any]:
    """Rows of seconds and bytes per second by channel and size."""
    model = model_config(MODELS[settings.scale][-1])
    values = {"instance": "check", "role": "decode", "model": "random", "devices": [settings.device]}
    config = EngineConfig.load({**values, "dtype": settings.dtype})
    bandwidth, _ = ceilings.read(settings)
    rows: list[dict[str, Any]] = []
    failed = []
    for name, source, options in channels(settings):
        peers = TransferPeers(config, model, source, TOKENS[settings.scale], **options)
        try:
            for size, seconds in transfer_times(peers, lambda: None):
                rows.append(
                    {
                        "channel": name,
                        "bytes": size,
                        "seconds": seconds,
                        "bytes_s": size / seconds,
                        "share": size / seconds / bandwidth,
                    }
                )
        except (ConfigError, TimeoutError) as error:
            failed.append(f"{name}: {error}")
    return {"model": MODELS[settings.scale][-1], "rows": rows, "failed": failed}


def channels(settings: Settings) -> list[tuple[str, str, dict[str, Any]]]:
    """(name, device of the source, options): the default between two instances of this host first."""
    device = settings.device
    through_host = ("gloo", device, {"backend": "gloo", "shared_memory": False})
    if not settings.on_gpu:
        return [("memory", device, {}), through_host]
    found: list[tuple[str, str, dict[str, Any]]] = [("one GPU (CUDA IPC)", device, {})]
    index = parse_device(device).index
    others = [f"cuda:{i}" for i in range(torch.cuda.device_count()) if i != index]
    if others:
        found.append(("two GPUs (CUDA IPC)", others[0], {}))
        found.append(("two GPUs (NCCL)", others[0], {"backend": "nccl", "shared_memory": False}))
    return [*found, through_host]
