"""What torch reads of NCCL from the environment, set once and early.

Reading it while another thread adds or removes a name may crash, so names are added before there are threads
and only their values change later. Torch-free.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_OF_THE_PROCESS = {
    "TORCH_NCCL_BLOCKING_WAIT": "0",  # torch's own choice, and the next one
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # else a thread asks the store of the first group every second
    # of making a communicator; read once per process, with its first operation over NCCL
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "20",
}
_OF_A_PAIR = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
_lock = threading.Lock()  # the process has one environment


def settle() -> None:
    """Adds what is not set, before the process has threads. What the operator has set stays."""
    for name, value in _OF_THE_PROCESS.items():
        os.environ.setdefault(name, value)


@contextmanager
def of_a_pair() -> Iterator[None]:
    """For making a group that nothing but its own deadlines watches; other groups keep the process's."""
    settle()
    with _lock:
        before = {name: os.environ[name] for name in _OF_A_PAIR}
        os.environ.update(_OF_A_PAIR)
        try:
            yield
        finally:
            os.environ.update(before)
