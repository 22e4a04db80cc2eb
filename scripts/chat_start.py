"""How long a chat takes to its prompt, and from Enter to the first word: `python -m
scripts.chat_start [ROUNDS]`.

Each round starts `nanoserve chat` on a pseudo-terminal twice. One message is sent after 1.5 s of
typing, one at once.
"""

import os
import pty
import re
import select
import statistics
import sys
import time

TYPING_SECONDS = (1.5, 0.0)
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PATIENCE = 60.0


def times(typing: float) -> tuple[float, float]:
    """Seconds from the start to the prompt, and from Enter to the first word of a story."""
    began, shown = time.monotonic(), ""
    process, terminal = pty.fork()
    if process == 0:
        settings = {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "COLUMNS": "80", "LINES": "24"}
        words = [sys.executable, "-m", "nanoserve", "chat", "--no-history"]
        os.execve(sys.executable, words, os.environ | settings)

    def wait_for(pattern: str, start: int = 0) -> float:
        nonlocal shown
        while not re.search(pattern, _ESCAPES.sub("", shown[start:])):
            assert time.monotonic() - began < _PATIENCE, shown
            if select.select([terminal], [], [], 0.1)[0]:
                shown += os.read(terminal, 65536).decode(errors="replace")
        return time.monotonic()

    prompt = wait_for(">>>") - began
    time.sleep(typing)
    os.write(terminal, b"tell me a story about a dog\r")
    sent = time.monotonic()
    first = wait_for("(Once|One|There)", len(shown)) - sent
    os.kill(process, 9)
    os.waitpid(process, 0)
    os.close(terminal)
    return prompt, first


def main(rounds: int) -> None:
    found = [[times(typing) for typing in TYPING_SECONDS] for _ in range(rounds)]
    for typing, pairs in zip(TYPING_SECONDS, zip(*found, strict=True), strict=True):
        for what, seconds in zip(("prompt", "first word"), zip(*pairs, strict=True), strict=True):
            spread = f"{min(seconds):.2f}-{max(seconds):.2f}"
            print(f"typing {typing} s: {what} {statistics.median(seconds):.2f} s ({spread})")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
