"""The process that ``bench startup`` starts: it says on its last line when it reached each stage.

Arguments: the time on the monotonic clock when the parent started it, the model and LLM's settings, both in JSON.
"""

import json
import sys
import time

PROMPT = tuple(range(5, 21))
TOKENS = ("first token", "second token", "third token")


def main(began: float, model: str | None, settings: dict[str, object]) -> dict[str, float]:
    """Import, load, answer; returns seconds since ``began`` at the end of each stage."""
    marks = {"python": time.monotonic() - began}

    import torch  # noqa: F401  (importing it is what is timed)

    marks["import torch"] = time.monotonic() - began

    from nanoserve.llm import LLM
    from nanoserve.request import SamplingParams

    marks["import nanoserve"] = time.monotonic() - began
    with LLM(model, **settings) as llm:
        marks["load"] = time.monotonic() - began
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=len(TOKENS))
        for name, _ in zip(TOKENS, llm.stream(PROMPT, params), strict=True):
            marks[name] = time.monotonic() - began
    return marks


if __name__ == "__main__":
    print("\n" + json.dumps(main(float(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]))))
