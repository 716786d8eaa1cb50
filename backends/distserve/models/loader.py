"""Reads a Hugging Face folder: config.json and safetensors, in one file or sharded. Runs no code from it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from distserve.models.weights import ModelLoadError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")


class Checkpoint:
    """The weights of a folder, opened by memory map: a rank touches only the pages of the slices that it
    reads.

    Use it as a context manager. Raises `ModelLoadError` for a folder without safetensors, a missing or
    truncated file, and an index that does not fit its files.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._file_of: dict[str, str] = {}  # tensor -> file name
        self._open: dict[str, Any] = {}
        self._stack = ExitStack()
        try:
            index = self.folder / INDEX_FILE
            names = weight_files(self.folder)
            for name in names:
                self._add_file(name)
            if index.exists():
                self._check_index(_weight_map(index))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._open.clear()
        self._stack.close()

    def has(self, name: str) -> bool:
        return name in self._file_of

    def read(
        self, name: str, shape: Sequence[int], rows: range | None = None, cols: range | None = None
    ) -> Tensor:
        """See `WeightSource.read`."""
        file = self._file_of.get(name)
        if file is None:
            raise ModelLoadError(f"{self.folder}: tensor {name!r} {list(shape)} is missing from the weights")
        where = f"{self.folder / file}: tensor {name!r}"
        try:
            piece = self._open[file].get_slice(name)
            found, kind = piece.get_shape(), piece.get_dtype()
            if list(found) != list(shape):
                raise ModelLoadError(f"{where} has shape {list(found)}, config.json wants {list(shape)}")
            if kind not in _FLOATS:
                raise ModelLoadError(f"{where} has dtype {kind}; supported: {', '.join(_FLOATS)}")
            cut = [slice(None) if r is None else slice(r.start, r.stop) for r in (rows, cols)][: len(shape)]
            tensor: Tensor = piece[tuple(cut)]
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{where} can't be read: {error}") from error
        return tensor

    def _add_file(self, name: str) -> None:
        path = self.folder / name
        try:
            handle = self._stack.enter_context(safe_open(str(path), framework="pt", device="cpu"))
        except FileNotFoundError:
            raise ModelLoadError(f"{path}: not found, though {INDEX_FILE} names it") from None
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(
                f"{path}: not a complete safetensors file, truncated or damaged ({error})"
            ) from error
        self._open[name] = handle
        for tensor in handle.keys():  # noqa: SIM118 - not a mapping
            if tensor in self._file_of:
                raise ModelLoadError(f"{path}: tensor {tensor!r} is also in {self._file_of[tensor]}")
            self._file_of[tensor] = name

    def _check_index(self, weight_map: dict[str, str]) -> None:
        for tensor, file in weight_map.items():
            if self._file_of.get(tensor) != file:
                raise ModelLoadError(f"{self.folder / INDEX_FILE}: tensor {tensor!r} is not in {file}")


def weight_files(folder: Path) -> list[str]:
    """Names of the safetensors files of a model folder: the single file, or those that the index names."""
    index = folder / INDEX_FILE
    if index.exists():
        return sorted(set(_weight_map(index).values()))
    if (folder / SINGLE_FILE).exists():
        return [SINGLE_FILE]
    pickled = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
    if pickled:
        raise ModelLoadError(
            f"{folder}: has only {pickled[0]}; pickled weights can run code and are not loaded. "
            "Save the model as safetensors (transformers: save_pretrained)"
        )
    raise ModelLoadError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} found")


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        files = set(weight_map.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{index}: no usable weight_map ({type(error).__name__}: {error})") from error
    for file in files:
        if not isinstance(file, str) or Path(file).name != file:
            raise ModelLoadError(f"{index}: weight_map names {file!r}; plain file names are allowed")
    return dict(weight_map)
