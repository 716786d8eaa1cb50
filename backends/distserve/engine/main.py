"""The engine process: configuration in, `ready` out, then the loop until the stub is gone."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

from distserve.core.config import EngineConfig
from distserve.core.logs import log_to_stderr
from distserve.core.parsing import ConfigError
from distserve.serving.frames import CONTROL_CALL, pack_frame, read_frame
from distserve.serving.schema import ErrorCode, ServingError, error_reply, ok_reply
from distserve.transfer import nccl_environment

if TYPE_CHECKING:
    from distserve.engine.engine import Engine

logger = logging.getLogger(__name__)

CONFIG_TIMEOUT_S = 60.0
FLUSH_S = 2.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one engine. Status 0: asked to end (SIGTERM, stub gone); 1: failed, with the reason on stderr."""
    parser = argparse.ArgumentParser(prog="python -m distserve.engine", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="descriptor of the socket to the parent")
    fd = parser.parse_args(argv).fd
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's ^C goes to the server, which ends us in order
    nccl_environment.settle()
    sock = socket.socket(fileno=fd)
    try:
        config = _receive_config(sock)
        log_to_stderr(config.log_format, config.instance)
        # torch only now: a configuration that is refused is refused at once
        from distserve.engine.engine import Engine

        engine = Engine(config)
        signal.signal(signal.SIGTERM, lambda *_: engine.stop("SIGTERM"))
        sock.sendall(pack_frame(CONTROL_CALL, ok_reply(**engine.identity)))
    except Exception as error:
        _refuse(sock, error)
        return 1
    gc.collect()
    gc.freeze()  # weights and modules live as long as the process: later collections skip them
    return _serve(engine, sock)


def _serve(engine: Engine, sock: socket.socket) -> int:
    from distserve.worker.parallel import RankLost

    try:
        reason = engine.run(sock, FLUSH_S)
    except RankLost as error:
        logger.error("ends: %s", error)
        return 1
    except Exception:
        traceback.print_exc()
        return 1
    logger.info("ends: %s", reason)
    return 0


def _receive_config(sock: socket.socket) -> EngineConfig:
    sock.settimeout(CONFIG_TIMEOUT_S)
    frame = read_frame(sock)
    if frame is None:
        raise ConfigError("the parent closed the socket before it sent a configuration")
    call_id, payload = frame
    if call_id != CONTROL_CALL:
        raise ConfigError(f"call id {call_id}: the first frame must be {CONTROL_CALL}, the configuration")
    try:
        values = json.loads(payload)
    except ValueError as error:
        raise ConfigError(f"configuration is not JSON ({error})") from None
    return EngineConfig.load(values)


def _refuse(sock: socket.socket, error: Exception) -> None:
    """Tells the parent and stderr why there is no engine."""
    if isinstance(error, ConfigError):
        code: ErrorCode = "INVALID_ARGUMENT"
        print(f"engine: {error}", file=sys.stderr)
    else:
        code = "RESOURCE_EXHAUSTED" if _is_out_of_memory(error) else "INTERNAL"
        traceback.print_exc()
    reason = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
    try:
        sock.sendall(pack_frame(CONTROL_CALL, error_reply(ServingError(code, reason))))
    except OSError:
        logger.info("the parent is gone")


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or "out of memory" in str(error) or "can't allocate" in str(error)
