"""Steps arrive at other ranks as they were, and only what is new of a block table travels."""

from __future__ import annotations

import copy
import random
import socket

import msgpack
import pytest

from distserve.worker.link import Link
from distserve.worker.step import Joining, SamplingParams, StepInput, StepItem, StepOutput, TokenLogprobs
from distserve.worker.step_codec import StepDecoder, StepEncoder, decode_output, encode_output


class Sequences:
    """Random steps as the engine makes them: chunks, decode tokens, preemption, ends."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.at: dict[str, int] = {}
        self.tables: dict[str, list[int]] = {}
        self.count = 0

    def step(self) -> StepInput:
        joining, leaving, items = [], [], []
        if self.rng.random() < 0.5:
            self.count += 1
            key = str(self.count)
            params = SamplingParams(temperature=0.5, end_ids=(3, 4), presence_penalty=0.5)
            joining.append(Joining(key, params, 3, [1, 2, 3]))
            self.at[key], self.tables[key] = 0, []
        for key in list(self.at):
            if self.rng.random() < 0.1:
                leaving.append(key)
                del self.at[key], self.tables[key]
            elif self.rng.random() < 0.2 and not any(j.key == key for j in joining):  # preempted
                self.at[key], self.tables[key] = 0, []
        for key, at in self.at.items():
            if self.rng.random() < 0.3:
                continue
            count = self.rng.choice((1, 1, 1, 7, 20))
            table = self.tables[key]
            while len(table) * 4 < at + count:
                table.append(self.rng.randrange(1000))
            items.append(StepItem(key, [9] * count, at, table, self.rng.random() < 0.8))
            self.at[key] += count
        return StepInput(items, [j for j in joining if j.key in self.at], leaving)


@pytest.mark.parametrize("seed", range(20))
def test_steps_arrive_as_they_were(seed: int) -> None:
    sequences, encoder, decoder = Sequences(seed), StepEncoder(), StepDecoder()
    for _ in range(60):
        step = copy.deepcopy(sequences.step())
        assert decoder.decode(encoder.encode(step)) == step


def test_a_decode_step_does_not_repeat_the_tables() -> None:
    encoder, table = StepEncoder(), list(range(10_000))
    first = encoder.encode(StepInput([StepItem("a", [1] * 9, 0, table)]))
    table.append(7)
    second = encoder.encode(StepInput([StepItem("a", [1], 9, table)]))
    assert len(first) > 10_000
    assert len(second) < 32
    assert msgpack.unpackb(second)[0][0][4] == [7]


def test_prompts_travel_twice_only_where_penalties_ask_for_them() -> None:
    tokens = list(range(1000, 2000))
    plain, penalised = (
        StepEncoder().encode(StepInput([], [Joining("a", params, 1000, tokens)]))
        for params in (SamplingParams(), SamplingParams(repetition_penalty=1.1))
    )
    assert len(plain) < 400 < 3000 < len(penalised)


def test_outputs_arrive_as_they_were() -> None:
    output = StepOutput([5, 6], [None, TokenLogprobs(-0.5, (6, 7), (-0.5, -1.5))])
    assert decode_output(encode_output(output)) == output


def test_frames_of_any_size_and_the_end() -> None:
    ours, theirs = socket.socketpair()
    a, b = Link(ours, 5.0), Link(theirs, 5.0)
    for size in (0, 1, 3, 100_000):
        a.send(bytes(size))
    assert [len(b.receive(5.0)) for _ in range(4)] == [0, 1, 3, 100_000]
    with pytest.raises(TimeoutError):
        b.receive(0.01)
    a.end()
    with pytest.raises(EOFError):
        b.receive()
    with pytest.raises(OSError, match="Broken pipe"):
        a.send(b"late")
    a.close()
    b.close()


def test_a_reader_that_does_not_read_ends_the_send() -> None:
    ours, theirs = socket.socketpair()
    link = Link(ours, 0.2)
    with theirs, pytest.raises(OSError, match="unavailable"):
        link.send(bytes(1 << 24))
    link.close()
