"""A client process that streams until it is killed: `python -m distserve_tools.chaos.victim URL N SEED`."""

from __future__ import annotations

import random
import sys
import threading

from distserve_tools.chaos.model import random_prompt
from distserve_tools.client import Client, RequestError


def main(url: str, streams: int, seed: int) -> None:
    """Prints a line when its streams begin."""

    def follow(number: int) -> None:
        rng = random.Random(seed * 1000 + number)
        while True:
            try:
                client.complete(random_prompt(rng.randrange(1, 150), rng), max_tokens=300, ignore_eos=True)
            except RequestError:
                return

    with Client(url) as client:
        threads = [threading.Thread(target=follow, args=(i,), daemon=True) for i in range(streams)]
        for thread in threads:
            thread.start()
        sys.stdout.write("streaming\n")
        sys.stdout.flush()
        for thread in threads:
            thread.join(120.0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
