"""Small host arrays to a device, without the host waiting for it.

A copy from ordinary memory makes the host wait for all that the stream has before it. Pinned memory comes
from torch's pool, which gives it to nobody else before the copy has ended.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def upload(values: Tensor | npt.NDArray[Any], device: torch.device) -> Tensor:
    """A host tensor or array on `device`, in the order of the current stream. On a CPU the result shares its
    memory.
    """
    host = values if isinstance(values, Tensor) else torch.from_numpy(values)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def upload_into(target: Tensor, values: npt.NDArray[Any]) -> None:
    """Fills a contiguous tensor, in the order of the current stream."""
    host = torch.from_numpy(values)
    target.copy_(host if target.is_cpu else host.pin_memory(), non_blocking=True)
