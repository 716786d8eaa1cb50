"""Wording shared by the captions."""

from __future__ import annotations

from collections.abc import Callable

Done = Callable[[int, int], None]  # told (finished, all) tasks


def per_device(rate: float) -> str:
    """A rate with its unit."""
    return f"{rate:.3g} requests/s per device"


def factor(a: float, b: float) -> str:
    """a as a multiple of b."""
    return f"{a / b:.2f} times"


def plural(count: int, noun: str) -> str:
    """1 device, 2 devices."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
