"""The Triton model of an instance: hands each message to the engine process, and its answer back.

Not decoupled: `execute` returns at once and every reply comes later, from the thread that reads the
engine's socket. The engine is a child process, so a crash of it fails the calls in flight within
milliseconds and takes neither the stub nor the server with it.
"""

from __future__ import annotations

import functools
import gc
import json
import logging
import os
from typing import Any, Protocol

import numpy as np
import triton_python_backend_utils as pb_utils

from distserve.core.config import EngineConfig
from distserve.core.logs import log_package_to_stderr
from distserve.serving.access import Access
from distserve.serving.orchestrator_config import model_parameter
from distserve.serving.parent_watch import end_with_parent
from distserve.serving.schema import STAGE_INPUTS, STAGE_OUTPUTS, ServingError, error_reply
from distserve.serving.supervisor import Reply, Supervisor

MODEL_PARAMETER = "engine"
_MESSAGE, _REPLY = STAGE_INPUTS[0].name, STAGE_OUTPUTS[0].name
_LOG = logging.getLogger(__name__)


class Answering(Protocol):
    """What is behind a model of this kind: an engine's `Supervisor`, or a `RankHost`."""

    def start(self) -> None: ...

    def call(self, payload: bytes, reply: Reply) -> None: ...

    def stop(self) -> None: ...


class TritonPythonModel:
    """One instance, see module."""

    def initialize(self, args: dict[str, str]) -> None:
        """Starts the engine; raises with the engine's own reason if it can't serve."""
        parameters = json.loads(args["model_config"]).get("parameters")
        text = model_parameter(parameters, MODEL_PARAMETER)
        config = EngineConfig.load(json.loads(text), MODEL_PARAMETER)
        log_package_to_stderr(config.log_format, config.instance)
        try:
            supervisor = Supervisor(text, patient=bool(config.remote_ranks))
            self.serve(supervisor)
        except ServingError as error:
            raise pb_utils.TritonModelException(f"instance {config.instance}: {error.message}") from None
        state = "waits for its ranks on other nodes" if config.remote_ranks else "is ready"
        _LOG.info("engine of %s (%s) %s, process %s", config.instance, config.role, state, supervisor.pid)

    def serve(self, answering: Answering) -> None:
        """Starts what calls go to. Raises `ServingError` if it can't serve."""
        end_with_parent()
        self._access = Access.given(os.environ)
        self._answering = answering
        answering.start()

    def execute(self, requests: list[Any]) -> list[None]:
        for request in requests:
            sender = request.get_response_sender()
            tensor = pb_utils.get_input_tensor_by_name(request, _MESSAGE)
            reply = functools.partial(_send, sender)
            try:
                self._answering.call(self._message(tensor), reply)
            except ServingError as error:
                reply(error_reply(error))
        return [None] * len(requests)

    def _message(self, tensor: Any) -> bytes:
        if tensor is None:
            raise ServingError("INVALID_ARGUMENT", f"{_MESSAGE}: missing")
        message = bytes(tensor.as_numpy().flat[0])
        return message if self._access is None else self._access.verified(message)

    def finalize(self) -> None:
        self._answering.stop()
        gc.collect()


def _send(sender: Any, payload: bytes) -> None:
    # named locals outlive send(): Triton 24.10 drops what only C++ refers to without holding the GIL
    tensor = pb_utils.Tensor(_REPLY, np.array([payload], dtype=np.object_))
    response = pb_utils.InferenceResponse([tensor])
    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
