"""The instances that an orchestrator has, and which of them can take a request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from distserve.core.config import Role
from distserve.core.dispatch import choose_decode, choose_prefill
from distserve.serving.link import InstanceLink
from distserve.serving.schema import LOAD_KEYS


@dataclass(frozen=True)
class Limits:
    """Tokens. ``max_total``: prompt and output of one request together."""

    max_prompt: int
    max_total: int


@dataclass(frozen=True)
class Alone:
    """Which roles may serve a request whole while none is up that would do the other half."""

    prefill: bool = False
    decode: bool = False

    def allows(self, role: Role) -> bool:
        return role == "unified" or (role == "prefill" and self.prefill) or (role == "decode" and self.decode)


@dataclass(frozen=True)
class Choice:
    """The instance that is to compute a prompt; ``to_end``: and to decode it."""

    link: InstanceLink
    to_end: bool


class Fleet:
    """Links by instance name, and which of them can serve what."""

    def __init__(self, alone: Alone | None = None) -> None:
        self.links: dict[str, InstanceLink] = {}
        self._alone = alone or Alone()
        self._avoid: dict[str, float] = {}  # full a moment ago: until when to leave it alone

    def __iter__(self) -> Iterator[InstanceLink]:
        return iter(self.links.values())

    @property
    def model_hash(self) -> str | None:
        """Of the first instance that told; others must agree."""
        return next((link.status.model_hash for link in self if link.status is not None), None)

    def usable(self, link: InstanceLink) -> bool:
        """Up, with KV that fits the others', and not being drained."""
        return link.up and not link.draining and self._fits(link)

    def can_decode(self, total: int) -> bool:
        """A handle can be taken over by an instance that is up, if not now."""
        return any(self._usable_decode(link, total) for link in self)

    @property
    def pieces_above(self) -> int | None:
        """The shortest prompts above this length let others pass on some instance; None: on none."""
        lengths = [link.status.pieces_above for link in self if link.status is not None and self.usable(link)]
        return min((length for length in lengths if length is not None), default=None)

    @property
    def ready(self) -> bool:
        """A request can be served to its end."""
        roles = {link.spec.role for link in self if self.usable(link)}
        return {"prefill", "decode"} <= roles or any(self._alone.allows(role) for role in roles)

    def avoid(self, link: InstanceLink, until_s: float) -> None:
        self._avoid[link.name] = until_s

    def candidates(self, known: int, total: int) -> list[Choice]:
        """The usable instances that could, by their size, compute a prompt of ``known`` tokens.

        Prefill instances while another can go on, and unified ones; for want of them, what may serve alone.
        ``total``: tokens at the longest possible end.
        """
        return self._choices([link for link in self if self.usable(link)], known, total)

    def pick_prefill(self, candidates: Sequence[Choice], known: int, now: float) -> Choice | None:
        """The candidate for a prompt of ``known`` tokens, by `choose_prefill`; None: it has to wait."""
        free = [choice for choice in candidates if self._avoid.get(choice.link.name, 0.0) <= now]
        index = choose_prefill(known, (choice.link.prompt_load() for choice in free))
        return None if index is None else free[index]

    def pick_decode(self, total: int, now: float, source: str | None = None) -> InstanceLink | None:
        """The decode instance on which ``total`` tokens fit, by `choose_decode`; None: there is none now.

        Of the group of ``source``, the prefill instance, while that has a usable one.
        """
        usable = [link for link in self if self._usable_decode(link, total)]
        prefill = self.links.get(source) if source is not None else None
        if prefill is not None and prefill.spec.group is not None:
            usable = [link for link in usable if link.spec.group == prefill.spec.group] or usable
        free = [link for link in usable if self._avoid.get(link.name, 0.0) <= now]
        index = choose_decode(link.decode_load() for link in free)
        return None if index is None else free[index]

    def limits(self) -> Limits | None:
        """What the largest instances could take, whether they are up now or not; None: none has told yet."""
        known = [link for link in self if link.status is not None and self._fits(link)]
        sizes = {role: [_tokens(link) for link in known if link.spec.role == role] for role in _ROLES}
        prefill, decode = max(sizes["prefill"], default=0), max(sizes["decode"], default=0)
        alone = max(sizes["unified"], default=0)
        if not (prefill and decode):
            missing = max(decode if self._alone.decode else 0, prefill if self._alone.prefill else 0)
            alone = max(alone, missing)
        max_prompt = max(alone - 1, min(prefill, decode - 1))
        return Limits(max_prompt, max(alone, decode if prefill else 0)) if max_prompt > 0 else None

    def could_fit(self, known: int, total: int) -> bool:
        """Is there an instance, up or not, that could compute this?"""
        told = [link for link in self if link.status is not None and self._fits(link)]
        return bool(self._choices(told, known, total))

    def _usable_decode(self, link: InstanceLink, total: int) -> bool:
        return self.usable(link) and link.spec.role == "decode" and _tokens(link) >= total

    def _choices(self, links: Sequence[InstanceLink], known: int, total: int) -> list[Choice]:
        whole = [link for link in links if _tokens(link) >= total]
        choices = [Choice(link, False) for link in whole if link.spec.role == "unified"]
        if any(link.spec.role == "decode" for link in whole):
            prefills = [link for link in links if link.spec.role == "prefill" and _tokens(link) >= known]
            choices += [Choice(link, False) for link in prefills]
        return choices or [Choice(link, True) for link in whole if self._alone.allows(link.spec.role)]

    def describe(self) -> list[dict[str, Any]]:
        """One entry per instance, for the `status` operation."""
        return [self._describe(link) for link in self]

    def stats(self) -> list[dict[str, Any]]:
        """The same with all that instances tell of themselves, for metrics."""
        return [{**link.stats, **self._describe(link)} for link in self]

    def _describe(self, link: InstanceLink) -> dict[str, Any]:
        reason = link.reason
        misfit = self.misfit(link)
        if link.up and misfit is not None:
            reason = misfit
        status = link.status
        return {
            "instance": link.name,
            "role": link.spec.role,
            "address": link.spec.address,
            "phase": link.phase,
            "usable": self.usable(link),
            "reason": reason,
            "misfit": misfit is not None,
            "draining": link.draining,
            "drained": link.draining and link.idle,
            "epoch": status.epoch if status else None,
            "max_context": status.max_context if status else None,
            "blocks_total": status.blocks_total if status else None,
            "attention": status.attention if status else None,
            "block_size": status.block_size if status else None,
            "restarts": link.restarts,
            "requests": len(link.targets),
            "leases_held": len(link.leases),
            "hung_calls": link.hung_calls,
            "errors": dict(link.errors),
            **{key: link.load.reported.get(key) for key in LOAD_KEYS},  # null: not told since its start
        }

    def misfit(self, link: InstanceLink) -> str | None:
        """The field in which its KV differs from that of the first instance that told; None: it fits."""
        first = next((other for other in self if other.status is not None), None)
        if first is None or first.status is None or link.status is None:
            return None
        return first.status.layout.mismatch(link.status.layout, first.name)

    def _fits(self, link: InstanceLink) -> bool:
        return self.misfit(link) is None


_ROLES = ("prefill", "decode", "unified")


def _tokens(link: InstanceLink) -> int:
    return min(link.status.max_context, link.status.pool_tokens) if link.status is not None else 0
