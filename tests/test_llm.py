"""The offline API on the bundled model: what a Python user sees."""

import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import nanoserve
from nanoserve import LLM, SamplingParams
from nanoserve.errors import ModelError, RuntimeFailure, UsageError
from nanoserve.scheduler.plan import StepPlan, StepResult
from tests.fakes.integrity import check_integrity
from triton_ops.cpu import cpu_operators

BUNDLED = Path(nanoserve.__file__).parent / "assets" / "storyteller"
GREEDY = SamplingParams(temperature=0, max_tokens=12)
STORY = [
    {
        "role": "user",
        "content": "Tell me a story about a cat and a boat, and let it end well for all.",
    }
]


def _all_blocks_are_back(llm: LLM) -> bool:
    check_integrity(llm.engine.scheduler)
    pool = llm.engine.scheduler.pool
    return pool.free_blocks == pool.num_blocks and not llm.engine.has_work


def test_one_prompt_or_many_give_the_same(storyteller: LLM) -> None:
    prompts = ["Once upon a time", "The dog", "A"]
    together = storyteller.generate(prompts, GREEDY)
    assert [output.prompt for output in together] == prompts
    alone = [storyteller.generate(prompt, GREEDY)[0] for prompt in prompts]
    assert [output.outputs[0].token_ids for output in together] == [
        output.outputs[0].token_ids for output in alone
    ]
    ids = storyteller.generate(storyteller.tokenizer.encode("The dog"), GREEDY)
    assert ids[0].outputs[0].text == together[1].outputs[0].text
    assert _all_blocks_are_back(storyteller)


def test_how_far_a_prompt_is() -> None:
    """A step holds 16 tokens, so a prompt of 40 takes three. A sampled token needs all of them."""
    with LLM(max_num_batched_tokens=16, max_num_seqs=16) as llm:
        assert llm.prompt_progress() is None
        stream = llm.stream([5] * 40, SamplingParams(max_tokens=2))
        seen = [llm.prompt_progress()]
        submit = llm.engine.executor.submit

        def submitted(plan: StepPlan) -> None:
            submit(plan)
            seen.append(llm.prompt_progress())  # while the step is computed

        llm.engine.executor.submit = submitted  # type: ignore[method-assign]
        next(stream)
        assert seen == [(0, 40), (0, 40), (16, 40), (32, 40)]
        list(stream)
        assert llm.prompt_progress() is None


def test_a_start_that_waits_for_operators_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    operators = cpu_operators()
    if not operators.wait():
        pytest.skip(f"nothing can be built: {operators.problem}")
    # they are there: only the wait for them is looked at
    monkeypatch.setattr(type(operators), "pending", property(lambda _: True))
    monkeypatch.setattr(operators, "start", lambda **_: None)
    told: list[tuple[str, int, int]] = []
    with LLM(batch_invariant=True, dtype="bfloat16", progress=lambda *now: told.append(now)):
        assert told[-2:] == [("building operators", 0, 1), ("building operators", 1, 1)]
    assert told[0][0] == "loading"


def test_a_stream_adds_up_to_what_generate_gives(storyteller: LLM) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=30, logprobs=2)
    deltas = list(storyteller.stream("One day", params))
    whole = storyteller.generate("One day", params)[0].outputs[0]
    assert "".join(delta.outputs[0].text for delta in deltas) == whole.text
    assert sum((delta.outputs[0].token_ids for delta in deltas), ()) == whole.token_ids
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert whole.logprobs is not None
    for token, logprob in zip(whole.token_ids, whole.logprobs, strict=True):
        assert (
            logprob.token == token
            and logprob.logprob <= logprob.top[0][1] <= 0
            and len(logprob.top) == 2
        )


def test_arguments_of_the_chat_template_reach_it(storyteller: LLM) -> None:
    told = list(storyteller.stream(STORY, GREEDY, template_arguments={"enable_thinking": False}))
    assert told[-1].finished and told[-1].outputs[0].marks == ()
    with pytest.raises(UsageError, match="'messages' is set by nanoserve"):
        storyteller.stream(STORY, GREEDY, template_arguments={"messages": "x"})


def test_a_seed_gives_the_same_story_in_any_company(storyteller: LLM) -> None:
    params = SamplingParams(temperature=0.9, seed=11, n=2, max_tokens=25)
    alone = storyteller.chat(STORY, params)[0]
    crowd = storyteller.chat(
        [STORY, *([STORY] * 3)], [params, *[SamplingParams(max_tokens=20)] * 3]
    )[0]
    assert [sample.text for sample in alone.outputs] == [sample.text for sample in crowd.outputs]
    assert alone.outputs[0].text != alone.outputs[1].text, "samples of one request differ"


def test_the_second_turn_finds_the_first_in_the_cache(storyteller: LLM) -> None:
    first = storyteller.chat(STORY, GREEDY)[0]
    turns = [
        *STORY,
        {"role": "assistant", "content": first.outputs[0].text},
        {"role": "user", "content": "And then?"},
    ]
    second = storyteller.chat(turns, GREEDY)[0]
    assert second.cached_tokens >= len(first.prompt_token_ids) // 16 * 16 > 0


def test_stop_strings_end_a_sample_and_the_engines_work_on_it(storyteller: LLM) -> None:
    whole = (
        storyteller.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=60))[0]
        .outputs[0]
        .text
    )
    stop = whole[10:14]
    output = storyteller.generate(
        "Once upon a time", SamplingParams(temperature=0, max_tokens=60, stop=(stop,))
    )[0]
    assert output.outputs[0].text == whole[: whole.index(stop)]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    assert len(output.outputs[0].token_ids) < 60
    assert _all_blocks_are_back(storyteller)


def test_prompt_logprobs_cover_all_but_the_first_token(storyteller: LLM) -> None:
    prompt = storyteller.tokenizer.encode("The cat sat on the mat and the cat was happy.")
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    storyteller.generate(prompt, params)
    # not taken from the cache the second time
    scored = storyteller.generate(prompt, params)[0].prompt_logprobs
    assert scored is not None
    assert scored[0] is None
    assert [entry.token for entry in scored[1:] if entry] == prompt[1:]


def test_a_prompt_can_be_scored_without_an_answer(storyteller: LLM) -> None:
    prompt = storyteller.tokenizer.encode("The cat sat on the mat.")
    params = SamplingParams(n=2, max_tokens=0, prompt_logprobs=0)
    for tokens in (prompt, [300] * storyteller.built.max_model_len):
        output = storyteller.generate(tokens, params)[0]
        assert [(one.text, one.token_ids, one.finish_reason) for one in output.outputs] == [
            ("", (), "length")
        ] * 2
        assert [one.token for one in output.prompt_logprobs or () if one] == tokens[1:]
    assert _all_blocks_are_back(storyteller)


def test_nothing_listens_to_a_chat(storyteller: LLM) -> None:
    storyteller.chat([{"role": "user", "content": "Hello"}], SamplingParams(max_tokens=2))
    assert storyteller.engine.observers == storyteller.engine.scheduler.observers == []


def test_times_are_told(storyteller: LLM) -> None:
    metrics = storyteller.generate("Once", GREEDY)[0].outputs[0].metrics
    assert (
        metrics.queue_time is not None
        and metrics.time_to_first_token is not None
        and metrics.latency is not None
    )
    assert 0 <= metrics.queue_time <= metrics.time_to_first_token <= metrics.latency


@pytest.mark.parametrize("read_first", [True, False])
def test_closing_a_stream_aborts_the_request(storyteller: LLM, read_first: bool) -> None:  # noqa: FBT001
    stream = storyteller.stream("Once upon a time", SamplingParams(max_tokens=500, ignore_eos=True))
    if read_first:
        next(stream)
    stream.close()
    assert _all_blocks_are_back(storyteller)


def test_streams_may_be_read_alternately(storyteller: LLM) -> None:
    texts = ["The dog", "The cat"]
    expected = [output.outputs[0].text for output in storyteller.generate(texts, GREEDY)]
    streams = [storyteller.stream(text, GREEDY) for text in texts]
    got = ["", ""]
    for pair in zip(*streams, strict=True):
        for index, delta in enumerate(pair):
            got[index] += delta.outputs[0].text
    assert got == expected


def test_results_come_as_they_finish_and_a_refused_item_does_not_stop_the_rest(
    storyteller: LLM,
) -> None:
    items = [
        ("Once", SamplingParams(max_tokens=40, ignore_eos=True)),
        ("", None),
        ("Twice", GREEDY),
        (STORY, GREEDY),
    ]
    results = dict(storyteller.generate_as_completed(iter(items)))
    order = list(results)
    assert order[0] == 1, "a refusal is known at once"
    assert order[-1] == 0, "the longest is the last"
    assert isinstance(results[1], UsageError)
    assert _all_blocks_are_back(storyteller)


def test_who_watches_sees_what_each_step_of_a_batch_gained(storyteller: LLM) -> None:
    steps: list[int] = []
    items = [("Once", SamplingParams(max_tokens=12, ignore_eos=True))]
    ((_, output),) = storyteller.generate_as_completed(
        items,
        on_step=lambda updates: steps.append(sum(len(update.new_tokens) for update in updates)),
    )
    assert not isinstance(output, Exception)
    assert sum(steps) == len(output.outputs[0].token_ids) == 12
    assert len(steps) >= 12, "it is called between the steps, not when the row is done"


def test_a_batch_is_read_as_far_ahead_as_prompts_wait() -> None:
    read: list[int] = []

    def items() -> Iterator[tuple[str, SamplingParams]]:
        for number in range(20):
            read.append(number)
            yield "Once", GREEDY

    with LLM(max_num_seqs=2, eager=True) as llm:
        next(iter(llm.generate_as_completed(items())))
        assert len(read) <= 6, (
            "two run, two wait, and each of the first two may have made room for another"
        )


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("", "prompt is empty"),
        ([], "prompt is empty"),
        (
            "word " * 3000,
            r"the model's own limit is 1024 with at least one for the answer; shorten the prompt$",
        ),
        ([10**6], "not in the vocabulary"),
        (["a", 1], "text"),
    ],
)
def test_prompts_that_can_never_run_are_refused(
    storyteller: LLM, prompt: object, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        storyteller.generate([prompt], GREEDY)
    assert _all_blocks_are_back(storyteller)


def test_only_a_prompt_that_a_longer_context_holds_is_told_to_raise_its_limit() -> None:
    with LLM(eager=True, max_model_len=64) as llm:
        with pytest.raises(UsageError, match=r"the context holds 64 .* raise --max-model-len"):
            llm.generate([[5] * 1023], GREEDY)
        with pytest.raises(
            UsageError, match=r"the model's own limit is 1024 .* shorten the prompt$"
        ):
            llm.generate([[5] * 1024], GREEDY)


def test_prompts_run_in_the_order_of_their_priorities() -> None:
    with LLM(policy="sarathi:order=priority", max_num_seqs=1, eager=True) as llm:
        outputs = llm.generate(["a", "b", "c"], GREEDY, priority=[3, 1, 2], user="me")
        first, second, third = (
            output.outputs[0].metrics.first_scheduled_time for output in outputs
        )
        assert second < third < first  # type: ignore[operator]
        with pytest.raises(UsageError, match="3 prompts, but a list of 2 settings"):
            llm.generate(["a", "b", "c"], GREEDY, priority=[3, 1])
        assert _all_blocks_are_back(llm)


def test_params_must_be_one_or_one_for_each(storyteller: LLM) -> None:
    with pytest.raises(UsageError, match="2 prompts, but a list of 1 settings"):
        storyteller.generate(["a", "b"], [GREEDY])


def test_an_interrupt_waits_for_the_end_of_the_step_and_leaves_nothing_behind(
    storyteller: LLM,
) -> None:
    timer = threading.Timer(0.3, signal.raise_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        storyteller.generate("Once", SamplingParams(max_tokens=900, ignore_eos=True))
    timer.join()
    assert _all_blocks_are_back(storyteller)
    assert storyteller.generate("Once", GREEDY)[0].finished


def test_a_step_that_fails_ends_its_own_request_only(
    storyteller: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect = storyteller.engine.executor.collect

    def runs_out(until: float | None) -> list[StepResult]:
        monkeypatch.undo()
        collect(until)
        raise RuntimeFailure("out of memory: lower --max-num-batched-tokens")

    monkeypatch.setattr(storyteller.engine.executor, "collect", runs_out)
    failed = storyteller.generate("Once", GREEDY)[0].outputs[0]
    assert (failed.finish_reason, failed.error) == (
        "error",
        "out of memory: lower --max-num-batched-tokens",
    )
    assert _all_blocks_are_back(storyteller)
    assert storyteller.generate("Once", GREEDY)[0].outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kv_cache_memory": 1}, "--kv-cache-memory"),
        ({"kv_cache_memory": 2**49}, "--kv-cache-memory"),
        ({"max_model_len": 10**6}, "--max-model-len"),
        ({"max_model_len": 1}, "max_model_len must be from 2"),
        ({"block_size": 0}, "block_size must be from 1"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens"),
        ({"policy": "fifo"}, "unknown policy"),
        ({"dtype": "int3"}, "dtype"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        LLM(**settings)
    assert "\n" not in str(caught.value)


def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for name in (tmp_path, tmp_path / "nothing", tmp_path / ("long" * 100), "dummy:no-such-shape"):
        with pytest.raises(ModelError):
            LLM(name)


def test_impossible_sampling_defaults_are_the_fault_of_the_model(tmp_path: Path) -> None:
    model = Path(shutil.copytree(BUNDLED, tmp_path / "model"))
    (model / "generation_config.json").write_text('{"repetition_penalty": 0}')
    with pytest.raises(ModelError) as caught:
        LLM(model)
    assert str(caught.value).startswith(
        f"{model}/generation_config.json: repetition_penalty must be a number above 0"
    )


def test_a_dummy_of_a_real_shape_runs() -> None:
    with LLM("dummy:smollm2-135m", max_model_len=64, kv_cache_memory=8 << 20) as llm:
        assert llm.built.model.num_layers == 30
        assert len(llm.generate([1, 2, 3], GREEDY)[0].outputs[0].token_ids) == 12


def test_the_first_token_does_not_wait_for_torchs_compiler_to_be_imported() -> None:
    program = (
        "import sys\n"
        "from nanoserve import LLM\n"
        "with LLM() as llm:\n"
        "    next(llm.stream('Once'))\n"
        "print(*(name for name in ('torch._dynamo', 'torch._inductor', 'sympy') if name in "
        "sys.modules))\n"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout
        == "\n"
    )


def test_eager_means_that_nothing_is_compiled() -> None:
    with LLM(eager=True, kv_cache_memory=16 << 20) as llm:
        llm.built.start_preparing()
        llm.built.prepare()
        assert len(llm.generate("Once upon a time", GREEDY)[0].outputs[0].token_ids) == 12
        assert not llm.built.compiled


@pytest.mark.slow
def test_prepared_means_compiled_with_the_same_tokens(storyteller: LLM) -> None:
    if not cpu_operators().wait():
        pytest.skip(f"nothing can be built: {cpu_operators().problem}")
    stages = []
    with LLM(dtype="float32", kv_cache_memory=16 << 20) as llm:
        llm.built.prepare(lambda stage, done, total: stages.append((stage, done, total)))
        assert llm.built.compiled
        # compiled before, or now
        assert stages in ([], [("compiling layers", 0, 1), ("compiling layers", 1, 1)])
        llm.built.prepare(lambda *_: pytest.fail("nothing is left to prepare"))
        tokens = [llm.chat(STORY, GREEDY)[0].outputs[0].token_ids]
    assert tokens == [storyteller.chat(STORY, GREEDY)[0].outputs[0].token_ids]


@pytest.fixture(scope="module")
def as_others_save_it(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The bundled model with the end tokens of the model that it was trained from, and a tokenizer
    that got a token of padding, for which the embedding has no row."""
    directory = shutil.copytree(BUNDLED, tmp_path_factory.mktemp("saved") / "storyteller")
    for name in ("config.json", "generation_config.json"):
        config = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps(config | {"eos_token_id": 0}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        settings = json.loads((directory / name).read_text())
        if name == "tokenizer.json":
            settings["added_tokens"].append(
                settings["added_tokens"][0] | {"id": 4096, "content": "[PAD]", "special": False}
            )
        settings.pop("eos_token", None)
        (directory / name).write_text(json.dumps(settings))
    with LLM(directory, dtype="float32", kv_cache_memory=64 << 20, seed=7, eager=True) as llm:
        yield llm


def test_a_chat_ends_its_turn_whatever_the_configuration_says(as_others_save_it: LLM) -> None:
    end_of_turn = as_others_save_it.tokenizer.encode_chat(STORY, add_generation_prompt=False)[-1]
    assert as_others_save_it.built.model.eos_token_ids == (0,) != (end_of_turn,)
    params = SamplingParams(temperature=0, max_tokens=4, logit_bias={end_of_turn: 100.0})
    sample = as_others_save_it.chat(STORY, params)[0].outputs[0]
    assert (sample.text, sample.finish_reason) == ("", "stop")


def test_a_prompt_with_a_token_that_the_model_lacks_is_refused(as_others_save_it: LLM) -> None:
    assert as_others_save_it.tokenizer.vocab_size == as_others_save_it.built.model.vocab_size + 1
    with pytest.raises(
        UsageError, match="the prompt: token id 4096 is not in the vocabulary of 4096"
    ):
        as_others_save_it.generate("Once[PAD]", GREEDY)
    schema = SamplingParams(temperature=0, max_tokens=20, json_schema='{"type": "boolean"}')
    assert as_others_save_it.generate("Once", schema)[0].outputs[0].text.strip() in (
        "true",
        "false",
    )


def test_an_engine_that_finds_no_user_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker processes would go on until somebody collects the garbage."""
    closed = []
    monkeypatch.setattr(
        "nanoserve.engine.engine.Engine.close", lambda engine: closed.append(engine)
    )

    def refuse(*_: object) -> None:
        raise ModelError("the tokenizer does not fit")

    monkeypatch.setattr("nanoserve.llm.GrammarChecker", refuse)
    with pytest.raises(ModelError, match="does not fit"):
        LLM(eager=True, kv_cache_memory=1 << 20, max_model_len=64)
    assert len(closed) == 1


def test_variables_are_for_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOSERVE_BLOCK_SIZE", "32")
    monkeypatch.setenv("NANOSERVE_POLICY", "no such policy")
    with LLM() as llm:
        assert (llm.built.config.block_size, llm.built.config.policy) == (16, None)
