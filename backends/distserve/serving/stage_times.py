"""The five stages of a request as the orchestrator measures them; they sum to the end-to-end time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StageTimes:
    """Seconds per stage, from ``arrival_s`` on.

    The orchestrator's clock marks the borders between what instances do; within prefill queue + prefill and
    decode queue + transfer the instances' own durations divide. A request that is continued after a failure
    goes through stages again, and their times add up.
    """

    arrival_s: float
    prefill_queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_queue_s: float = 0.0
    transfer_s: float = 0.0
    decode_s: float = 0.0
    first_token_s: float = 0.0  # clock
    last_token_s: float = 0.0  # clock
    _mark_s: float = -1.0

    def prefilled(self, now: float, prefill_s: float) -> None:
        """A prompt is computed, which took the instance ``prefill_s``."""
        elapsed = self._since_mark(now)
        computing = min(max(prefill_s, 0.0), elapsed)
        self.prefill_s += computing
        self.prefill_queue_s += elapsed - computing

    def started(self, now: float, transfer_s: float) -> None:
        """The KV is where decoding begins; moving it took ``transfer_s``."""
        elapsed = self._since_mark(now)
        moving = min(max(transfer_s, 0.0), elapsed)
        self.transfer_s += moving
        self.decode_queue_s += elapsed - moving

    def decoded(self, now: float) -> None:
        """Decoding has ended, by a finish or a failure."""
        self.decode_s += self._since_mark(now)

    def lost_in_prefill(self, now: float) -> None:
        self.prefill_queue_s += self._since_mark(now)

    def lost_before_decode(self, now: float) -> None:
        self.decode_queue_s += self._since_mark(now)

    def token(self, now: float) -> None:
        if not self.first_token_s:
            self.first_token_s = now
        self.last_token_s = now

    def summary(self, tokens: int) -> dict[str, float]:
        """The last message's ``stage_times``; ``tpot_s`` is 0 for a single token."""
        end_s = self._mark_s if self._mark_s >= 0 else self.arrival_s
        decoding = self.last_token_s - self.first_token_s
        return {
            "prefill_queue_s": self.prefill_queue_s,
            "prefill_s": self.prefill_s,
            "transfer_s": self.transfer_s,
            "decode_queue_s": self.decode_queue_s,
            "decode_s": self.decode_s,
            "e2e_s": end_s - self.arrival_s,
            "ttft_s": self.first_token_s - self.arrival_s if self.first_token_s else 0.0,
            "tpot_s": decoding / (tokens - 1) if tokens > 1 else 0.0,
        }

    def _since_mark(self, now: float) -> float:
        begin = self._mark_s if self._mark_s >= 0 else self.arrival_s
        self._mark_s = now
        return max(0.0, now - begin)
