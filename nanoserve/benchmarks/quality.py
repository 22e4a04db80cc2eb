"""Whether the outputs are as good as the reference's: perplexity of a text, and right answers to questions.

Both engines get the same token ids; nanoserve's tokenizer serves both, so only the computing is compared.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import eq
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from nanoserve.errors import UsageError
from nanoserve.processes.files import read_text
from nanoserve.request import SamplingParams

if TYPE_CHECKING:
    from nanoserve.llm import LLM

STOP = "\nQuestion:"
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_GOLD_MARK = "####"


class Reader(Protocol):
    """An engine as this benchmark uses it."""

    name: str

    def log_likelihood(self, tokens: tuple[int, ...]) -> float:
        """Sum of the natural log probabilities of all tokens but the first, each given those before it."""

    def answer(self, tokens: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
        """The greedy continuation of at most ``max_tokens`` tokens, without the end token."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question in GSM8K's form: free text, and a worked answer that ends in "#### 18"."""

    question: str
    answer: str

    @property
    def gold(self) -> str:
        return _normalized(self.answer.rpartition(_GOLD_MARK)[2])


def read_questions(path: Path, limit: int) -> list[Question]:
    """The first rows of a JSONL file of {"question": ..., "answer": "... #### 18"}.

    Raises UsageError naming the file and the first row that is none.
    """
    lines = enumerate(read_text(path, UsageError).splitlines(), start=1)
    rows = islice(((line, f"{path}, row {number}") for number, line in lines if line.strip()), limit)
    questions = [_question(line, place) for line, place in rows]
    if not questions:
        raise UsageError(f"{path} holds no questions")
    return questions


def _question(line: str, place: str) -> Question:
    try:
        question = msgspec.json.decode(line, type=Question)
    except msgspec.ValidationError as error:
        raise UsageError(f'{place}: not an object with the texts "question" and "answer"') from error
    except msgspec.DecodeError as error:
        raise UsageError(f"{place}: not JSON ({error})") from error
    if not question.gold or _GOLD_MARK not in question.answer:
        raise UsageError(f'{place}: the answer does not end in "{_GOLD_MARK}" and a number')
    return question


def prompt_text(question: Question, examples: Sequence[Question]) -> str:
    """The examples with their answers, then the question without one."""
    shown = "".join(f"Question: {example.question}\nAnswer: {example.answer}\n\n" for example in examples)
    return f"{shown}Question: {question.question}\nAnswer:"


def extract_answer(text: str) -> str | None:
    """The number behind "####", or else the last number before a new question; None if there is no number."""
    text = text.partition(STOP)[0]
    marked = _NUMBER.search(text.partition(_GOLD_MARK)[2])
    numbers = [marked[0]] if marked else _NUMBER.findall(text)
    return _normalized(numbers[-1]) if numbers else None


def _normalized(number: str) -> str:
    plain = number.strip().replace(",", "").replace("$", "").rstrip(".")
    try:
        value = float(plain)
    except ValueError:
        return ""
    return f"{value:g}" if abs(value) < 1e6 else plain


def windows(tokens: Sequence[int], length: int, limit: int) -> list[tuple[int, ...]]:
    """The text in pieces of ``length`` tokens, the first ``limit`` of them; the last may be shorter.

    Raises UsageError if the text has fewer than two tokens.
    """
    pieces = [tuple(tokens[start : start + length]) for start in range(0, len(tokens), length)]
    pieces = [piece for piece in pieces[:limit] if len(piece) > 1]
    if not pieces:
        raise UsageError("the text is too short: perplexity needs at least two tokens")
    return pieces


def perplexity(reader: Reader, pieces: Iterable[tuple[int, ...]]) -> float:
    """exp of the mean negative log probability of every token that has one before it in its window."""
    found = [(reader.log_likelihood(piece), len(piece) - 1) for piece in pieces]
    likelihood, predicted = map(sum, zip(*found, strict=True))
    return math.exp(-likelihood / predicted)


def compare_answers(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    """Shares of the questions on which both gave the same number, and the same tokens."""
    shares = {"same_answer": "answers", "same_tokens": "tokens"}
    return {share: mean(map(eq, ours[name], theirs[name])) for share, name in shares.items()}


class NanoserveReader:
    """An open LLM."""

    name = "nanoserve"

    def __init__(self, llm: "LLM") -> None:
        self._llm = llm

    def log_likelihood(self, tokens: tuple[int, ...]) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
        scored = self._llm.generate(list(tokens), params)[0].prompt_logprobs or ()
        return sum(entry.logprob for entry in scored if entry is not None)

    def answer(self, tokens: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
        output = self._llm.generate(list(tokens), SamplingParams(temperature=0.0, max_tokens=max_tokens))[0].outputs[0]
        return output.token_ids[:-1] if output.finish_reason == "stop" else output.token_ids


class TransformersReader:
    """A checkpoint directory, read by transformers."""

    name = "transformers"

    def __init__(self, directory: Path, dtype: str, end_tokens: tuple[int, ...]) -> None:
        import torch

        from nanoserve.benchmarks.peers.engine_peers import open_transformers

        self._end_tokens, self._tensor = end_tokens, torch.tensor
        self._model = open_transformers(directory, dtype, list(end_tokens) or None).requires_grad_(False)

    def log_likelihood(self, tokens: tuple[int, ...]) -> float:
        ids = self._tensor([tokens])
        logprobs = self._model(ids).logits[0, :-1].float().log_softmax(-1)
        return float(logprobs.gather(1, ids[0, 1:, None]).double().sum())

    def answer(self, tokens: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
        ids = self._tensor([tokens])
        settings = {"max_new_tokens": max_tokens, "do_sample": False, "pad_token_id": 0}
        output = self._model.generate(ids, attention_mask=ids.new_ones(ids.shape), **settings)
        answer = tuple(output[0, ids.shape[1] :].tolist())
        return answer[:-1] if answer and answer[-1] in self._end_tokens else answer
