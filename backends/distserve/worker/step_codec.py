"""Steps and their outputs as bytes, for the ranks in other processes. Small, since every step pays for it:
of a block table only what is new travels.
"""

from __future__ import annotations

from typing import Any

import msgpack

from distserve.worker.step import Joining, SamplingParams, StepInput, StepItem, StepOutput, TokenLogprobs


class StepEncoder:
    """Remembers what has been sent of every sequence; all steps must pass through the same encoder.

    A sequence's table only grows while its steps follow one another. One that begins anew elsewhere (its KV
    was dropped) is sent whole again.
    """

    def __init__(self) -> None:
        self._sent: dict[str, tuple[int, int]] = {}  # key -> (start of its next step, blocks sent)

    def encode(self, step: StepInput) -> bytes:
        for key in step.leaving:
            self._sent.pop(key, None)
        items = []
        for item in step.items:
            table = item.block_table
            start, known = self._sent.get(item.key, (0, 0))
            if start != item.start or known > len(table):
                known = 0
            items.append((item.key, item.tokens, item.start, known, table[known:], item.sample))
            self._sent[item.key] = (item.start + len(item.tokens), len(table))
        joining = [_joining_to_wire(joining) for joining in step.joining]
        packed: bytes = msgpack.packb((items, joining, step.leaving))
        return packed


class StepDecoder:
    """The other end of an encoder."""

    def __init__(self) -> None:
        self._tables: dict[str, list[int]] = {}

    def decode(self, data: bytes) -> StepInput:
        items, joining, leaving = msgpack.unpackb(data)
        for key in leaving:
            self._tables.pop(key, None)
        steps = []
        for key, tokens, start, known, new, sample in items:
            table = self._tables.setdefault(key, [])
            table[known:] = new
            steps.append(StepItem(key, tokens, start, table, sample))
        return StepInput(steps, [_joining_from_wire(wire) for wire in joining], leaving)


def encode_output(output: StepOutput) -> bytes:
    logprobs = [
        None if entry is None else (entry.chosen, entry.top_ids, entry.top_logprobs)
        for entry in output.logprobs
    ]
    packed: bytes = msgpack.packb((output.tokens, logprobs))
    return packed


def decode_output(data: bytes) -> StepOutput:
    tokens, logprobs = msgpack.unpackb(data)
    return StepOutput(
        tokens,
        [None if e is None else TokenLogprobs(e[0], tuple(e[1]), tuple(e[2])) for e in logprobs],
    )


def _joining_to_wire(joining: Joining) -> tuple[Any, ...]:
    params = joining.params
    values = {name: getattr(params, name) for name in SamplingParams.__slots__}
    # the sampler looks at the tokens only where penalties ask for them
    return joining.key, values, joining.prompt_len, joining.tokens if params.penalised else []


def _joining_from_wire(wire: Any) -> Joining:
    key, values, prompt_len, tokens = wire
    params = SamplingParams(**{**values, "end_ids": tuple(values["end_ids"])})
    return Joining(key, params, prompt_len, tokens)
