"""Operations on a running orchestrator, sent as JSON in the `control` tensor.

``{"op": "status"}``; ``{"op": "attach", "instance": {"name", "role", "address"?, "model"?},
"wait_s"?}``, which also takes a draining instance back; ``{"op": "drain", "instance": name, "remove"?:
bool}``: no new requests go there, what is there ends in peace, and ``status`` says when it is
``drained``. With ``remove`` a drained instance is forgotten. ``{"op": "stop", "drain_s"?}``: no request
is taken any more, those that are here end for up to ``drain_s``, the rest fails, and no instance is
called again; the answer comes then. The launcher does this before it ends the server, since Triton would
unload the instances below running requests, and may crash when it unloads this model while a call to an
instance is on its way.

``{"op": "cancel", "cancel_key": ...}`` ends the requests that were sent with this key, with CANCELLED. A
client that does this instead of closing its gRPC stream, and then reads that to its end, spares Triton 24.10
a cancellation, during which it may crash.

All but ``status`` and ``cancel`` need ``"key"``, the operator's (`Access`), where the server has one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from distserve.core.parsing import ConfigError, nearest, parse
from distserve.serving.access import Access
from distserve.serving.client_request import read_cancel_key
from distserve.serving.orchestrator import Orchestrator
from distserve.serving.orchestrator_config import InstanceSpec
from distserve.serving.params import invalid
from distserve.serving.schema import ServingError

MAX_WAIT_S = 60.0
MAX_DRAIN_S = 3600.0


async def run_control(orchestrator: Orchestrator, text: str, access: Access | None = None) -> str:
    """Carry out one operation; the answer is JSON with ``"ok": true``.

    Raises:
        ServingError: INVALID_ARGUMENT, NOT_FOUND or FAILED_PRECONDITION (a wrong key, too); nothing has
            changed then.
    """
    try:
        call = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid("control", text, f"must be a JSON object ({error})") from None
    if not isinstance(call, dict) or not isinstance(call.get("op"), str):
        raise invalid("control", text, "must be a JSON object with 'op'")
    operation = _OPERATIONS.get(call["op"])
    if operation is None:
        message = f"control.op={call['op']!r}: unknown operation{nearest(call['op'], _OPERATIONS)}"
        raise ServingError("INVALID_ARGUMENT", message)
    known, run = operation
    for name in call:
        if name not in ("op", "key") and name not in known:
            raise ServingError("INVALID_ARGUMENT", f"control: unknown key '{name}'{nearest(name, known)}")
    if access is not None and call["op"] not in _FOR_EVERYBODY and not access.is_operator(call.get("key")):
        given = "is not this server's" if "key" in call else "is missing"
        raise ServingError("FAILED_PRECONDITION", f"unauthenticated: control.key {given}")
    return json.dumps({"ok": True, **await run(orchestrator, call)})


async def _status(orchestrator: Orchestrator, call: Mapping[str, Any]) -> dict[str, Any]:
    fleet, router = orchestrator.fleet, orchestrator.router
    limits = fleet.limits()
    return {
        "ready": orchestrator.ready,
        "stopping": orchestrator.stopping,
        "name": orchestrator.name,
        "epoch": orchestrator.epoch,
        "server_restarts": orchestrator.server_restarts,
        "model": orchestrator.config.model,
        "model_hash": fleet.model_hash,
        "requests": len(orchestrator.sessions),
        "queued": len(router),
        "queued_tokens": router.waiting_tokens,
        "handoffs": router.handoffs,
        "tasks": len(asyncio.all_tasks()),  # of the event loop: the same whenever nothing is under way
        "attainment": dict(orchestrator.accounts.attainment.summary(orchestrator.now())),
        "max_prompt": limits.max_prompt if limits else None,
        "max_total": limits.max_total if limits else None,
        "instances": fleet.describe(),
    }


async def _cancel(orchestrator: Orchestrator, call: Mapping[str, Any]) -> dict[str, Any]:
    key = read_cancel_key("control.cancel_key", call.get("cancel_key"))
    found = [session for session in orchestrator.sessions.values() if session.cancel_key == key]
    for session in found:
        orchestrator.cancel(session)
    return {"cancelled": len(found)}


async def _attach(orchestrator: Orchestrator, call: Mapping[str, Any]) -> dict[str, Any]:
    try:
        spec = parse(InstanceSpec, call.get("instance"), "control.instance")
    except ConfigError as error:
        raise ServingError("INVALID_ARGUMENT", str(error)) from None
    wait_s = call.get("wait_s", 5.0)
    if isinstance(wait_s, bool) or not isinstance(wait_s, (int, float)) or not 0 <= wait_s <= MAX_WAIT_S:
        raise invalid("control.wait_s", wait_s, f"must be a number in [0, {MAX_WAIT_S:g}]")
    link = orchestrator.fleet.links.get(spec.name)
    if link is None:
        link = orchestrator.add_link(spec)
    elif link.spec != spec:
        message = (
            f"control.instance={spec.name!r}: already attached as {link.spec}; drain it with remove first"
        )
        raise ServingError("FAILED_PRECONDITION", message)
    link.draining = False
    attached = link
    await orchestrator.wait_for_change(lambda: attached.up, float(wait_s))
    return {"instance": spec.name, "up": link.up, "reason": link.reason}


async def _drain(orchestrator: Orchestrator, call: Mapping[str, Any]) -> dict[str, Any]:
    name, remove = call.get("instance"), call.get("remove", False)
    if not isinstance(remove, bool):
        raise invalid("control.remove", remove, "must be true or false")
    links = orchestrator.fleet.links
    link = links.get(name) if isinstance(name, str) else None
    if link is None:
        raise ServingError("NOT_FOUND", f"control.instance={name!r}: not attached{nearest(str(name), links)}")
    if remove and not (link.idle and (link.draining or not link.up)):
        message = (
            f"control.remove: {name} still has {len(link.targets)} requests and {len(link.leases)} leases"
        )
        if link.idle:
            message = f"control.remove: {name} is not being drained; drain it first"
        raise ServingError("FAILED_PRECONDITION", message)
    link.draining = True
    if remove:
        del links[link.name]
        await link.stop()
    return {"instance": link.name, "drained": link.idle, "removed": remove}


async def _stop(orchestrator: Orchestrator, call: Mapping[str, Any]) -> dict[str, Any]:
    drain_s = call.get("drain_s", orchestrator.config.drain_s)
    if isinstance(drain_s, bool) or not isinstance(drain_s, (int, float)) or not 0 <= drain_s <= MAX_DRAIN_S:
        raise invalid("control.drain_s", drain_s, f"must be a number in [0, {MAX_DRAIN_S:g}]")
    await orchestrator.stop(float(drain_s))
    return {"stopped": True}


_FOR_EVERYBODY = frozenset({"status", "cancel"})
_Run = Callable[[Orchestrator, Mapping[str, Any]], Coroutine[Any, Any, dict[str, Any]]]
_OPERATIONS: Mapping[str, tuple[tuple[str, ...], _Run]] = {
    "status": ((), _status),
    "cancel": (("cancel_key",), _cancel),
    "attach": (("instance", "wait_s"), _attach),
    "drain": (("instance", "remove"), _drain),
    "stop": (("drain_s",), _stop),
}
