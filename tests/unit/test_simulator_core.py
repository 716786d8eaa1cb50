"""What the simulator needs of the schedulers and found missing once."""

from __future__ import annotations

from distserve.core.blocks import CountingBlocks, blocks_for
from distserve.core.decode_set import DecodeSet
from distserve.core.request import Request


def test_request_that_rejoins_with_the_same_finish_step_ends_once() -> None:
    blocks = CountingBlocks(100, 16)
    running = DecodeSet(blocks)
    request = Request("a", 8, 4, generated=1, computed=8)
    other = Request("b", 8, 9, generated=1, computed=8)
    for r in (request, other):
        blocks.allocate(r, blocks_for(8, 16))
        running.join(r)
    running.leave("a")  # preempted; recomputing it gives one token while the others make one step
    running.begin()
    running.advance()
    request.generated += 1
    request.computed = 9
    running.join(request)
    running.begin()
    assert [r.id for r in running.advance(2)] == ["a"]
