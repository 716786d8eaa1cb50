"""All metric families: what there is, what it means, and by which labels it is told apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

Kind = Literal["COUNTER", "GAUGE", "HISTOGRAM"]


class Family(NamedTuple):
    kind: Kind
    description: str
    labels: tuple[str, ...] = ()


_INSTANCE = ("instance", "role")


def _gauge(description: str, *labels: str) -> Family:
    return Family("GAUGE", description, labels)


def _counter(description: str, *labels: str) -> Family:
    return Family("COUNTER", description, labels)


def _seconds(description: str, *labels: str) -> Family:
    return Family("HISTOGRAM", description, labels)


FAMILIES: Mapping[str, Family] = {
    # requests
    "distserve_requests_total": _counter("Requests by outcome and error code", "outcome", "code"),
    "distserve_recoveries_total": _counter("Continuations on another instance, by what was lost", "code"),
    "distserve_prompt_tokens_total": _counter("Prompt tokens of admitted requests"),
    "distserve_output_tokens_total": _counter("Output tokens"),
    "distserve_ttft_seconds": _seconds("Arrival to first token", "instance"),
    "distserve_tpot_seconds": _seconds("Mean time per output token after the first", "instance"),
    "distserve_e2e_seconds": _seconds("Arrival to last token"),
    "distserve_prefill_queue_seconds": _seconds("Stage: waiting for prefill", "instance"),
    "distserve_prefill_seconds": _seconds("Stage: prefill", "instance"),
    "distserve_decode_queue_seconds": _seconds("Stage: waiting for admission to decode", "instance"),
    "distserve_transfer_seconds": _seconds("Stage: KV transfer", "instance"),
    "distserve_decode_seconds": _seconds("Stage: decode", "instance"),
    "distserve_slo_requests_total": _counter("Requests with objectives, by whether met", "objective", "met"),
    "distserve_slo_attainment": _gauge("Share that met it in the sliding window; 1 without any", "objective"),
    "distserve_slo_window_requests": _gauge("Requests with objectives in the sliding window"),
    # orchestrator
    "distserve_ready": _gauge("1: a request would find the instances it needs"),
    "distserve_requests": _gauge("Requests between arrival and final response"),
    "distserve_queue_depth": _gauge("Requests waiting for a prefill instance"),
    "distserve_queue_tokens": _gauge("Prompt tokens of these"),
    "distserve_handoffs": _gauge("Requests waiting for a decode instance"),
    "distserve_server_restarts_total": _counter("Starts of the server after it had died"),
    "distserve_request_log_dropped_total": _counter("Lines that the request log could not take"),
    # instances
    "distserve_instance_usable": _gauge("1: up and taking requests", *_INSTANCE),
    "distserve_kv_blocks": _gauge("KV blocks in the pool", *_INSTANCE),
    "distserve_kv_blocks_free": _gauge("KV blocks free", *_INSTANCE),
    "distserve_instance_queued": _gauge("Requests queued at the instance", *_INSTANCE),
    "distserve_instance_queued_tokens": _gauge("Tokens of prefill work queued there", *_INSTANCE),
    "distserve_instance_running": _gauge("Requests decoding at the instance", *_INSTANCE),
    "distserve_leases": _gauge("KV leases held for decode", *_INSTANCE),
    "distserve_transfers_pending": _gauge("KV transfers in progress", *_INSTANCE),
    "distserve_hung_calls": _gauge("Calls given up that never returned (dead stub)", *_INSTANCE),
    "distserve_engine_resident_bytes": _gauge("Resident memory of the engine process", *_INSTANCE),
    "distserve_engine_step_age_seconds": _gauge("How long the step in progress runs already", *_INSTANCE),
    "distserve_engine_restarts_total": _counter("Engine restarts seen", *_INSTANCE),
    "distserve_instance_errors_total": _counter(
        "Errors of the instance, recovered or not", *_INSTANCE, "code"
    ),
    "distserve_preemptions_total": _counter("Requests preempted for want of KV blocks", *_INSTANCE),
    "distserve_engine_steps_total": _counter("Steps of the engine", *_INSTANCE),
    "distserve_engine_busy_seconds_total": _counter("Time in steps and between them", *_INSTANCE),
    "distserve_engine_prompt_tokens_total": _counter("Tokens prefilled, recomputed ones too", *_INSTANCE),
    "distserve_engine_output_tokens_total": _counter("Tokens sampled", *_INSTANCE),
    "distserve_transfers_total": _counter("KV transfers, counted at both ends", *_INSTANCE, "outcome"),
    "distserve_transfer_bytes_total": _counter("Bytes of KV moved, counted at both ends", *_INSTANCE),
    "distserve_transfer_seconds_total": _counter(
        "Time of KV transfers: waiting, on the wire", *_INSTANCE, "part"
    ),
    "distserve_leases_ended_total": _counter("KV leases by how they ended", *_INSTANCE, "outcome"),
}
