"""The Triton model of the orchestrator: decoupled towards clients, BLS or gRPC towards instances.

`execute` only registers requests. The orchestrator lives on an event loop in a thread of its own; it
starts with the first request, because Triton refuses BLS before that.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import json
import logging
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from distserve.core.logs import log_package_to_stderr
from distserve.core.model_config import resolve_model
from distserve.serving.access import Access
from distserve.serving.bls_client import BlsClient
from distserve.serving.client_request import ClientRequest, parse_request
from distserve.serving.client_stream import ClientStream, Lanes
from distserve.serving.control import run_control
from distserve.serving.grpc_client import GrpcClient
from distserve.serving.instance_client import InstanceClient
from distserve.serving.launch_environment import SERVER_RESTARTS
from distserve.serving.metrics import Metrics
from distserve.serving.orchestrator import Orchestrator
from distserve.serving.orchestrator_config import (
    MODEL_PARAMETER,
    InstanceSpec,
    OrchestratorConfig,
    model_parameter,
)
from distserve.serving.parent_watch import end_with_parent
from distserve.serving.request_log import RequestLog
from distserve.serving.responses import ResponseBuilder
from distserve.serving.schema import ServingError
from distserve.serving.signed_client import SignedClient
from distserve.serving.text_codec import TextCodec, load_codec
from distserve.serving.triton_metrics import TritonMetricBackend
from distserve.serving.triton_tensors import read_inputs

_LOG = logging.getLogger(__name__)
_SWITCH_INTERVAL_S = (
    0.001  # the event loop shares the GIL with the lanes; the default of 5 ms is felt per token
)
_START_S = 30.0
MAX_CLIENT_ID_CHARS = 256
_WATCH_SHARE = 4.0  # pause per time spent asking: the watch takes at most a fifth of a core


class TritonPythonModel:
    """See module."""

    def initialize(self, args: dict[str, str]) -> None:
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        end_with_parent()
        parameters = json.loads(args["model_config"]).get("parameters")
        self._config = config = OrchestratorConfig.load(model_parameter(parameters, MODEL_PARAMETER))
        log_package_to_stderr(config.log_format, args["model_instance_name"])
        self._codec: TextCodec = load_codec(resolve_model(self._config.model))
        # the same after a restart, different for every orchestrator that an instance may meet
        self._owner = f"{socket.gethostname()}:{args['model_repository']}:{args['model_instance_name']}"[
            -256:
        ]
        self._access = Access.given(os.environ)
        self._lanes = Lanes(self._config.lanes)
        self._metrics = Metrics(TritonMetricBackend())
        self._request_log = (
            RequestLog(
                Path(config.request_log).expanduser(), config.request_log_bytes, config.request_log_files
            )
            if config.request_log is not None
            else None
        )
        self._streams: set[ClientStream] = set()  # without a final response
        self._loop = asyncio.new_event_loop()
        self._loop_thread = threading.Thread(target=self._run_loop, name="orchestrator", daemon=True)
        self._loop_thread.start()
        self._orchestrator: Orchestrator | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending = threading.Event()
        self._watcher = threading.Thread(target=self._watch_cancellations, name="cancellations", daemon=True)
        self._watcher.start()

    def execute(self, requests: list[Any]) -> None:
        if self._orchestrator is None:
            starting = asyncio.run_coroutine_threadsafe(self._start(), self._loop)
            self._orchestrator = starting.result(_START_S)
        for request in requests:
            self._accept(request)

    def is_ready(self) -> bool:
        """Asked by Triton 26.03 and later."""
        return self._orchestrator is None or self._orchestrator.ready

    def finalize(self) -> None:
        if self._orchestrator is not None:
            stopping = asyncio.run_coroutine_threadsafe(self._orchestrator.stop(), self._loop)
            with contextlib.suppress(concurrent.futures.TimeoutError):
                stopping.result(self._config.drain_s + 10.0)
        self._ending.set()
        self._watcher.join(2.0)
        self._lanes.close(2.0)
        self._metrics.close()
        if self._request_log is not None:
            self._request_log.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop_thread.join(2.0)
        gc.collect()

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _start(self) -> Orchestrator:
        orchestrator = Orchestrator(
            self._config,
            self._codec,
            self._connect,
            self._metrics,
            self._owner,
            self._request_log,
            server_restarts=int(os.environ.get(SERVER_RESTARTS, "0")),
        )
        await orchestrator.start()
        return orchestrator

    def _accept(self, request: Any) -> None:
        """Read one request and pass it to the event loop; its sender answers from here on."""
        arrival_s = time.monotonic()
        stream = ClientStream(request.get_response_sender(), self._lanes.assign(), self._forget)
        try:
            stream.client_id = str(request.request_id())[:MAX_CLIENT_ID_CHARS]
            inputs = read_inputs(request)
            control = inputs.pop("control", None)
            if control is not None:
                if inputs:
                    raise ServingError(
                        "INVALID_ARGUMENT", f"control: must come alone, not with {sorted(inputs)}"
                    )
                self._on_loop(self._control(control, stream))
                return
            timeout_us = request.timeout()
            parsed = parse_request(
                inputs,
                request.parameters(),
                self._codec.vocab_size,
                timeout_us / 1e6 if timeout_us > 0 else None,
                stream.client_id,
            )
            stream.build = self._builder(parsed, frozenset(request.requested_output_names())).build
        except ServingError as error:
            self._metrics.refused(error)
            stream.fail(error)
        except Exception as error:  # a mistake of ours; the client must not wait for ever
            _LOG.exception("a request could not be read", extra=stream.log_ids())
            stream.fail(ServingError("INTERNAL", repr(error)))
        else:
            self._streams.add(stream)
            self._on_loop(self._serve(parsed, stream, arrival_s))

    def _builder(self, request: ClientRequest, requested: frozenset[str]) -> ResponseBuilder:
        params = request.params
        # as vllm_backend: a whole answer begins with its prompt, unless told otherwise; a stream never does
        with_prompt = not params.stream and not params.exclude_input_in_output
        prefix = request.text if with_prompt and request.text is not None else ""
        return ResponseBuilder(params, requested, prefix, self._codec.decode_token)

    def _on_loop(self, coroutine: Any) -> None:
        def create() -> None:
            task = self._loop.create_task(coroutine)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._loop.call_soon_threadsafe(create)

    async def _serve(self, request: ClientRequest, stream: ClientStream, arrival_s: float) -> None:
        assert self._orchestrator is not None
        try:
            session = await self._orchestrator.serve(request, stream, arrival_s)
            if stream in self._streams:  # else it has ended
                stream.session = session
        except Exception as error:
            _LOG.exception("a request could not be admitted", extra=stream.log_ids())
            stream.fail(ServingError("INTERNAL", repr(error)))

    def _connect(self, spec: InstanceSpec) -> InstanceClient:
        client: InstanceClient
        if spec.address is None:
            client = BlsClient(spec.triton_model)
        else:
            client = GrpcClient(spec.triton_model, spec.address)
        return client if self._access is None else SignedClient(client, self._access)

    async def _control(self, text: str, stream: ClientStream) -> None:
        assert self._orchestrator is not None
        try:
            answer = await run_control(self._orchestrator, text, self._access)
        except ServingError as error:
            stream.fail(error)
        except Exception as error:
            _LOG.exception("control failed", extra=stream.log_ids())
            stream.fail(ServingError("INTERNAL", repr(error)))
        else:
            stream.answer({"control_output": np.array([answer.encode()], dtype=np.object_)})

    def _forget(self, stream: ClientStream) -> None:
        self._streams.discard(stream)
        stream.session = (
            None  # it refers to the stream: both go now, with all that Triton has, not when collected
        )

    def _watch_cancellations(self) -> None:
        """Asks for every live request whether its client has gone: a round trip each, so not often."""
        pause_s = self._config.cancel_check_s
        while not self._ending.wait(pause_s):
            began_s = time.monotonic()
            for stream in list(self._streams):
                session = stream.session
                if session is not None and session.state != "done" and stream.cancelled():
                    assert self._orchestrator is not None
                    self._loop.call_soon_threadsafe(self._orchestrator.cancel, session)
            pause_s = max(self._config.cancel_check_s, _WATCH_SHARE * (time.monotonic() - began_s))
