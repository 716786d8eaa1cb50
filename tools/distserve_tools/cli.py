"""The `distserve` command."""

from __future__ import annotations

from collections.abc import Sequence

from distserve_planner.command_line import Command, dispatch

COMMANDS = (
    Command("demo", "distserve_tools.demo", "stream one answer through a whole deployment, then stop it"),
    Command("serve", "distserve_tools.serve", "run a model repository until it is stopped"),
    Command(
        "profile", "distserve_tools.profile_engine", "measure this device and fit the planner's latency model"
    ),
    Command(
        "device-check",
        "distserve_tools.device_check.command",
        "kernels, engine, transfers and a server on one GPU, beside what it could do",
    ),
    Command("bench engine", "distserve_tools.bench_engine", "this engine beside transformers and vLLM"),
    Command("bench executor", "distserve_tools.bench_executor", "plan and collectives of two ranks"),
    Command("bench serve", "distserve_tools.load.bench_serve", "load a running server, or find its goodput"),
    Command(
        "bench orchestrator",
        "distserve_tools.testbed.bench_orchestrator",
        "what the orchestrator costs, against instances that only replay tokens",
    ),
    Command(
        "bench transfer",
        "distserve_tools.testbed.bench_transfer",
        "KV between two processes beside a plain TCP stream, and steps beside KV",
    ),
    Command(
        "bench watch",
        "distserve_tools.turnover.command",
        "a load that turns, on a running server with and without `planner watch`",
    ),
    Command("testbed", "distserve_tools.testbed.command", "disaggregated against colocated on two cores"),
    Command("apply", "distserve_tools.apply.command", "make a running server be another placement"),
    Command("status", "distserve_tools.status", "live table of the instances of a running server"),
    Command("health", "distserve_tools.health", "exit code 0 if a server takes requests"),
    Command(
        "monitoring",
        "distserve_tools.monitoring",
        "write Prometheus and Grafana configuration, dashboard included",
    ),
    Command("doctor", "distserve_tools.doctor", "what is wrong with this machine, or with a repository"),
    Command(
        "chaos", "distserve_tools.chaos.command", "break a deployment and count what becomes of requests"
    ),
    Command("openai", "distserve_tools.openai_api.command", "OpenAI API in front of a running server"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    about = "Runs and examines disaggregated LLM serving on Triton."
    return dispatch("distserve", about, COMMANDS, argv)
