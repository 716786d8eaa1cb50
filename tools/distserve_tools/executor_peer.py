"""The other rank of `distserve bench executor`: takes plans and joins in collectives, without a model."""

from __future__ import annotations

import argparse
import socket
import sys
from dataclasses import dataclass
from typing import Any

import msgpack
import torch

from distserve.core.shapes import Shape
from distserve.worker.device import bind_device, parse_device
from distserve.worker.link import Link
from distserve.worker.parallel import ParallelGroup
from distserve.worker.process_groups import connect_groups, join_store
from distserve.worker.step import StepOutput
from distserve.worker.step_codec import StepDecoder, encode_output
from distserve.worker.wires import RankWires, connect_wires

TIMEOUT_S = 60.0
SHAPE = Shape(2, 1)


@dataclass(frozen=True)
class Sums:
    """`count` sums of [rows, width] fp32 through the group of this kind."""

    kind: str
    count: int
    rows: int
    width: int

    def run(self, groups: dict[str, ParallelGroup]) -> None:
        tensor = torch.zeros(self.rows, self.width)
        for _ in range(self.count):
            groups[self.kind].all_reduce(tensor)


def groups_of(
    rank: int, devices: list[str], wires: RankWires, store: Any, host: str
) -> dict[str, ParallelGroup]:
    """The same two ranks connected in both ways."""
    memory = connect_wires(wires, SHAPE, rank, devices, TIMEOUT_S)
    gloo = connect_groups("gloo", store, SHAPE, rank, torch.device("cpu"), TIMEOUT_S, host)
    return {"memory": memory.group, "gloo": gloo.group}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True)
    link = Link(socket.socket(fileno=parser.parse_args().fd), TIMEOUT_S)
    try:
        start = msgpack.unpackb(link.receive(TIMEOUT_S))
        bind_device(parse_device(start["devices"][1]))
        wires = RankWires.from_wire(start["wires"])
        store = join_store(start["store"], TIMEOUT_S)
        groups = groups_of(1, start["devices"], wires, store, start["store"].rpartition(":")[0])
        link.send(msgpack.packb({"ready": True}))
        decoder = StepDecoder()
        while True:
            frame = link.receive()
            message = msgpack.unpackb(frame)
            if isinstance(message, dict):
                Sums(**message).run(groups)
                continue
            step = decoder.decode(frame)
            link.send(encode_output(StepOutput([0] * len(step.items), [None] * len(step.items))))
    except EOFError:
        return 0


if __name__ == "__main__":
    sys.exit(main())
