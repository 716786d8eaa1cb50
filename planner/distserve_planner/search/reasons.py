"""Why a candidate lost, in one line."""

from __future__ import annotations

from distserve_planner.search.diagnosis import Diagnosis
from distserve_planner.search.ranking import Ranked
from distserve_planner.simulator.usage import Usage
from distserve_planner.slo import Attainment, Slo, seconds

BUSY = 0.9  # a link or a KV pool that is used more than this is named
SLOW = 0.05  # as is KV transfer that takes more than this share of the time after the first token


def reason(entry: Ranked, slo: Slo, best: float, diagnosis: Diagnosis | None = None) -> str:
    """best: the winner's requests per second and device. diagnosis: of `entry` at the rate that it missed."""
    devices = entry.deployment.devices
    if not entry.tried:
        return (
            f"cannot win: its phases and links alone reach {entry.bound / devices:.3g} req/s/device at most, "
            f"the best has {best:.3g}"
        )
    if entry.lone is not None:
        return f"misses the objectives even for a lone request: {missed(entry.lone, slo)}"
    if entry.rate > 0:
        short = (
            f"{entry.rate / devices:.3g} req/s/device ({100 * entry.rate / devices / best:.0f} % of the best)"
        )
        limit = f"; above that {missed(entry.above, slo)}" if entry.above is not None else ""
        return short + limit + _bottleneck(diagnosis)
    if entry.above is not None:
        return f"at {entry.floor / devices:.3g} req/s/device {missed(entry.above, slo)}" + _bottleneck(
            diagnosis
        )
    return "meets the objectives at no rate"


def missed(seen: Attainment, slo: Slo) -> str:
    """The objective that fails first, its percentile, and the share that meets it."""
    name = f"P{100 * slo.attainment:g}"
    parts = []
    if seen.ttft < slo.attainment or seen.ttft <= seen.tpot:
        parts.append(
            f"TTFT {name} {seconds(seen.ttft_s)} of {seconds(slo.ttft_s)} ({100 * seen.ttft:.0f} % met)"
        )
    if seen.tpot < slo.attainment or seen.tpot < seen.ttft:
        parts.append(
            f"TPOT {name} {seconds(seen.tpot_s)} of {seconds(slo.tpot_s)} ({100 * seen.tpot:.0f} % met)"
        )
    if seen.ttft >= slo.attainment and seen.tpot >= slo.attainment:
        return f"both together {100 * seen.both:.0f} %: {' and '.join(parts)}"
    return " and ".join(parts)


def offline_limit(usage: Usage) -> str:
    """What a placement without objectives is limited by: the phase or the link that is busiest."""
    parts = [("prefill", usage.prefill_device), ("decode", usage.decode_device), ("moving KV", usage.link)]
    known = [(share, name) for name, share in parts if share is not None]
    if usage.unified_device is not None or not known:
        return "limited by its own speed"
    (most, name), *others = sorted(known, reverse=True)
    rest = ", ".join(f"{other} {100 * share:.0f} %" for share, other in others)
    return f"limited by {name}, in use {100 * most:.0f} % of the time ({rest})"


def _bottleneck(diagnosis: Diagnosis | None) -> str:
    if diagnosis is None:
        return ""
    use = diagnosis.usage
    found = []
    moving = diagnosis.stages_s["transfer"]
    after = moving + diagnosis.stages_s["decode queue"] + diagnosis.stages_s["decode"]
    if use.link > BUSY or moving > SLOW * after:
        found.append(f"moving KV takes {seconds(moving)}, its busiest link is in use {100 * use.link:.0f} %")
    if use.decode_kv is not None and use.decode_kv > BUSY:
        found.append(f"its KV memory is {100 * use.decode_kv:.0f} % full")
    if diagnosis.preemptions > 0:
        found.append(f"{diagnosis.preemptions} preemptions")
    if diagnosis.refused > 0:
        found.append(f"{diagnosis.refused} requests longer than its KV memory")
    return f" ({', '.join(found)})" if found else ""
