"""From the output tokens of one request to its text: detokeniser, stop strings, end tokens."""

from __future__ import annotations

from collections.abc import Sequence

from distserve.serving.params import Parameters
from distserve.serving.stop_strings import StopStrings
from distserve.serving.text_codec import TextCodec


class OutputText:
    """Turns tokens into text that may go out.

    An end or stop token counts as a token but has no text. As in vLLM, stop strings are looked for only in
    what comes after the first ``min_tokens`` tokens.
    """

    def __init__(self, codec: TextCodec, params: Parameters, prompt: Sequence[int]) -> None:
        self._detokenizer = codec.detokenizer(prompt)
        self._stops = StopStrings(params.stop)
        self._min_tokens = params.min_tokens
        self._silent = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            self._silent |= codec.end_ids
        self._count = 0

    def push(self, token: int) -> tuple[str, bool]:
        """Returns the text that may go out, and whether a stop string has ended it."""
        self._count += 1
        text = "" if token in self._silent else self._detokenizer.push((token,))
        if self._count <= self._min_tokens:
            return text, False
        return self._stops.push(text)

    def flush(self) -> str:
        """The rest, at an end that was no stop string (though the rest may still complete one)."""
        text, stopped = self._stops.push(self._detokenizer.flush())
        return text if stopped else text + self._stops.flush()
