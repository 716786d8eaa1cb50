"""The way to an instance in the same server: BLS calls on threads of their own.

Only non-decoupled `exec()`: iterating decoupled BLS calls in several threads deadlocks the stub in every
known Triton release, and `exec()` of a model whose stub dies never returns. Such a call costs its
thread; how many hang is bounded and told.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from distserve.serving.schema import STAGE_INPUTS, STAGE_OUTPUTS, ServingError

_MESSAGE, _REPLY = STAGE_INPUTS[0].name, STAGE_OUTPUTS[0].name
MAX_THREADS = 16
_CLOSE_S = 3.0


class BlsClient:
    """`InstanceClient` over BLS. Made and used on one event loop.

    A thread more is started when a call comes and all are busy, up to `MAX_THREADS`. The threads are daemons:
    one that hangs in Triton must not keep the process from ending.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[tuple[bytes, asyncio.Future[bytes]] | None] = queue.SimpleQueue()
        self._threads = 0
        self._busy = 0  # calls that have not returned, those given up included
        self._hung = 0  # of these, the ones given up
        self._closed = False

    @property
    def hung_calls(self) -> int:
        return self._hung

    async def call(self, message: bytes, deadline_s: float) -> bytes:
        if self._closed:
            raise ServingError("UNAVAILABLE", "detached")
        if self._busy >= self._threads:
            self._start_thread()
        reply: asyncio.Future[bytes] = self._loop.create_future()
        self._busy += 1
        self._jobs.put((message, reply))
        try:
            return await asyncio.wait_for(reply, deadline_s)
        except asyncio.TimeoutError:
            raise ServingError("DEADLINE_EXCEEDED", f"no reply within {deadline_s:g} s") from None
        finally:
            self._hung += reply.cancelled()

    async def close(self) -> None:
        """Takes no more calls, and waits a little for those in progress: a poll ends with its heartbeat."""
        self._closed = True
        for _ in range(self._threads):
            self._jobs.put(None)
        end = self._loop.time() + _CLOSE_S
        while self._busy and self._loop.time() < end:
            await asyncio.sleep(0.01)

    def _start_thread(self) -> None:
        if self._threads == MAX_THREADS:
            raise ServingError("UNAVAILABLE", f"{self._busy} calls of model {self._model} hang in the server")
        self._threads += 1
        name = f"bls-{self._model}-{self._threads}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            message, reply = job
            outcome: bytes | ServingError
            try:
                outcome = _exec(self._model, message)
            except Exception as error:  # whatever Triton says, it must not cost the thread
                outcome = ServingError("UNAVAILABLE", str(error))
            try:
                self._loop.call_soon_threadsafe(self._settle, reply, outcome)
            except RuntimeError:  # the loop has ended, and with it everybody who waited
                return

    def _settle(self, reply: asyncio.Future[bytes], outcome: bytes | ServingError) -> None:
        self._busy -= 1
        if reply.done():
            self._hung -= 1
            return
        if isinstance(outcome, ServingError):
            reply.set_exception(outcome)
        else:
            reply.set_result(outcome)


def _exec(model: str, message: bytes) -> bytes:
    # named locals outlive the call: Triton 24.10 drops what only C++ refers to without holding the GIL
    tensor = pb_utils.Tensor(_MESSAGE, np.array([message], dtype=np.object_))
    request = pb_utils.InferenceRequest(model_name=model, requested_output_names=[_REPLY], inputs=[tensor])
    response: Any = request.exec()
    if response.has_error():
        raise RuntimeError(response.error().message())
    output = pb_utils.get_output_tensor_by_name(response, _REPLY)
    return bytes(output.as_numpy().flat[0])
