"""The plain path runs without the mechanisms: their folders are not imported, and may be
missing."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

from nanoserve import LLM, SamplingParams

ROOT = Path(__file__).parent.parent.parent
MECHANISMS = [
    "executor.kv_transfer",
    "executor.cpu_attention",
    "executor.drafting",
    "executor.async_scheduling",
    "executor.canvas",
]
UNUSED = ["executor.workers", "executor.step.decode_graphs", "executor.start.gpu_start", "costs"]
UNUSED += ["models.gguf_file", "models.resharding", "models.dummy", "models.draft_heads"]
"""Other parts that an engine on one CPU does without."""
SETTINGS = {"eager": True, "kv_cache_memory": 1 << 24, "max_num_batched_tokens": 16}
QUESTION = [{"role": "user", "content": "Tell me a story about a cat."}]
PARAMS = [
    {"temperature": 0.0, "max_tokens": 12},
    {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 3, "max_tokens": 12},
]
CHAT = """
import json, sys
for name in json.loads(sys.argv[1]):
    sys.modules["nanoserve." + name] = None
from nanoserve import LLM, SamplingParams
question, params, settings = json.loads(sys.argv[2])
with LLM(**settings) as llm:
    answers = llm.chat([question] * len(params), [SamplingParams(**each) for each in params])
print(json.dumps([answer.outputs[0].token_ids for answer in answers]))
"""


def test_a_chat_needs_none_of_the_mechanisms() -> None:
    blocked = [*MECHANISMS, *UNUSED]
    for name in blocked:
        assert importlib.util.find_spec(f"nanoserve.{name}") is not None, (
            "a folder that has moved blocks nothing"
        )
    arguments = [json.dumps(blocked), json.dumps([QUESTION, PARAMS, SETTINGS])]
    ran = subprocess.run(
        [sys.executable, "-c", CHAT, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert ran.returncode == 0, ran.stderr
    with LLM(**SETTINGS) as llm:
        outputs = llm.chat([QUESTION] * len(PARAMS), [SamplingParams(**each) for each in PARAMS])
    assert json.loads(ran.stdout) == [list(output.outputs[0].token_ids) for output in outputs]
