"""Where a model's constructor gets its tensors from, and the error for everything that can be wrong with
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class ModelLoadError(ValueError):
    """A checkpoint can't be used. The message names the file or tensor, what was expected and what was
    found.
    """


class WeightSource(Protocol):
    """Named tensors of a checkpoint."""

    def has(self, name: str) -> bool: ...

    def read(
        self, name: str, shape: Sequence[int], rows: range | None = None, cols: range | None = None
    ) -> Tensor:
        """The slice [rows, cols] (None: all) of tensor `name`, which must have `shape` as a whole.

        On the CPU, in the checkpoint's dtype, and possibly a view of the file: copy before writing. Only
        the slice is read. Raises `ModelLoadError` if the tensor is missing, misshapen or of a dtype that is
        no float.
        """
        ...
