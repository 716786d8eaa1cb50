"""Stop strings over a stream of text: nothing that may belong to one is let out early."""

from __future__ import annotations


class StopStrings:
    """Finds the first of several stop strings in text that comes in pieces.

    Held back is only what may still become a stop string: the longest end of the text that one begins with.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._longest = max((len(stop) for stop in stops), default=0)
        self._inner = frozenset(char for stop in stops for char in stop[:-1])
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Returns the text that may go out now, and whether a stop string has ended the text there."""
        if not self._stops:
            return text, False
        buffer = self._held + text
        found = [at for at in (buffer.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self._held = ""
            return buffer[: min(found)], True
        keep = len(buffer) - self._held_length(buffer)
        self._held = buffer[keep:]
        return buffer[:keep], False

    def flush(self) -> str:
        """What is held back, once the text has ended without a stop string."""
        text, self._held = self._held, ""
        return text

    def _held_length(self, buffer: str) -> int:
        if not buffer or buffer[-1] not in self._inner:
            return 0
        for length in range(min(self._longest - 1, len(buffer)), 0, -1):
            end = buffer[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stops):
                return length
        return 0
