"""Metrics on Triton's /metrics endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton_python_backend_utils as pb_utils

from distserve.serving.metric_families import Kind
from distserve.serving.metrics import Metric


class TritonMetricBackend:
    """`MetricBackend` over `pb_utils.MetricFamily`. One thread only."""

    def __init__(self) -> None:
        self._families: dict[str, Any] = {}

    def metric(
        self, name: str, description: str, kind: Kind, labels: Mapping[str, str], buckets: list[float]
    ) -> Metric:
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = pb_utils.MetricFamily(
                name=name, description=description, kind=getattr(pb_utils.MetricFamily, kind)
            )
        given = {"buckets": buckets} if kind == "HISTOGRAM" else {}
        metric: Metric = family.Metric(labels=dict(labels), **given)
        return metric
