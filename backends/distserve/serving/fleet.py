"""The instances that an orchestrator has, and which of them can take a request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from distserve.serving.link import InstanceLink
from distserve.serving.schema import LOAD_KEYS


@dataclass(frozen=True)
class Limits:
    """Tokens. ``max_total``: prompt and output of one request together."""

    max_prompt: int
    max_total: int


class Fleet:
    """Links by instance name. Choosing is by least work, nothing else."""

    def __init__(self) -> None:
        self.links: dict[str, InstanceLink] = {}
        self._avoid: dict[str, float] = {}  # full a moment ago: until when to leave it alone

    def __iter__(self) -> Iterator[InstanceLink]:
        return iter(self.links.values())

    @property
    def model_hash(self) -> str | None:
        """Of the first instance that told; others must agree."""
        return next((link.status.model_hash for link in self if link.status is not None), None)

    def usable(self, link: InstanceLink) -> bool:
        """Up, of the same model as the others, and not being drained."""
        return link.up and not link.draining and self._same_model(link)

    @property
    def prefill_ready(self) -> bool:
        return any(self.usable(link) and link.spec.role in ("prefill", "unified") for link in self)

    @property
    def decode_ready(self) -> bool:
        return any(self.usable(link) and link.spec.role in ("decode", "unified") for link in self)

    @property
    def ready(self) -> bool:
        """A request can be served to its end."""
        roles = {link.spec.role for link in self if self.usable(link)}
        return "unified" in roles or {"prefill", "decode"} <= roles

    def avoid(self, link: InstanceLink, until_s: float) -> None:
        self._avoid[link.name] = until_s

    def pick_prefill(self, known: int, total: int, now: float) -> InstanceLink | None:
        """The prefill-capable instance with the least tokens of work that can take ``known`` tokens now.

        A prompt above the free credits goes only to an instance without work, which then runs it alone.
        """
        decode = any(self._decodes(link, total) for link in self if self.usable(link))
        best: InstanceLink | None = None
        for link in self:
            if not self.usable(link) or self._avoid.get(link.name, 0.0) > now:
                continue
            if not self._prefills(link, known, total, decode):
                continue
            room = link.load.credits
            if known > room and (room <= 0 or link.load.outstanding_tokens > 0):
                continue
            if best is None or link.load.waiting_tokens < best.load.waiting_tokens:
                best = link
        return best

    def pick_decode(self, total: int, now: float) -> InstanceLink | None:
        """The least loaded decode instance on which ``total`` tokens fit."""
        best: tuple[float, InstanceLink] | None = None
        for link in self:
            if not self.usable(link) or not self._decodes(link, total):
                continue
            if self._avoid.get(link.name, 0.0) > now:
                continue
            assert link.status is not None
            running = link.load.reported.get("running", 0) + link.load.reported.get("queued", 0)
            load = max(len(link.targets), running) / max(1, link.status.max_batch_size)
            if best is None or load < best[0]:
                best = (load, link)
        return best[1] if best else None

    def limits(self) -> Limits | None:
        """What the largest instances could take, whether they are up now or not; None: none has told yet."""
        known = [link for link in self if link.status is not None and self._same_model(link)]
        sizes = {role: [_tokens(link) for link in known if link.spec.role == role] for role in _ROLES}
        unified = max(sizes["unified"], default=0)
        decode = max(sizes["decode"], default=0)
        prefill = max(sizes["prefill"], default=0)
        max_prompt = max(unified - 1, min(prefill, decode - 1))
        return Limits(max_prompt, max(unified, decode if prefill else 0)) if max_prompt > 0 else None

    def could_fit(self, known: int, total: int) -> bool:
        """Is there an instance, up or not, that could prefill this?"""
        told = [link for link in self if link.status is not None and self._same_model(link)]
        decode = any(self._decodes(link, total) for link in told)
        return any(self._prefills(link, known, total, decode) for link in told)

    def describe(self) -> list[dict[str, Any]]:
        """One entry per instance, for the `status` operation."""
        return [self._describe(link) for link in self]

    def _describe(self, link: InstanceLink) -> dict[str, Any]:
        reason = link.reason
        if link.up and not self._same_model(link):
            reason = f"model_hash differs from the other instances' {self.model_hash}"
        status = link.status
        return {
            "instance": link.name,
            "role": link.spec.role,
            "address": link.spec.address,
            "phase": link.phase,
            "usable": self.usable(link),
            "reason": reason,
            "draining": link.draining,
            "drained": link.draining and link.idle,
            "epoch": status.epoch if status else None,
            "max_context": status.max_context if status else None,
            "blocks_total": status.blocks_total if status else None,
            "block_size": status.block_size if status else None,
            "restarts": link.restarts,
            "requests": len(link.targets),
            "leases_held": len(link.leases),
            **{key: link.load.reported.get(key) for key in LOAD_KEYS},  # null: not told since its start
        }

    def _same_model(self, link: InstanceLink) -> bool:
        return link.status is None or link.status.model_hash == self.model_hash

    def _decodes(self, link: InstanceLink, total: int) -> bool:
        return link.spec.role == "decode" and _tokens(link) >= total

    def _prefills(self, link: InstanceLink, known: int, total: int, decode: bool) -> bool:
        """Could the instance, by its size, take this request? ``decode``: another could go on."""
        if link.spec.role == "unified":
            return _tokens(link) >= total
        return link.spec.role == "prefill" and decode and _tokens(link) >= known


_ROLES = ("prefill", "decode", "unified")


def _tokens(link: InstanceLink) -> int:
    return min(link.status.max_context, link.status.pool_tokens) if link.status is not None else 0
