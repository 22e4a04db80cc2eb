"""A plan whose work was handed to the device, and the answers that come of it once the results are on the host."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
from torch import Tensor

from nanoserve.request import TokenLogprob
from nanoserve.runtime.sampling.logprobs import LogprobColumns
from nanoserve.runtime.sampling.sampler import SamplingState
from nanoserve.runtime.step.device_to_host import DeviceToHostCopy
from nanoserve.scheduler.plan import Answer

NOT_NUMBERS = "the model's logits are not numbers (NaN or infinite), or no token was left to sample"


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """The prompt tokens that one row's logits predict, on the host soon."""

    sequence: int
    parts: Sequence[LogprobColumns]
    """Their log probabilities, some positions after the other."""
    finite: Sequence[Tensor]
    """bool [] for each part, whether its logits are numbers."""
    top: int
    """How many of the likeliest tokens to name."""

    def answer(self) -> Answer:
        """What is said of the prompt alone."""
        if not all(finite.item() for finite in self.finite):
            return Answer(self.sequence, error=NOT_NUMBERS)
        logprobs = [logprob for part in self.parts for logprob in part.rows([self.top] * len(part.tokens))]
        return Answer(self.sequence, prompt_logprobs=tuple(logprobs))


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens of N sampled rows, on the host soon."""

    sequences: Sequence[int]
    states: Sequence[SamplingState]
    """Of each row."""
    tokens: Tensor
    """int64 [N]."""
    valid: Tensor
    """bool [N]."""
    asked: Sequence[tuple[int, int]]
    """Places of rows that want log probabilities, each with how many of the likeliest tokens to name."""
    logprobs: LogprobColumns | None
    """Of these rows."""

    def answers(self) -> Iterator[Answer]:
        """One for each row; the states take note of the tokens."""
        logprobs = self._logprobs()
        columns = zip(self.sequences, self.states, self.tokens.tolist(), self.valid.tolist(), strict=True)
        for place, (sequence, state, token, valid) in enumerate(columns):
            if valid:
                state.append(token)
            grammar = state.grammar
            error = None if grammar is None else grammar.error
            if error is not None or not valid:
                yield Answer(sequence, error=error or NOT_NUMBERS)
                continue
            complete = grammar is not None and grammar.complete
            yield Answer(sequence, (token,), logprobs.get(place, ()), complete=complete)

    def _logprobs(self) -> dict[int, tuple[TokenLogprob]]:
        if self.logprobs is None:
            return {}
        rows = self.logprobs.rows([top for _, top in self.asked])
        return {place: (logprob,) for (place, _), logprob in zip(self.asked, rows, strict=True)}


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """What a plan asked for, while the device works on it."""

    fetching: DeviceToHostCopy
    prompts: Sequence[ScoredPrompt] = ()
    sampled: SampledTokens | None = None

    def answers(self) -> tuple[Answer, ...]:
        """Wait for the device; then one answer for each row that has something to say. To be asked once."""
        self.fetching.wait()
        answers = {scored.sequence: scored.answer() for scored in self.prompts}
        if self.sampled is not None:
            for answer in self.sampled.answers():
                earlier = answers.get(answer.sequence)
                answers[answer.sequence] = _joined(earlier, answer) if earlier else answer
        return tuple(answers.values())


def _joined(prompt: Answer, sampled: Answer) -> Answer:
    """One answer of a row that has prompt log probabilities and a sampled token; an error of either is the error."""
    if error := prompt.error or sampled.error:
        return Answer(sampled.sequence, error=error)
    return msgspec.structs.replace(sampled, prompt_logprobs=prompt.prompt_logprobs)
