"""Names of devices, and binding this process to one.

On a host without GPUs a device is a core or a set of cores: "cpu:0", "cpu:0-1", "cpu:0,2". With GPUs:
"cuda:0".
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from distserve.core.parsing import ConfigError


@dataclass(frozen=True)
class Device:
    """A parsed device name; `cores` is empty for GPUs, `index` is the GPU's number (0 on the CPU)."""

    kind: str
    index: int
    cores: tuple[int, ...]

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu") if self.kind == "cpu" else torch.device(self.kind, self.index)


def parse_device(name: str) -> Device:
    """Parses a device name. Raises `ConfigError` naming the value and the forms that are allowed."""
    kind, _, rest = name.partition(":")
    try:
        if kind == "cpu":
            return Device("cpu", 0, _cores(rest))
        if kind == "cuda":
            return Device("cuda", _number(rest), ())
    except ValueError:
        pass
    raise ConfigError(f"device={name!r}: must be 'cpu:N', 'cpu:N-M', 'cpu:N,M' or 'cuda:N'")


def bind_device(device: Device) -> None:
    """Ties this process to the device: cores and torch's thread count, or the current GPU.

    Call it before torch has started threads. Raises `ConfigError` if the host does not have the device.
    """
    if device.kind == "cuda":
        count = torch.cuda.device_count()
        if device.index >= count:
            raise ConfigError(f"device='cuda:{device.index}': this host has {count} CUDA devices")
        torch.cuda.set_device(device.index)
        return
    allowed = set(range(os.cpu_count() or 1))
    missing = sorted(set(device.cores) - allowed)
    if missing:
        raise ConfigError(f"device='cpu': no core {missing[0]}; this host has 0 to {max(allowed)}")
    if hasattr(os, "sched_setaffinity"):
        try:
            os.sched_setaffinity(0, device.cores)
        except OSError as error:
            raise ConfigError(f"device='cpu': cores {list(device.cores)} can't be had ({error})") from None
    torch.set_num_threads(len(device.cores))


def _cores(text: str) -> tuple[int, ...]:
    cores: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        low = _number(first)
        high = _number(last) if dash else low
        if high < low:
            raise ValueError(part)
        cores += [c for c in range(low, high + 1) if c not in cores]
    return tuple(sorted(cores))


def _number(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(text)
    return int(text)
