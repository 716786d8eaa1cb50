"""A step that the device may still be at."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distserve.worker.sampler import Choice, Sampler
from distserve.worker.step import StepOutput


class Readback:
    """A device tensor on its way to the host, in the order of the current stream."""

    def __init__(self, values: Tensor) -> None:
        self._host = values
        self._event: Any = None
        if values.is_cuda:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            cuda: Any = torch.cuda  # untyped in torch
            self._event = cuda.Event(blocking=True)  # whoever waits sleeps
            self._event.record()

    def done(self) -> bool:
        return self._event is None or bool(self._event.query())

    def result(self) -> list[Any]:
        """Waits for it. Raises what went wrong on the device."""
        if self._event is not None:
            self._event.synchronize()
        found: list[Any] = self._host.tolist()
        return found


class RunningStep:
    """The tokens of a choice are on their way to the host."""

    def __init__(self, sampler: Sampler, choice: Choice) -> None:
        self._sampler = sampler
        self._choice = choice
        reported = (choice.reported.values, choice.reported.ids) if choice.reported.rows else ()
        self._reported = [Readback(values) for values in reported]
        self._tokens = Readback(choice.tokens)  # after it all is there
        self._output: StepOutput | None = None

    def done(self) -> bool:
        """Would `result` not wait?"""
        return self._output is not None or self._tokens.done()

    def result(self) -> StepOutput:
        """Waits for the step. Raises what went wrong on the device."""
        if self._output is None:
            tokens = self._tokens.result()
            values, ids = [reported.result() for reported in self._reported] or ([], [])
            self._output = StepOutput(*self._sampler.settle(self._choice, tokens, values, ids))
        return self._output
