"""Non-negative least squares on relative error."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def relative_nnls(features: Floats, seconds: Floats) -> Floats:
    """Coefficients >= 0 that minimise the sum of squared relative errors of features @ coefficients."""
    from scipy.optimize import nnls  # half a second to import, and seldom needed

    weighted = features / seconds[:, None]
    scale = np.maximum(np.abs(weighted).max(axis=0), 1e-300)
    solution, _ = nnls(weighted / scale, np.ones(len(seconds)))
    result: Floats = solution / scale
    return result
