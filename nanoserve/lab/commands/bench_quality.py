"""``nanoserve bench quality``: are the outputs as good as those of Hugging Face transformers?

It compares the perplexity of a text, and right answers to questions. Both engines get the same
token ids; nanoserve's tokenizer serves both, so only the computing is compared.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import eq
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec

import nanoserve
from nanoserve.commands.calibration import Tokens, windows
from nanoserve.commands.engine_options import EngineOptions
from nanoserve.commands.options import file_option, option
from nanoserve.commands.progress import watched
from nanoserve.commands.tables import Column, columns
from nanoserve.commands.terminal import remark
from nanoserve.errors import UsageError
from nanoserve.lab.benchmarks.peers.process import PEERS
from nanoserve.lab.benchmarks.plots import text_bars
from nanoserve.lab.benchmarks.report import Report
from nanoserve.lab.charts import Chart, draw
from nanoserve.lab.commands.bench_options import ResultOptions, print_results
from nanoserve.request import SamplingParams
from nanoserve.utils.files import read_text

STOP = "\nQuestion:"
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_GOLD_MARK = "####"
_AXES = {
    "perplexity": "perplexity of a token, lower is better",
    "accuracy": "share of right answers",
}
_VALUE = Column("value", "value", ".5f")
_COLUMNS = columns(("", ("measure", "case"), "engine"), (",d", ("tokens or questions", "count")))
_COLUMNS += [_VALUE] + columns((".0%", "same_answer", "same_tokens"))


class Reader(NamedTuple):
    name: str
    log_likelihood: Callable[[Tokens], float]
    """Sum of the natural log probabilities of all tokens but the first, each given those before
    it."""
    # the greedy continuation of at most so many tokens, without the end token
    answer: Callable[[Tokens, int], Tokens]


@dataclass(frozen=True, slots=True)
class Question:
    """A question in GSM8K's form: free text, and a worked answer that ends in "#### 18"."""

    question: str
    answer: str

    @property
    def gold(self) -> str:
        return _normalized(self.answer.rpartition(_GOLD_MARK)[2])


def read_questions(path: Path, limit: int) -> list[Question]:
    """The first rows of a JSONL file of {"question": ..., "answer": "... #### 18"}. Raises
    UsageError, which names the file and the first row that is none."""
    questions: list[Question] = []
    rows = [
        row
        for row in enumerate(read_text(path, UsageError).splitlines(), start=1)
        if row[1].strip()
    ]
    for number, line in rows[:limit]:
        place = f"{path}, row {number}"
        try:
            questions.append(msgspec.json.decode(line, type=Question))
        except msgspec.ValidationError as error:
            raise UsageError(
                f'{place}: not an object with the texts "question" and "answer"'
            ) from error
        except msgspec.DecodeError as error:
            raise UsageError(f"{place}: not JSON ({error})") from error
        if not questions[-1].gold or _GOLD_MARK not in questions[-1].answer:
            raise UsageError(f'{place}: the answer does not end in "{_GOLD_MARK}" and a number')
    if not questions:
        raise UsageError(f"{path} holds no questions")
    return questions


def prompt_text(question: Question, examples: Sequence[Question]) -> str:
    """The examples with their answers, then the question without one."""
    shown = "".join(
        f"Question: {example.question}\nAnswer: {example.answer}\n\n" for example in examples
    )
    return f"{shown}Question: {question.question}\nAnswer:"


def extract_answer(text: str) -> str | None:
    """The number behind "####", or else the last number before a new question; None if there is no
    number."""
    text = text.partition(STOP)[0]
    marked = _NUMBER.search(text.partition(_GOLD_MARK)[2])
    if marked:
        return _normalized(marked[0])
    numbers = _NUMBER.findall(text)
    if not numbers:
        return None
    return _normalized(numbers[-1])


def _normalized(number: str) -> str:
    plain = number.strip().replace(",", "").replace("$", "").rstrip(".")
    try:
        value = float(plain)
    except ValueError:
        return ""
    if abs(value) >= 1e6:
        return plain
    return f"{value:g}"


def perplexity(log_likelihood: Callable[[Tokens], float], pieces: Iterable[Tokens]) -> float:
    """exp of the mean negative log probability of every token that has one before it in its
    window."""
    found = [(log_likelihood(piece), len(piece) - 1) for piece in pieces]
    likelihood, predicted = map(sum, zip(*found, strict=True))
    return math.exp(-likelihood / predicted)


def compare_answers(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    """Shares of the questions on which both gave the same number, and the same tokens."""
    shares = {"same_answer": "answers", "same_tokens": "tokens"}
    return {share: fmean(map(eq, ours[name], theirs[name])) for share, name in shares.items()}


def own_reader(llm: "nanoserve.LLM") -> Reader:
    def log_likelihood(tokens: Tokens) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
        scored = llm.generate(list(tokens), params)[0].prompt_logprobs or ()
        return sum(entry.logprob for entry in scored if entry is not None)

    def answer(tokens: Tokens, max_tokens: int) -> Tokens:
        output = llm.generate(list(tokens), SamplingParams(temperature=0.0, max_tokens=max_tokens))[
            0
        ].outputs[0]
        if output.finish_reason == "stop":
            return output.token_ids[:-1]
        return output.token_ids

    return Reader("nanoserve", log_likelihood, answer)


def transformers_reader(directory: Path, dtype: str, end_tokens: Tokens) -> Reader:
    import torch

    from nanoserve.lab.benchmarks.peers.engine_peers import open_transformers

    model = open_transformers(directory, dtype, list(end_tokens) or None)

    @torch.inference_mode()
    def log_likelihood(tokens: Tokens) -> float:
        ids = torch.tensor([tokens])
        logprobs = model(ids).logits[0, :-1].float().log_softmax(-1)
        return float(logprobs.gather(1, ids[0, 1:, None]).double().sum())

    @torch.inference_mode()
    def answer(tokens: Tokens, max_tokens: int) -> Tokens:
        ids = torch.tensor([tokens])
        settings = {"max_new_tokens": max_tokens, "do_sample": False, "pad_token_id": 0}
        output = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        found = tuple(output[0, ids.shape[1] :].tolist())
        if found and found[-1] in end_tokens:
            return found[:-1]
        return found

    return Reader("transformers", log_likelihood, answer)


class QualityOptions(EngineOptions, ResultOptions):
    text: Path | None = file_option("Perplexity of this text file.")
    window: int = option(512, "Tokens seen at a time.", minimum=2)
    windows: int = option(8, "The most windows.", minimum=1)
    questions: Path | None = file_option("Accuracy on a JSONL file like GSM8K's.")
    limit: int = option(20, "The most questions.", minimum=1)
    shots: int = option(4, "Rows shown as worked examples first.", minimum=0)
    max_tokens: int = option(256, "Longest answer.", minimum=1)


def run(options: QualityOptions) -> None:
    """A row of --questions is {"question": "...", "answer": "... #### 18"}; the number after ####
    must be found.

    [bold]Examples[/bold]

      nanoserve bench quality --text story.txt
      nanoserve bench quality -m Qwen/Qwen3-0.6B --questions gsm8k_test.jsonl \\
        --limit 50
    """
    shots, limit = options.shots, options.limit
    if options.text is None and options.questions is None:
        raise UsageError("give --text, --questions or both")
    content, rows = None, None
    if options.text is not None:
        content = read_text(options.text, UsageError)
    if options.questions is not None:
        rows = read_questions(options.questions, limit + shots)
        if len(rows) <= shots:
            raise UsageError(
                f"{options.questions} has {len(rows)} questions, all of them taken by --shots "
                f"{shots}"
            )
    settings = {
        "window": options.window,
        "windows": options.windows,
        "limit": limit,
        "shots": shots,
    }
    with options.reported("quality", settings, _show) as report, options.open_llm() as llm:
        readers = [own_reader(llm)]
        if missing := PEERS["transformers"].missing:
            report.note(
                f"{missing[0]} is not installed and left out: {PEERS['transformers'].install}"
            )
        else:
            from nanoserve.lab.benchmarks.peers.weights import checkpoint_directory, dtype_name

            dtype = dtype_name(options.dtype, llm.built.model)
            directory = checkpoint_directory(options.find_model(), dtype)
            readers.append(transformers_reader(directory, dtype, llm.end_tokens))
        if content is not None:
            length = min(options.window, llm.built.max_model_len - 1)
            pieces = windows(llm.tokenizer.encode(content), length, options.windows)
            count = sum(len(piece) - 1 for piece in pieces)
            for reader in readers:
                remark(f"perplexity with {reader.name}")
                value = perplexity(reader.log_likelihood, watched(pieces, "texts"))
                report.add(
                    {"case": "perplexity", "engine": reader.name, "count": count, "value": value}
                )
        if rows is not None:
            _measure_accuracy(readers, llm, rows[:shots], rows[shots:], options.max_tokens, report)


def _measure_accuracy(
    readers: list[Reader],
    llm: "nanoserve.LLM",
    examples: Any,
    rows: Any,
    max_tokens: int,
    report: Report,
) -> None:
    prompts = [tuple(llm.tokenizer.encode(prompt_text(question, examples))) for question in rows]
    if (longest := max(map(len, prompts))) + max_tokens > llm.built.max_model_len:
        raise UsageError(
            f"the longest prompt has {longest} tokens, with --max-tokens {max_tokens} more than "
            "the context of "
            f"{llm.built.max_model_len}; lower --shots or --max-tokens"
        )
    golds, ours = [question.gold for question in rows], dict[str, Any]()
    for reader in readers:
        remark(f"{len(rows)} questions with {reader.name}")
        tokens = [reader.answer(prompt, max_tokens) for prompt in watched(prompts, "questions")]
        answers = [extract_answer(llm.tokenizer.decode(answer)) for answer in tokens]
        found = {"answers": answers, "tokens": tokens}
        row = {
            "case": "accuracy",
            "engine": reader.name,
            "count": len(rows),
            "value": fmean(map(eq, answers, golds)),
        }
        if ours:
            row |= compare_answers(ours, found)
        report.add(row)
        ours = ours or found


def _show(report: Report, options: ResultOptions) -> str:
    print_results(report, "quality", _COLUMNS)
    if options.plot is not None:
        panels = []
        for case in dict.fromkeys(row["case"] for row in report.rows):
            rows = [row for row in report.rows if row["case"] == case]
            names, texts = [row["engine"] for row in rows], [_VALUE.text(row) for row in rows]
            panels.append(text_bars(_AXES[case], names, texts, case))
        draw(
            Chart(report.titled("quality"), panels, columns=1), options.plot, panel_size=(7.0, 2.2)
        )
    return _verdict(report.rows)


def _verdict(rows: Sequence[dict[str, Any]]) -> str:
    """Ours over the reference, in each measure that both have; these figures do not scatter."""
    found = {(row["case"], row["engine"]): row for row in rows}
    words = []
    for case in dict.fromkeys(row["case"] for row in rows):
        ours, reference = found[case, "nanoserve"], found.get((case, "transformers"))
        if reference is None:
            words.append(f"the {case} of nanoserve is {ours['value']:.4f}, beside no reference")
        elif reference["value"]:
            ratio = ours["value"] / reference["value"]
            words.append(f"the {case} of nanoserve is {ratio:.4f} times that of transformers")
        if reference is not None and "same_answer" in reference:
            words.append(
                f"{reference['same_answer']:.0%} of {reference['count']} answers are the same"
            )
    return "; ".join(words + ["one run counts, as another gives the same"]).capitalize() + "."
