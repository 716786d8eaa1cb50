"""Configuration of one orchestrator, as the planner writes it into the model's `orchestrator` parameter."""

from __future__ import annotations

import json
from dataclasses import dataclass

from distserve.core.config import LogFormat, Role
from distserve.core.order import Order, Ordering
from distserve.core.parsing import ConfigError, nearest, parse

MODEL_PARAMETER = "orchestrator"


@dataclass(frozen=True)
class InstanceSpec:
    """One instance: a model of this server, or of the one with its gRPC at ``address`` (host:port).

    ``name`` is unique here; the Triton model has the same name unless ``model`` gives another (two servers
    may both have a ``decode_0``). A prefill instance of a ``group`` hands over to decode instances of that
    group while one of them is usable (Algorithm 2: their KV does not leave its node).
    """

    name: str
    role: Role
    address: str | None = None
    model: str | None = None
    group: str | None = None

    @property
    def triton_model(self) -> str:
        return self.model or self.name

    def __post_init__(self) -> None:
        for field in ("name", "model"):
            if getattr(self, field) == "":
                raise ConfigError(f"{field}='': must be the name of a Triton model")
        if self.group == "":
            raise ConfigError("group='': must be a name")
        if self.address is not None:
            host, _, port = self.address.rpartition(":")
            if not host or not port.isdigit() or not 0 < int(port) < 65536:
                raise ConfigError(f"address={self.address!r}: must be host:port")


@dataclass(frozen=True)
class OrchestratorConfig:
    """Times are seconds. ``instances`` may grow and shrink later by `attach` and `drain`."""

    model: str  # a folder, or cache:NAME; for the tokenizer and the end tokens
    instances: tuple[InstanceSpec, ...] = ()
    max_queue: int = 1024  # requests waiting for a prefill instance; the next one is refused
    max_queue_tokens: int = 2_000_000  # of the prompts of these requests; they take up to 40 bytes each
    scheduling: Order = "fcfs"  # of these requests; "shortest" (with ageing), "deadline"
    ageing_tokens_per_s: float = 1000.0  # scheduling "shortest": what a second of waiting counts
    slo_ttft_s: float | None = None  # objectives of requests without their own; attainment is counted by them
    slo_tpot_s: float | None = None
    slo_window_s: float = 60.0  # of the attainment shown
    refuse_late: bool = False  # refuse what will not meet these; a request's own objectives always count
    max_text_bytes: int = 4 << 20  # of one prompt
    request_timeout_s: float = 600.0  # from arrival to the final response
    hop_timeout_s: float = 120.0  # of one stage without any sign of the request
    heartbeat_s: float = 1.0  # how long an instance holds a poll open
    silence_s: float = 4.0  # heartbeat overdue by this much: the instance is taken for dead
    call_timeout_s: float = 5.0  # of any other call
    unavailable_after_s: float = 8.0  # without a live instance of a needed role, requests fail
    lease_renew_s: float = 3.0  # below a third of the instances' lease_s
    max_recoveries: int = 4  # continuations of one request after failures of instances
    prefill_may_decode: bool = False  # while no decode instance is up, prefill instances serve requests whole
    decode_may_prefill: bool = True  # and the other way round; off: the orchestrator is not ready then
    drain_s: float = 30.0  # on unload: how long running requests may go on
    stats_s: float = 2.0  # how often instances are asked for the figures that metrics show of them
    log_format: LogFormat = "text"
    request_log: str | None = None  # a file that gets a line per request (request_log/1); ~ is expanded
    request_log_bytes: int = 64 << 20  # then the file is put aside as <file>.1, .2, ...
    request_log_files: int = 4
    transfer_secret_file: str | None = None  # of the nodes: keys of servers are derived from it
    lanes: int = 4  # threads that send responses
    cancel_check_s: float = 0.05

    def __post_init__(self) -> None:
        for name in (
            "max_queue",
            "max_queue_tokens",
            "max_text_bytes",
            "lanes",
            "request_log_bytes",
            "request_log_files",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.max_recoveries < 0:
            raise ConfigError(f"max_recoveries={self.max_recoveries}: must be at least 0")
        for name in (
            "request_timeout_s",
            "hop_timeout_s",
            "heartbeat_s",
            "silence_s",
            "call_timeout_s",
            "unavailable_after_s",
            "lease_renew_s",
            "cancel_check_s",
            "slo_window_s",
            "stats_s",
        ):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)}: must be above 0")
        for name in ("slo_ttft_s", "slo_tpot_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name}={value}: must be above 0")
        if self.refuse_late and self.slo_ttft_s is None and self.slo_tpot_s is None:
            raise ConfigError("refuse_late=true: needs slo_ttft_s or slo_tpot_s")
        self.ordering()
        names = [spec.name for spec in self.instances]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"instances: {name!r} is named twice")

    def ordering(self) -> Ordering:
        """Of requests that wait for prefill. Raises `ConfigError`."""
        return Ordering(self.scheduling, self.ageing_tokens_per_s)

    @classmethod
    def load(cls, text: str, where: str = MODEL_PARAMETER) -> OrchestratorConfig:
        """Parses the JSON of the model parameter; unknown keys are refused by name (`ConfigError`)."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{where}: not JSON ({error})") from None
        return parse(cls, values, where)


def model_parameter(parameters: object, key: str) -> str:
    """The string value of parameter ``key`` in a Triton model configuration's ``parameters`` (JSON form).

    Raises `ConfigError` naming what is there if it is missing.
    """
    entries = parameters if isinstance(parameters, dict) else {}
    entry = entries.get(key)
    if not isinstance(entry, dict) or not isinstance(entry.get("string_value"), str):
        raise ConfigError(f"config.pbtxt: parameter '{key}' is missing{nearest(key, entries)}")
    value: str = entry["string_value"]
    return value
