"""What an error of an instance means for the request: the one table of it.

The codes are of what an instance says about a request. That an instance can't be reached, or does not
answer in time, is `UNAVAILABLE` here (see `InstanceLink.call`), so that `DEADLINE_EXCEEDED` always is the
request's own deadline.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from distserve.serving.schema import ErrorCode

Recovery = Literal["final", "wait", "continue"]
"""``final``: the client gets it. ``wait``: another attempt when there is room. ``continue``: elsewhere, at
once, and at most `max_recoveries` times."""

RECOVERY: Mapping[ErrorCode, Recovery] = {
    "INVALID_ARGUMENT": "final",  # every instance would say so
    "CANCELLED": "final",
    "DEADLINE_EXCEEDED": "final",  # more time is not going to come
    "RESOURCE_EXHAUSTED": "wait",
    "UNAVAILABLE": "continue",  # the instance, or the KV's source, has died, restarted or fallen silent
    "NOT_FOUND": "continue",
    "FAILED_PRECONDITION": "continue",  # a stale handle: the prompt is computed again
    "INTERNAL": "continue",  # a failed step, perhaps of another request in the batch
}
