"""Speculative decoding beside plain decoding, in interleaved rounds, and what the acceptance
formula predicts."""

import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import eq
from typing import Any

from msgspec.structs import replace

from nanoserve.lab.benchmarks.driving import EngineDriver
from nanoserve.lab.benchmarks.machine import ForeignLoad
from nanoserve.lab.benchmarks.policies.rounds import PolicyRound, ratios, summarize
from nanoserve.lab.benchmarks.roofline import BandwidthProbe
from nanoserve.lab.benchmarks.rounds import Repeating, bracket, most_known, rotated
from nanoserve.lab.workloads import BatchCase, random_prompts
from nanoserve.llm import LLM
from nanoserve.record.metrics import BatchRates
from nanoserve.request import SamplingParams
from nanoserve.request import Sequence as RunningSequence
from nanoserve.scheduler.predictor import Predictor
from nanoserve.scheduler.speculation.draft_lengths import COUNTS, expected_tokens, step_seconds
from nanoserve.scheduler.speculation.draft_proposer import DraftProposer
from nanoserve.scheduler.speculation.ngram import NgramIndex
from nanoserve.scheduler.work import StepWork

RATES = {"scripted 0": 0.0, "scripted 0.6": 0.6, "scripted 0.8": 0.8}
"""How often each draft token of a scripted drafter is right, given that the draft tokens before it
are."""
WORKLOADS = ["edits", "stories", "random"] + list(RATES)
_PERIOD = 24
"""Tokens of a text that is repeated, for models that go on with it. Other models may repeat what
they say."""


class Scripted(DraftProposer):
    """Proposes what plain decoding answered to these prompts. Each draft token is right with
    probability ``rate``."""

    def __init__(
        self,
        rate: float,
        answers: Mapping[tuple[int, ...], tuple[int, ...]],
        *,
        vocab_size: int,
        token_budget: int,
    ) -> None:
        super().__init__(looks_up=True, token_budget=token_budget)
        self._rate, self._answers, self._vocab_size = rate, answers, vocab_size
        self._random = random.Random(0)

    def _look_up(self, sequence: RunningSequence, record: object, most: int) -> tuple[int, ...]:
        begin = sequence.output_length
        known = self._answers[sequence.request.prompt][begin : begin + max(0, most)]
        return tuple(
            (token + (self._random.random() >= self._rate)) % self._vocab_size for token in known
        )


class SpeculationBench:
    """Measures two open engines of the same model, of which the second drafts."""

    def __init__(self, plain: LLM, speculating: LLM) -> None:
        self._plain, self._budget = plain, speculating.built.config.max_num_batched_tokens
        self._drivers = {
            "plain": EngineDriver(plain.engine),
            "speculative": EngineDriver(speculating.engine),
        }
        drafts = speculating.engine.scheduler.extensions.drafts
        assert drafts is not None, "the second engine drafts"
        self._scheduler, self._drafts, self._own = (
            speculating.engine.scheduler,
            drafts,
            drafts.proposer,
        )
        self._probe, self._foreign = BandwidthProbe().read, ForeignLoad()

    def rounds(
        self, workload: str, case: BatchCase, wanted: int, repeating: Repeating
    ) -> Iterator[PolicyRound]:
        """Rounds of a case as they are done, after one run of each engine that is not measured."""
        lengths, rate = [case.output_tokens] * case.batch, RATES.get(workload)
        greedy, defaults = SamplingParams(temperature=0.0), self._plain.default_sampling_params()
        params = {"edits": greedy, "stories": defaults}.get(
            workload, SamplingParams(temperature=1.0)
        )
        prompts = self._prompts(workload, case)
        known = dict(
            zip(prompts, self._drivers["plain"].run(prompts, lengths, params).tokens, strict=True)
        )
        self._drafts.proposer = self._own
        if rate is not None:
            size = self._plain.built.model.vocab_size
            self._drafts.proposer = Scripted(
                rate, known, vocab_size=size, token_budget=self._budget
            )
        self._drivers["speculative"].run(prompts, lengths, params)

        def one_round(number: int) -> PolicyRound:
            runs, loads = {}, []
            with bracket(f"{workload}, {case.name}", number, self._probe) as fields:
                for name, driver in rotated(self._drivers.items(), number - 1):
                    self._foreign.read()
                    runs[name] = driver.run(prompts, lengths, params)
                    loads.append(self._foreign.read())
            rates = {name: BatchRates.of(run.timings).decode or 0.0 for name, run in runs.items()}
            plain, speculating = (
                chain.from_iterable(runs[name].tokens) for name in ("plain", "speculative")
            )
            same = list(map(eq, plain, speculating))
            rows = sum(step.work.decodes for step in runs["speculative"].steps)
            figures: dict[str, Any] = {"decode": rates["speculative"], "plain": rates["plain"]}
            figures |= {
                "tokens_a_step": (len(same) - case.batch) / rows,
                "same_tokens": statistics.mean(same),
            }
            if rate is not None:
                contexts = [case.input_tokens + case.output_tokens // 2] * case.batch
                figures["predicted"] = predicted_speedup(
                    rate, contexts, self._scheduler.predictors[0]
                )
                figures["of_predicted"] = (
                    rates["speculative"] / rates["plain"] / figures["predicted"]
                )
            variants = {"plain": {"decode": rates["plain"]}, "speculative": figures}
            return PolicyRound(**fields, foreign_cores=most_known(loads), variants=variants)

        return repeating.rounds(one_round, wanted)

    def _prompts(self, workload: str, case: BatchCase) -> list[tuple[int, ...]]:
        """Random tokens, or texts by the model itself: beginnings of answers in its chat format,
        or, for edits, beginnings of stories in a loop and what greedy decoding has come to, of
        which those are taken whose answers repeat most."""
        llm, size, length = self._plain, case.batch, case.input_tokens
        if workload not in ("edits", "stories"):
            return random_prompts([length] * size, llm.built.model.vocab_size, size)
        params = replace(llm.default_sampling_params(), ignore_eos=True, max_tokens=length)
        seeds = range(2 * size + 14)
        asked: str | list[int] = "Once upon a time"
        if workload == "stories" and llm.tokenizer.has_chat_template:
            asked = llm.tokenizer.encode_chat([{"role": "user", "content": "Tell me a story."}])
        outputs = llm.generate(
            [asked for _ in seeds], [replace(params, seed=seed) for seed in seeds]
        )
        stories = [(one.prompt_token_ids + one.outputs[0].token_ids)[:length] for one in outputs]
        if workload == "stories":
            return stories[:size]
        run = self._drivers["plain"].run
        longer = run(stories, [2 * length] * len(stories)).tokens
        tails = [(story + more)[-length:] for story, more in zip(stories, longer, strict=True)]
        texts = tails + [(story[:_PERIOD] * length)[:length] for story in stories]
        answers = run(texts, [case.output_tokens] * len(texts)).tokens
        repeated = {
            text: _repeated(text, answer) for text, answer in zip(texts, answers, strict=True)
        }
        return sorted(texts, key=repeated.__getitem__, reverse=True)[:size]


def _repeated(prompt: tuple[int, ...], answer: tuple[int, ...]) -> int:
    """How many tokens of the answer are what followed when the tokens before them last came."""
    index, known = NgramIndex(), prompt + answer
    return sum(
        index.propose(known[:place], 1) == (known[place],)
        for place in range(len(prompt), len(known))
    )


def predicted_speedup(rate: float, contexts: Sequence[int], predictor: Predictor) -> float:
    """E(α, k) T(step) / T(step with k draft tokens a row), for the best k: what speculation gains
    if drafting costs nothing."""
    seconds = step_seconds(predictor, StepWork.of(contexts))
    return max(expected_tokens(rate, k) * seconds(0) / seconds(k * len(contexts)) for k in COUNTS)


def summarize_speculation(rounds: Sequence[PolicyRound]) -> list[dict[str, Any]]:
    """For every case and bandwidth state: medians over the counting rounds, and the speedup with
    its spread."""
    rows = []
    for case in dict.fromkeys(done.case for done in rounds):
        several = [done for done in rounds if done.case == case]
        texts = {
            one.state: one.text
            for one in ratios(several, [("", "speculative", "plain")], ["decode"])
        }
        found = [row for row in summarize(several) if row["variant"] == "speculative"]
        rows += [{**row, "case": case, "speedup": texts[row["state"]]} for row in found]
    return rows
