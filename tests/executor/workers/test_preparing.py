"""`BuiltEngine.prepare` where the layers are those of worker processes."""

import pytest

from nanoserve import LLM, SamplingParams
from tests.processes import MARK, kill, new_mark, workers

SETTINGS = {"dtype": "float32", "kv_cache_memory": 1 << 20, "max_model_len": 128}
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


def story(llm: LLM) -> tuple[int, ...]:
    return llm.generate("Once upon a time", GREEDY)[0].outputs[0].token_ids


@pytest.mark.slow
def test_a_worker_that_dies_meanwhile_is_missed_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = new_mark()
    monkeypatch.setenv(MARK, mark)
    with LLM(**SETTINGS, eager=True, pipeline_parallel=2) as llm:
        expected = story(llm)
        kill(workers(mark)[1])
        llm.built.prepare()
        assert not llm.built.compiled
        assert story(llm) == expected
        assert llm.engine.losses == 1
        llm.built.prepare()
    assert workers(mark) == []
