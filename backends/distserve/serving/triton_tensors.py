"""A Triton request's inputs as plain Python values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from distserve.serving.schema import ORCHESTRATOR_INPUTS, ServingError, TensorSpec

_SPECS: Mapping[str, TensorSpec] = {spec.name: spec for spec in ORCHESTRATOR_INPUTS}


def read_inputs(request: Any) -> dict[str, Any]:
    """Values by input name: scalars for shape [1], lists for shape [-1], texts as `str`.

    Raises:
        ServingError: INVALID_ARGUMENT for text that is not UTF-8 or a tensor without elements.
    """
    return {tensor.name(): to_python(_SPECS[tensor.name()], tensor.as_numpy()) for tensor in request.inputs()}


def to_python(spec: TensorSpec, array: npt.NDArray[Any]) -> Any:
    """One tensor's value, see `read_inputs`."""
    if spec.dtype == "TYPE_STRING":
        values: list[Any] = [_text(spec.name, item) for item in array.flat]
    elif spec.dtype == "TYPE_FP32":
        # through the shortest text, so that 0.9 stays 0.9 and does not become 0.8999999761581421
        values = [float(str(item)) for item in array.astype(np.float32).flat]
    else:
        values = array.ravel().tolist()
    if spec.dims == (-1,):
        return values
    if len(values) != 1:
        raise ServingError("INVALID_ARGUMENT", f"{spec.name}: {len(values)} values, exactly 1 is needed")
    return values[0]


def _text(name: str, item: Any) -> str:
    if isinstance(item, str):
        return item
    try:
        return bytes(item).decode()
    except UnicodeDecodeError as error:
        raise ServingError("INVALID_ARGUMENT", f"{name}: is not valid UTF-8 ({error})") from None
