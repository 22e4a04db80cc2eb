"""The process that ``bench startup`` starts: it says on its last line when it reached each stage, and what then ran.

Arguments: the time on the monotonic clock when the parent started it, the model and LLM's settings, both in JSON.
"""

import json
import sys
import time
from typing import Any

PROMPT = tuple(range(5, 21))
TOKENS = ("first token", "second token", "third token")
PREPARATIONS = {"building operators": "build operators", "compiling layers": "compile layers"}


def main(began: float, model: str | None, settings: dict[str, object]) -> dict[str, Any]:
    """Import, load, answer, and then wait for what was built meanwhile.

    Returns seconds since ``began`` at the end of each stage ("marks"), and what runs from then on ("operators",
    "layers").
    """
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
        answered = time.monotonic() - began
        llm.prepare(lambda stage, *_: marks.update({PREPARATIONS[stage]: time.monotonic() - began}))
        for name in PREPARATIONS.values():  # one that took no time was not spoken of
            answered = marks.setdefault(name, answered)

        from nanoserve.benchmarks.settling import settle_operators

        return {
            "marks": marks,
            "operators": settle_operators(lambda _: None),
            "layers": "compiled" if llm.compiled else "eager",
        }


if __name__ == "__main__":
    print("\n" + json.dumps(main(float(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]))))
