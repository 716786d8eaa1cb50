"""A deployment on two hosts, whose link is cut in mid-transfer and in mid-decode: run in a network namespace,
with the folder that `test_network_cut` has prepared.

What it asserts: requests that a cut meets are continued or end with one clear error, in time, and once the
link is back everything is as before.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from namespaces import A, TwoHosts
from node_process import NodeProcess, until, usable

from distserve_tools.client import Client, RequestError

START_S = 120.0
BACK_S = 90.0
EARLY_S = 0.5  # what comes so soon after the cut was on its way before
DEADLINE_S = 100.0  # of a request that a cut has met
CUTS = {"transfer": (1, 16, False), "decode": (6, 600, True)}  # see `cut_after`


@dataclass
class Scenario:
    network: TwoHosts
    nodes: list[NodeProcess]
    client: Client
    prompt: list[int]
    expected: list[int]
    continues: bool  # one node can go on alone

    def start(self) -> dict[str, Any]:
        return until(lambda: usable(self.client), START_S, self.nodes)

    def serves(self) -> None:
        answer = self.client.complete(self.prompt, DEADLINE_S, max_tokens=8, temperature=0.0, ignore_eos=True)
        assert list(answer.token_ids) == self.expected[:8], answer

    def cut_after(self, tokens: int, max_tokens: int, frozen: bool) -> str:
        """Cuts the link once a request has given so many tokens; says what became of the request. `frozen`:
        the engine of b stands still from then until the link is cut, or it might come to its end before.
        """
        engines = [process.pid for process in self.nodes[1].processes("distserve.engine")] if frozen else []
        settings = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
        found: list[int] = []
        began = time.monotonic()
        cut, early = False, 0
        try:
            for chunk in self.client.stream(self.prompt, DEADLINE_S, **settings):
                found += chunk.token_ids
                if len(found) >= tokens and not cut:
                    for pid in engines:
                        os.kill(pid, signal.SIGSTOP)
                    self.network.cut()
                    for pid in engines:
                        os.kill(pid, signal.SIGCONT)
                    began, cut = time.monotonic(), True
                elif cut and time.monotonic() - began < EARLY_S:
                    early = len(found)
            outcome = "continued"
        except RequestError as error:
            outcome = f"failed with {error.code}: {error}"
        assert cut, f"the request has ended before the cut: {outcome}, {len(found)} of {max_tokens} tokens"
        assert outcome == "continued" or outcome.startswith("failed with UNAVAILABLE"), outcome
        assert found == self.expected[: len(found)], (found, self.expected)  # no token twice, none left out
        assert time.monotonic() - began < DEADLINE_S
        if outcome == "continued":
            assert len(found) == max_tokens
            assert early < max_tokens, "all tokens were there before the cut"
        return (
            f"{outcome} {time.monotonic() - began:.1f} s after the cut, {len(found)} of {max_tokens} tokens"
        )

    def mend(self) -> float:
        began = time.monotonic()
        self.network.mend()
        until(lambda: usable(self.client), BACK_S, self.nodes)
        self.serves()
        return time.monotonic() - began


def run(folder: Path) -> None:
    spec = json.loads((folder / "scenario.json").read_text())
    with ExitStack() as stack:
        network = stack.enter_context(TwoHosts(spec["rate"]))
        nodes = []
        for name, prefix in (("a", []), ("b", network.on_b)):
            nodes.append(NodeProcess(folder / "repository", name, folder, prefix))
            stack.callback(nodes[-1].stop)
        client = stack.enter_context(Client(f"{A}:{spec['grpc_port']}"))
        scenario = Scenario(network, nodes, client, spec["prompt"], spec["expected"], spec["continues"])
        began = time.monotonic()
        scenario.start()
        print(f"limited: {network.limited}; up after {time.monotonic() - began:.1f} s", flush=True)
        scenario.serves()
        for what in spec["cuts"]:
            outcome = scenario.cut_after(*CUTS[what])
            print(f"cut in mid-{what}: {outcome}; back after {scenario.mend():.1f} s", flush=True)
            assert outcome.startswith("continued") or not scenario.continues, outcome


if __name__ == "__main__":
    run(Path(sys.argv[1]))
