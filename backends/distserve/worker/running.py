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

    def result(self) -> list[int]:
        """Waits for it. Raises what went wrong on the device."""
        if self._event is not None:
            self._event.synchronize()
        found: list[int] = self._host.tolist()
        return found


class RunningStep:
    """The tokens of a choice are on their way to the host."""

    def __init__(self, sampler: Sampler, choice: Choice) -> None:
        self._sampler = sampler
        self._choice = choice
        self._tokens = Readback(choice.tokens)
        self._output: StepOutput | None = None

    def done(self) -> bool:
        """Would `result` not wait?"""
        return self._output is not None or self._tokens.done()

    def result(self) -> StepOutput:
        """Waits for the step. Raises what went wrong on the device."""
        if self._output is None:
            self._output = StepOutput(*self._sampler.settle(self._choice, self._tokens.result()))
        return self._output
