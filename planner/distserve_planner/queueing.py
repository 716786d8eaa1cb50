"""Closed forms of average TTFT for uniform prompts and Poisson arrivals (paper, section 3.1)."""

from __future__ import annotations

import math


def md1_ttft_s(rate: float, service_s: float) -> float:
    """Eq. 1: M/D/1 queue, D + R D^2 / (2 (1 - R D)); infinite when R D >= 1.

    rate: requests per second (R); service_s: prefill seconds of one request (D).
    """
    load = rate * service_s
    if load >= 1:
        return math.inf
    return service_s + rate * service_s**2 / (2 * (1 - load))


def pipeline_ttft_s(rate: float, total_s: float, stage_s: float) -> float:
    """Eq. 2, first form: Ds + R Dm^2 / (2 (1 - R Dm)), any number of stages.

    total_s: seconds of one request through all stages (Ds); stage_s: seconds of the slowest (Dm).
    """
    load = rate * stage_s
    if load >= 1:
        return math.inf
    return total_s + rate * stage_s**2 / (2 * (1 - load))


def two_way_pipeline_ttft_s(rate: float, service_s: float) -> float:
    """Eq. 2, second form: pp = 2 with D = Ds = 2 Dm: D + R D^2 / (4 (2 - R D))."""
    load = rate * service_s
    if load >= 2:
        return math.inf
    return service_s + rate * service_s**2 / (4 * (2 - load))


def two_way_tensor_ttft_s(rate: float, service_s: float, speedup: float) -> float:
    """Eq. 3: tp = 2 with speed-up K in (1, 2): D/K + R D^2 / (2 K (K - R D)).

    Raises `ValueError` unless K > 0.
    """
    if not speedup > 0:
        raise ValueError(f"speedup={speedup}: K must be above 0 (1 < K < 2 for two devices)")
    load = rate * service_s
    if load >= speedup:
        return math.inf
    return service_s / speedup + rate * service_s**2 / (2 * speedup * (speedup - load))


def crossover_rate(service_s: float, speedup: float) -> float | None:
    """Rate above which pp = 2 (Eq. 2) has the lower average TTFT than tp = 2 (Eq. 3); None if never.

    tp = 2 wins at low rates by its shorter execution, pp = 2 at high rates by its lower utilisation; with
    K = 2 tp always wins. Found by bisection on the difference, which changes sign once below the load at
    which tp = 2 saturates (R D = K).
    """
    if speedup >= 2:
        return None
    low, high = 0.0, speedup / service_s

    def tensor_wins(rate: float) -> bool:
        tensor = two_way_tensor_ttft_s(rate, service_s, speedup)
        return tensor < two_way_pipeline_ttft_s(rate, service_s)

    if not tensor_wins(low):
        return 0.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if tensor_wins(middle) else (low, middle)
    return high
