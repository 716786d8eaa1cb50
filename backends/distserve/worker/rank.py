"""`python -m distserve.worker.rank`: one further rank of an instance.

The leader (rank 0) says over the first of two connections what to load; after that come steps, until it ends
the connection. All that takes part in the transfer of KV happens in a second thread, over the second one. On
the leader's host both are inherited (`--fd`), on other hosts they are opened from here (`--leader`).
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NoReturn

import msgpack

from distserve.core.config import EngineConfig
from distserve.core.logs import log_to_stderr
from distserve.core.model_config import ModelConfig, resolve_model
from distserve.core.parsing import ConfigError
from distserve.core.secret_file import shared_secret
from distserve.core.shapes import Shape
from distserve.transfer import nccl_environment
from distserve.transfer.errors import TransferError
from distserve.worker.link import Link
from distserve.worker.parallel import RankLinks, RankLost
from distserve.worker.remote_ranks import come_to
from distserve.worker.sharing import sharers
from distserve.worker.step_codec import StepDecoder, encode_output

if TYPE_CHECKING:
    from distserve.transfer.agent import RankAgent

logger = logging.getLogger(__name__)

END_S = 5.0
START_S = 600.0  # for the leader to load its own slice, and as long for the others


def main(argv: Sequence[str] | None = None) -> int:
    """Status 0: the leader has ended the connection; 1: failed, the leader knows why."""
    parser = argparse.ArgumentParser(prog="python -m distserve.worker.rank", description=__doc__)
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--fd", type=int, nargs=2, help="descriptors of the sockets to the leader")
    way.add_argument("--leader", metavar="HOST:PORT")
    parser.add_argument("--visit", default="", help="with --leader: what it calls this start")
    parser.add_argument("--rank", type=int, default=0, help="with --leader")
    parser.add_argument("--secret-file", help="with --leader")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's ^C goes to the server, which ends us in order
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the leader, which gets it as well, ends us in order
    nccl_environment.settle()
    try:
        steps, side = _links(args)
    except (ConfigError, TransferError, OSError, ValueError) as error:
        print(f"rank {args.rank}: leader {args.leader}: {error}", file=sys.stderr)
        return 1
    with ExitStack() as at_end:  # after the reason is told
        try:
            _serve(steps, side, msgpack.unpackb(steps.receive(START_S)), at_end)
        except EOFError:
            return 0
        except RankLost as error:  # the leader finds out by itself which rank was the first
            print(f"rank: {error}", file=sys.stderr)
        except Exception as error:
            refused = isinstance(error, ConfigError)
            if not refused:
                traceback.print_exc()
            _tell(steps, {"error": f"{type(error).__name__}: {error}", "config": refused})
    return 1


def _links(args: argparse.Namespace) -> tuple[Link, Link]:
    if args.fd is not None:
        steps, side = (Link(socket.socket(fileno=fd), START_S) for fd in args.fd)
        return steps, side
    links = come_to(args.leader, args.visit, args.rank, shared_secret(args.secret_file), START_S)
    return links["steps"], links["side"]


def _serve(steps: Link, side: Link, start: dict[str, Any], at_end: ExitStack) -> NoReturn:
    config, rank = EngineConfig.load(json.loads(start["config"])), int(start["rank"])
    log_to_stderr(config.log_format, f"{config.instance}/{rank}")
    from distserve.transfer.agent import RankAgent
    from distserve.worker.device import bind_device, parse_device
    from distserve.worker.runner import ModelRunner

    bind_device(parse_device(config.devices[rank]))
    side.limit(config.rank_timeout_s)
    links = _connect(config, rank, start, side)
    runner = ModelRunner(config, ModelConfig.load(resolve_model(config.model)), links)
    steps.send(msgpack.packb({"loaded": rank}))
    steps.receive(START_S)  # all ranks have loaded: what is free now can be shared
    blocks = runner.affordable_blocks(sharers(config, rank))
    steps.send(msgpack.packb({"blocks": blocks}))
    runner.allocate(msgpack.unpackb(steps.receive(START_S))["blocks"])
    steps.send(msgpack.packb({"pid": os.getpid()}))
    secret = shared_secret(config.transfer_secret_file)
    agent = RankAgent(runner.kv_cache, side, links.shape, rank, config.host_of(rank), secret)
    thread = threading.Thread(target=_attend, args=(agent,), name="rank-agent", daemon=True)
    thread.start()
    at_end.callback(thread.join, 2.0)
    at_end.callback(agent.stop)
    gc.collect()
    gc.freeze()  # weights and modules live as long as the process: later collections skip them
    decoder = StepDecoder()
    while True:
        output = runner.execute(decoder.decode(steps.receive()))  # the leader's end ends this wait
        if output is not None:
            steps.send(encode_output(output))


def _attend(agent: RankAgent) -> None:
    agent.run()
    # the leader is gone: nothing else ends a main thread that waits for another rank
    last = threading.Timer(END_S, os._exit, (1,))
    last.daemon = True
    last.start()


def _connect(config: EngineConfig, rank: int, start: dict[str, Any], side: Link) -> RankLinks:
    from distserve.worker.device import parse_device
    from distserve.worker.link_store import RankStore
    from distserve.worker.process_groups import connect_groups, join_store
    from distserve.worker.wires import RankWires, connect_wires

    shape = Shape(config.tp, config.pp)
    if start["wires"] is not None:
        wires = RankWires.from_wire(start["wires"])
        return connect_wires(wires, shape, rank, config.devices, config.rank_timeout_s)
    device = parse_device(config.devices[rank]).torch_device
    kind = "nccl" if device.type == "cuda" else "gloo"
    limit_s = config.rank_timeout_s
    if start["store"] is not None:
        store, host = join_store(start["store"], limit_s), start["store"].rpartition(":")[0]
        return connect_groups(kind, store, shape, rank, device, limit_s, host, config.pipe_messages)
    over_side = RankStore(side, limit_s)
    place = (shape, rank, device, limit_s, config.host_of(rank), config.pipe_messages)
    found = connect_groups(kind, over_side, *place)
    over_side.close()
    return found


def _tell(steps: Link, message: dict[str, Any]) -> None:
    try:
        steps.send(msgpack.packb(message))
    except OSError:
        logger.info("the leader is gone")


if __name__ == "__main__":
    sys.exit(main())
