"""The NCCL side of a pair. Imported only where GPUs are used; nothing here touches CUDA at import.

NCCL must neither hang nor end the process when a peer dies. So a pair's group runs without torch's own
guards, and this module keeps the deadline: made under `TORCH_NCCL_BLOCKING_WAIT` a group has no watchdog and
no heartbeat monitor (the two threads that may end the process); waiting means looking at the operation's CUDA
event; a deadline or an error aborts this communicator alone, which ends its kernels, so that the streams go
on.
"""

from __future__ import annotations

import contextlib
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from distserve.transfer import nccl_environment
from distserve.transfer.channel import GroupChannel, first_line, left
from distserve.transfer.control import Control
from distserve.transfer.errors import TransferError, peer_gone
from distserve.transfer.rendezvous import ControlStore
from distserve.transfer.waiting import wait_for_device

ABORT_S = 5.0  # an abort that takes longer goes on in its thread


class NcclChannel(GroupChannel):
    """Two messages in flight over one communicator, which keeps a pair's messages in order by itself."""

    def __init__(self, rank: int, device: torch.device) -> None:
        if not dist.is_nccl_available():
            raise ValueError("backend='nccl': this torch was built without NCCL; allowed is 'gloo'")
        super().__init__(rank, lanes=2, groups=1)
        self._device = device
        self._control: Control | None = None

    def connect(self, control: Control, deadline: float) -> None:
        """Also counts the memory of the communicator, which comes with the first message (the token)."""
        cuda: Any = torch.cuda  # untyped in torch
        before = cuda.mem_get_info(self._device)[0]
        self._control = control
        super().connect(control, deadline)
        self.device_bytes = max(0, before - cuda.mem_get_info(self._device)[0])

    def _make(self, store: ControlStore, local_host: str, deadline: float) -> Any:
        del local_host  # NCCL finds its own interfaces
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = min(left(deadline, "pair group"), timedelta(seconds=ABORT_S))
        options.config.blocking = 0  # a communicator that is being made can be aborted as well
        with nccl_environment.of_a_pair():
            return dist.ProcessGroupNCCL(store, self._rank, 2, options)

    def _wait(self, work: Any, deadline: float) -> TransferError | None:
        assert self._control is not None
        try:
            # between GPUs of one host a killed peer is no error of NCCL's
            wait_for_device(work.is_completed, self._control, deadline)
            work.wait()  # returns at once; raises what went wrong
        except TransferError as error:
            return error
        except RuntimeError as error:
            return peer_gone(f"message: {first_line(error)}")
        return None

    def _drop(self, group: Any) -> None:
        messages = list(self._messages)  # their memory is nobody else's before the last kernel has ended

        def abort() -> None:
            with contextlib.suppress(RuntimeError):
                group.abort()  # never `shutdown`, which waits for kernels that a dead peer keeps running
            messages.clear()

        # torch gives up waiting, and then waits for its own thread all the same
        thread = threading.Thread(target=abort, name="nccl-abort", daemon=True)
        thread.start()
        thread.join(ABORT_S)

    def _token_device(self) -> torch.device:
        return self._device
