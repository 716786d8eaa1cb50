"""One request on its way: queued, prefilling, handed over, decoding, done; from the start if it must."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, Protocol

from distserve.serving.chunk import Chunk, Final, Sink
from distserve.serving.link import InstanceLink
from distserve.serving.output_text import OutputText
from distserve.serving.params import Parameters
from distserve.serving.recovery import RECOVERY
from distserve.serving.schema import ServingError
from distserve.serving.stage_times import StageTimes
from distserve.serving.text_codec import TextCodec

State = Literal["queued", "prefilling", "handoff", "decoding", "done"]
Outcome = Literal["stop", "length", "cancelled", "error"]


class SessionHost(Protocol):
    """What a session needs of the orchestrator."""

    def now(self) -> float: ...

    def hand_over(self, session: Session) -> None:
        """Find a decode instance for a session in state handoff."""

    def continue_elsewhere(self, session: Session, error: ServingError) -> None:
        """The session has lost its instance: queue it again, or fail it."""

    def unreachable(self, link: InstanceLink) -> None:
        """A submit did not get there, although the link may not have noticed yet."""

    def wait_for_room(self, session: Session, link: InstanceLink) -> None:
        """The instance is full: queue the session again, and leave the instance alone for a moment."""

    def ended(self, session: Session, outcome: Outcome, error: ServingError | None) -> None:
        """The final response is out."""


class Session:
    """State machine of one request. All methods run on the event loop.

    Whatever happens, `finish`, `fail` or `cancel` answer the client exactly once.
    """

    def __init__(
        self,
        host: SessionHost,
        number: int,
        prompt: Sequence[int],
        max_tokens: int,
        params: Parameters,
        seed: int,
        codec: TextCodec,
        sink: Sink,
        arrival_s: float,
        deadline_s: float,
        due_s: float,
        id_prefix: str,
        client_id: str = "",
        cancel_key: str = "",
    ) -> None:
        self.number = number  # in order of arrival
        self.id = f"{id_prefix}{number}"
        self.client_id = client_id
        self.cancel_key = cancel_key
        self.prompt = list(prompt)
        self.output: list[int] = []
        self.max_tokens = max_tokens
        self.params = params
        self.state: State = "queued"
        self.priority = params.priority
        self.deadline_s = deadline_s  # of the last token
        self.due_s = min(due_s, deadline_s)  # of the first one
        self.last_sign_s = arrival_s
        self.recoveries = 0
        self.times = StageTimes(arrival_s)
        self.instances: dict[str, str] = {}  # role -> instance of the last attempt
        self.link: InstanceLink | None = None
        self._host, self._sink = host, sink
        self._sampling = params.to_wire(seed)
        self._wants_logprobs = params.wanted_logprobs is not None
        self._text = OutputText(codec, params, prompt)
        self._chunk = Chunk(prompt_tokens=len(self.prompt))
        self._ending: Literal["stop", "length"] | None = None
        self._stopped_by_string = False
        self._attempt = 0
        self._wire_id = ""
        self._handle: dict[str, Any] | None = None
        self._lease_link: InstanceLink | None = None
        self._started = False  # decoding, in this attempt
        self._paced_s = 0.0  # when tokens came last in this attempt, and how many have come with this reply
        self._paced_tokens = 0
        self._to_end = False  # one instance is to do all, in this attempt

    @property
    def has_handle(self) -> bool:
        """Its KV waits at a prefill instance."""
        return self._handle is not None

    @property
    def known_tokens(self) -> int:
        """Tokens to prefill now: the prompt, and the output so far of a continued request."""
        return len(self.prompt) + len(self.output)

    @property
    def total_tokens(self) -> int:
        """Tokens at the longest possible end."""
        return len(self.prompt) + self.max_tokens

    @property
    def certain_tokens(self) -> int:
        """Tokens that the output will have at least, if it comes to its end."""
        params = self.params
        until_length = params.ignore_eos and not params.stop and not params.stop_token_ids
        return self.max_tokens if until_length else max(1, params.min_tokens)

    def start_prefill(self, link: InstanceLink, to_end: bool = False) -> None:
        """Submit to an instance that computes the prompt; ``to_end``: and the output, whatever its role."""
        self._attempt += 1
        self._wire_id = f"{self.id}.{self._attempt}"
        self._started, self._paced_s = False, 0.0
        self.state, self.link = "prefilling", link
        self.last_sign_s = self._host.now()
        self.instances = {"prefill": link.name}
        self._to_end = to_end
        request = self._request()
        request["due_s"] = max(0.0, self.due_s - self._host.now())
        if self.priority:
            request["priority"] = self.priority
        if to_end:
            request["to_end"] = True
        link.submit(request, self, self.known_tokens)

    def start_decode(self, link: InstanceLink) -> None:
        """Submit the handle to a decode instance."""
        self.state, self.link = "decoding", link
        self.last_sign_s = self._host.now()
        self.instances["decode"] = link.name
        link.submit({**self._request(), "handle": self._handle}, self, 0)

    def _request(self) -> dict[str, Any]:
        return {
            "id": self._wire_id,
            "prompt": self.prompt,
            "output": self.output,
            "max_tokens": self.max_tokens,
            "sampling": self._sampling,
            "deadline_s": max(0.0, self.deadline_s - self._host.now()),
        }

    # events of the instance

    def on_event(self, link: InstanceLink, event: dict[str, Any]) -> None:
        now = self.last_sign_s = self._host.now()
        kind = event["type"]
        if kind == "token":
            self._on_started(now, event)
            self._paced_tokens += len(event["tokens"])
            self._accept(now, event["tokens"], event.get("logprobs"))
        elif kind == "prefilled":
            self._on_prefilled(link, now, event)
        elif kind == "started":
            self._on_started(now, event)
        elif kind == "finished" and self._ending is None:
            self._on_finished(link, event)

    def on_events_end(self) -> None:
        if self.state == "done":
            return
        if self._paced_tokens:
            self._tell_pace()
        if self._ending is not None:
            self._finish(self._ending)
        elif self.params.stream and self._chunk.ids:
            self._send()

    def _tell_pace(self) -> None:
        now, link = self.last_sign_s, self.link
        if self._paced_s and link is not None:
            link.load.decode_pace.note(now, len(link.targets), (now - self._paced_s) / self._paced_tokens)
        self._paced_s, self._paced_tokens = now, 0

    def on_refused(self, link: InstanceLink, error: ServingError) -> None:
        self.link = None
        if RECOVERY[error.code] == "wait":
            self._leave_stage()
            self._host.wait_for_room(self, link)
        else:
            if error.code == "UNAVAILABLE":
                self._host.unreachable(link)
            self._broken(error)

    def on_lost(self, link: InstanceLink, error: ServingError) -> None:
        self.link = None
        self._broken(error)

    def _on_prefilled(self, link: InstanceLink, now: float, event: dict[str, Any]) -> None:
        link.work_done(self._wire_id)
        self.times.prefilled(now, float(event.get("prefill_s", 0.0)))
        self._handle = event.get("handle")
        if self._handle is not None:
            link.hold_lease(self._wire_id)
            self._lease_link = link
        logprob = event.get("logprob")
        self._accept(now, [event["token"]], [logprob] if logprob is not None else None)
        reason = event.get("finished")
        if reason is not None:
            self._ending = self._ending or ("length" if reason == "length" else "stop")
        if reason is not None or self._handle is not None:  # this instance has done its part
            link.forget(self._wire_id)
            self.link = None
        if self._ending is not None:
            return
        if self._handle is not None:
            self.state = "handoff"
            self._host.hand_over(self)
        elif self._to_end or link.spec.role != "prefill":
            self.state = "decoding"
            self._on_started(now, {})
        else:
            self._broken(ServingError("INTERNAL", f"{link.name}: prefilled without a handle"))

    def _on_started(self, now: float, event: dict[str, Any]) -> None:
        if self._started:
            return
        self._started = True
        self.times.started(now, float(event.get("transfer_s", 0.0)))
        if self._lease_link is not None:
            self._lease_link.lease_ended(self._wire_id)
            self._lease_link = None

    def _on_finished(self, link: InstanceLink, event: dict[str, Any]) -> None:
        reason = event.get("reason")
        link.forget(self._wire_id)
        self.link = None
        if reason in ("stop", "length"):
            self._ending = reason
        elif event.get("error"):
            self._broken(ServingError.from_wire(event["error"]))
        else:
            self._broken(ServingError("UNAVAILABLE", f"{link.name}: ended the request: {reason}"))

    def _accept(self, now: float, tokens: list[int], logprobs: list[dict[str, Any]] | None) -> None:
        if self._ending is not None or self.state == "done":
            return
        self.times.token(now)
        chunk = self._chunk
        for i, token in enumerate(tokens):
            self.output.append(token)
            chunk.ids.append(token)
            if self._wants_logprobs:
                entry = logprobs[i] if logprobs is not None else {"logprob": math.nan}
                chunk.logprobs.append(entry)
                chunk.cumulative_logprob += entry["logprob"]
            text, stopped = self._text.push(token)
            chunk.text += text
            if stopped:  # tokens after a stop string don't count
                self._ending = "stop"
                self._stopped_by_string = True
                return

    # ends

    def _send(self) -> None:
        chunk, self._chunk = (
            self._chunk,
            Chunk(cumulative_logprob=self._chunk.cumulative_logprob, prompt_tokens=len(self.prompt)),
        )
        self._sink.send(chunk)

    def _finish(self, reason: Literal["stop", "length"]) -> None:
        self.times.decoded(self._host.now())
        if not self._stopped_by_string:
            self._chunk.text += self._text.flush()
        self._leave_instances()
        self.state = "done"
        self._chunk.final = Final(reason, len(self.prompt), len(self.output), self._summary())
        self._send()
        self._host.ended(self, reason, None)

    def _summary(self) -> dict[str, Any]:
        return {
            **self.times.summary(len(self.output)),
            "recoveries": self.recoveries,
            **{f"{role}_instance": name for role, name in self.instances.items()},
        }

    def fail(self, error: ServingError) -> None:
        """End with an error, stopping the work wherever it is."""
        if self.state == "done":
            return
        self._leave_instances()
        self.state = "done"
        self._sink.fail(error)
        self._host.ended(self, "cancelled" if error.code == "CANCELLED" else "error", error)

    def too_late(self, now: float) -> ServingError:
        """The error of a request whose deadline has come."""
        return ServingError(
            "DEADLINE_EXCEEDED",
            f"no end {now - self.times.arrival_s:.1f} s after its arrival, which is the time it had "
            f"({self.state}, {len(self.output)} of at most {self.max_tokens} tokens)",
        )

    def start_over(self) -> None:
        """From state handoff back to before prefill: nobody is going to take its KV over."""
        self._leave_stage()
        self._leave_instances()
        self._handle = None

    def abandon_stage(self, error: ServingError) -> None:
        """Stop what the current instance does for the request, and continue elsewhere."""
        if self.state != "done":
            self._leave_instances()
            self._broken(error)

    def _leave_instances(self) -> None:
        if self.link is not None:
            self.link.cancel(self._wire_id)
            self.link = None
        if self._lease_link is not None:
            self._lease_link.release(self._wire_id)
            self._lease_link = None

    def _broken(self, error: ServingError) -> None:
        """This attempt is over. What the client has, stays; the rest comes from another attempt."""
        if self.state == "done":
            return
        self._leave_stage()
        if RECOVERY[error.code] == "final":
            late = error.code == "DEADLINE_EXCEEDED"
            self.fail(self.too_late(self._host.now()) if late else error)
            return
        self._leave_instances()
        self._handle = None
        self._host.continue_elsewhere(self, error)

    def _leave_stage(self) -> None:
        """Book the time up to now on the stage that has not come to its end."""
        now = self._host.now()
        if self.state == "prefilling":
            self.times.lost_in_prefill(now)
        elif self._started:
            self.times.decoded(now)
        else:
            self.times.lost_before_decode(now)
