"""A program whose two simulations never end: what becomes of their processes when it is killed?"""

import time
from dataclasses import dataclass

from nanoserve.lab.papers.running import Runner


@dataclass(frozen=True)
class Endless:
    number: int

    def run(self) -> None:
        # in one write, so that the lines of two processes do not mix
        print("runs\n", end="", flush=True)
        while True:
            time.sleep(1)


if __name__ == "__main__":
    with Runner(2) as runner:
        runner.run([Endless(0), Endless(1)])
