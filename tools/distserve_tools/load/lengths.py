"""Lengths of a trace made to fit what a server can do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from distserve_planner.workload import Trace


def scaled(trace: Trace, scale: float, max_context: int) -> Trace:
    """All lengths times `scale`, at least 1 token; outputs cut to half the context, inputs to the rest."""
    inputs = np.maximum(1, np.rint(trace.input_tokens * scale)).astype(np.int64)
    outputs = np.maximum(1, np.rint(trace.output_tokens * scale)).astype(np.int64)
    outputs = np.minimum(outputs, max_context // 2)
    return replace(trace, input_tokens=np.minimum(inputs, max_context - outputs), output_tokens=outputs)
