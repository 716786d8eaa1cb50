"""An executor over tp x pp ranks: rank 0 in this process, each further one in a process of its own."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgpack

from distserve.core.config import DTYPE_BYTES, EngineConfig
from distserve.core.model_config import ModelConfig
from distserve.core.parsing import ConfigError
from distserve.core.secret_file import shared_secret
from distserve.core.shapes import Shape, head_range, layer_range, query_head_range
from distserve.worker.device import parse_device
from distserve.worker.memory_group import pipe_bytes
from distserve.worker.parallel import RankLinks, RankLost
from distserve.worker.rank import START_S
from distserve.worker.rank_processes import (
    END_S,
    RankProcess,
    RankWatch,
    end_ranks,
    spawn_rank,
    start_rank,
)
from distserve.worker.runner import ModelRunner
from distserve.worker.sharing import sharers
from distserve.worker.step import StepInput, StepOutput
from distserve.worker.step_codec import StepEncoder, decode_output
from distserve.worker.wires import close_wires, connect_wires, lay_wires

logger = logging.getLogger(__name__)

LONGEST_PIPE_BYTES = 64 << 20
STUCK_S = 2.0  # for a step to end whose other ranks are lost

SideListener = Callable[[int, dict[str, Any]], None]


class RankExecutor:
    """See `Executor`. Rank 0 computes its share inside `submit`; the last stage's tokens come by `collect`.

    The plan of a step goes to all ranks before rank 0 begins with it. While later stages work on one step,
    rank 0 can begin with the next: `depth` steps keep all stages busy.
    """

    def __init__(self, config: EngineConfig, model: ModelConfig) -> None:
        check_degrees(config, model)
        self._shape = Shape(config.tp, config.pp)
        self.depth = config.pp
        self.lag = 0  # the other ranks learn the tokens from the next step
        self.count = self._shape.ranks
        self._timeout_s = config.rank_timeout_s
        self._encoder = StepEncoder()
        self._outputs: deque[StepOutput] = deque()
        self._began: deque[float] = deque()  # of the steps in flight
        self._changed = threading.Condition()
        self._lost: RankLost | None = None
        self._closed = threading.Event()
        self._on_news: Callable[[], None] = lambda: None
        self._on_side: SideListener = lambda rank, message: None
        self._on_gpu = parse_device(config.devices[0]).kind == "cuda"
        self._over_nodes = bool(config.remote_ranks)
        self._outside = threading.Event()  # not within a step
        self._outside.set()
        self.ranks: list[RankProcess] = []
        try:
            self._runner = self._start(config, model)
        except BaseException:
            end_ranks(self.ranks)
            raise
        self.kv_cache = self._runner.kv_cache
        self.num_blocks = self.kv_cache.num_blocks
        self.attention = self._runner.attention_name
        self._watch = RankWatch(
            self.ranks, self._timeout_s, self._take_output, self._take_side, self._take_loss
        )

    def listen(self, on_news: Callable[[], None]) -> None:
        self._on_news = on_news

    def listen_side(self, on_message: SideListener) -> None:
        """Who gets what the ranks' agents send, in the watching thread."""
        self._on_side = on_message

    def send_side(self, rank: int, message: dict[str, Any]) -> None:
        """To the agent of rank 1 or higher. What cannot be sent ends the rank, which `collect` then says."""
        try:
            self.ranks[rank - 1].side.send(msgpack.packb(message))
        except OSError:
            self.ranks[rank - 1].side.end()  # half a message may be out: wakes the watching thread

    def submit(self, step: StepInput) -> None:
        self._check()
        plan = self._encoder.encode(step)
        for rank in self.ranks:
            try:
                rank.steps.send(plan)
            except OSError as error:
                raise self._failure(f"rank {rank.rank} is gone ({error})") from None
        self._began.append(time.monotonic())
        self._outside.clear()
        try:
            output = self._runner.execute(step)
        except Exception as error:
            # the other ranks wait for this one by now, or will at the next step
            raise self._failure(f"rank 0: {type(error).__name__}: {error}") from error
        finally:
            self._outside.set()
        if output is not None:
            self._outputs.append(output)

    def collect(self, wait_s: float = 0.0) -> StepOutput | None:
        with self._changed:
            if wait_s > 0 and not self._outputs:
                self._changed.wait_for(lambda: self._outputs or self._lost is not None, wait_s)
            if self._outputs:
                self._began.popleft()
                return self._outputs.popleft()
        self._check()
        return None

    def execute(self, step: StepInput) -> StepOutput:
        self.submit(step)
        while (output := self.collect(self._timeout_s)) is None:
            pass  # `collect` raises once the step is overdue
        return output

    def close(self) -> None:
        self._closed.set()
        self._watch.close()

    def _check(self) -> None:
        if self._lost is None and self._began and time.monotonic() - self._began[0] > self._timeout_s:
            self._lost = RankLost(f"a step has not ended within rank_timeout_s={self._timeout_s:g}")
        if self._lost is not None:
            raise RankLost(str(self._lost))

    def _failure(self, what: str) -> RankLost:
        """The first reason, which another thread may be about to learn."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None, 0.2)
            self._lost = self._lost or RankLost(what)
            return RankLost(str(self._lost))

    # -- in the watching thread

    def _take_output(self, rank: int, frame: bytes) -> None:
        message = msgpack.unpackb(frame)
        if isinstance(message, dict):
            raise RankLost(f"rank {rank}: {message['error']}")
        with self._changed:
            self._outputs.append(decode_output(frame))
            self._changed.notify()
        self._on_news()

    def _take_side(self, rank: int, frame: bytes) -> None:
        self._on_side(rank, msgpack.unpackb(frame))

    def _take_loss(self, error: RankLost) -> None:
        logger.error("%s", error)
        with self._changed:
            self._lost = self._lost or error
            self._changed.notify()
        self._on_side(0, {"op": "lost", "why": str(error)})
        self._on_news()
        # a wait for a GPU that waits for the dead rank's cannot be ended otherwise
        if self._on_gpu and not self._closed.wait(2 * END_S):
            os._exit(1)
        # nor can Gloo's for a host that has fallen silent
        if self._over_nodes and not self._outside.wait(STUCK_S):
            os._exit(1)

    # -- start

    def _start(self, config: EngineConfig, model: ModelConfig) -> ModelRunner:
        """Spawns the ranks, loads rank 0's slice meanwhile, and settles the size of the pool."""
        links = self._connect(config, model)
        runner = ModelRunner(config, model, links)
        self._gather("loaded")
        self._broadcast({})
        affordable = runner.affordable_blocks(sharers(config, 0))
        blocks = min([affordable, *self._gather("blocks")])
        self._broadcast({"blocks": blocks})
        runner.allocate(blocks)
        self._gather("pid")
        return runner

    def _connect(self, config: EngineConfig, model: ModelConfig) -> RankLinks:
        if self._over_nodes:
            return self._connect_nodes(config)
        if collectives_of(config) == "memory":
            wires = lay_wires(self._shape, _pipe_bytes(config, model))
            try:
                for rank in range(1, self._shape.ranks):
                    self.ranks.append(spawn_rank(config, rank, wires[rank]))
                    start_rank(self.ranks[-1], config, wires=wires[rank])
            finally:
                close_wires(wires[1:])
            return connect_wires(wires[0], self._shape, 0, config.devices, self._timeout_s)
        from distserve.worker.process_groups import connect_groups, listening_store

        store, address = listening_store("127.0.0.1", self._timeout_s)
        for rank in range(1, self._shape.ranks):
            self.ranks.append(spawn_rank(config, rank))
            start_rank(self.ranks[-1], config, store=address)
        device = parse_device(config.devices[0]).torch_device
        kind, host = collectives_of(config), address.rpartition(":")[0]
        place = (self._shape, 0, device, self._timeout_s, host, config.pipe_messages)
        return connect_groups(kind, store, *place)

    def _connect_nodes(self, config: EngineConfig) -> RankLinks:
        """Ranks on several nodes; they find one another over their side links."""
        from distserve.worker.link_store import LeaderStore, Serving, Values
        from distserve.worker.process_groups import connect_groups
        from distserve.worker.remote_ranks import call_ranks

        come = call_ranks(config, shared_secret(config.transfer_secret_file))
        found = [
            RankProcess(rank, None, links["steps"], links["side"], server) for rank, server, links in come
        ]
        self.ranks = found  # for whoever has to close them
        servers = config.rank_servers or ()
        found += [spawn_rank(config, rank) for rank in range(1, self._shape.ranks) if not servers[rank]]
        self.ranks = sorted(found, key=lambda rank: rank.rank)
        for rank in self.ranks:
            try:
                start_rank(rank, config)
            except OSError:
                raise RankLost(f"rank {rank.rank} {rank.ending()}") from None
        values = Values(self._timeout_s)
        serving = Serving(values, [(rank.rank, rank.side) for rank in self.ranks], self._timeout_s)
        device = parse_device(config.devices[0]).torch_device
        place = (self._shape, 0, device, self._timeout_s, config.host_of(0), config.pipe_messages)
        try:
            links = connect_groups(collectives_of(config), LeaderStore(values), *place)
            serving.join()
        except RankLost as error:
            raise self._own_words() or error from None
        return links

    def _own_words(self) -> Exception | None:
        """What a rank that has failed to start says of it."""
        for rank in self.ranks:
            try:
                message = msgpack.unpackb(rank.steps.receive(0.1))
            except (EOFError, TimeoutError):
                continue
            if "error" in message:
                return _refusal(rank, message)
        return None

    def _gather(self, key: str) -> list[Any]:
        return [_answer(rank, key) for rank in self.ranks]

    def _broadcast(self, message: dict[str, Any]) -> None:
        for rank in self.ranks:
            try:
                rank.steps.send(msgpack.packb(message))
            except OSError:
                raise RankLost(f"rank {rank.rank} {rank.ending()}") from None


def collectives_of(config: EngineConfig) -> str:
    """ "memory", "gloo" or "nccl"."""
    if parse_device(config.devices[0]).kind == "cuda":
        return "nccl"
    return config.collectives or ("gloo" if config.remote_ranks else "memory")


def check_degrees(config: EngineConfig, model: ModelConfig) -> None:
    """Raises `ConfigError` for degrees that the model does not allow, naming those that it does, and for
    devices of several kinds.
    """
    layer_range(model.num_layers, config.pp, 0)
    head_range(model.num_kv_heads, config.tp, 0)
    query_head_range(model.num_heads, model.num_kv_heads, config.tp, 0)
    if len({parse_device(name).kind for name in config.devices}) > 1:
        raise ConfigError(f"devices={list(config.devices)}: must be of one kind")


def _pipe_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Room for a batch of the usual size, and smaller ones behind it, on their way to the next stage."""
    rows = max(config.max_batch_tokens, config.max_batch_size)
    batch = rows * model.hidden_size * DTYPE_BYTES[config.dtype]
    return pipe_bytes(min(LONGEST_PIPE_BYTES, batch), config.pipe_messages)


def _answer(rank: RankProcess, key: str) -> Any:
    """One answer of a rank that starts. Raises `ConfigError` or `RankLost` with the rank's own words."""
    try:
        message = msgpack.unpackb(rank.steps.receive(START_S))
    except EOFError:
        raise RankLost(f"rank {rank.rank} {rank.ending()}") from None
    except TimeoutError:
        raise RankLost(f"rank {rank.rank} was not ready after {START_S:g} s") from None
    if "error" in message:
        raise _refusal(rank, message)
    return message[key]


def _refusal(rank: RankProcess, message: dict[str, Any]) -> Exception:
    error = ConfigError if message["config"] else RankLost
    return error(f"rank {rank.rank}: {message['error']}")
