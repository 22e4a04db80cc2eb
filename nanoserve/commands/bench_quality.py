"""``nanoserve bench quality``: are the outputs as good as those of Hugging Face transformers?"""

from pathlib import Path
from typing import Any

import nanoserve
from nanoserve.benchmarks.peers.process import PEERS
from nanoserve.benchmarks.plots import text_bars
from nanoserve.benchmarks.quality import (
    NanoserveReader,
    Reader,
    TransformersReader,
    compare_answers,
    extract_answer,
    perplexity,
    prompt_text,
    read_questions,
    windows,
)
from nanoserve.benchmarks.report import Report
from nanoserve.benchmarks.tables import Column, columns
from nanoserve.commands.bench_options import ResultOptions, print_results
from nanoserve.commands.engine_options import EngineOptions
from nanoserve.commands.options import option
from nanoserve.commands.progress import watched
from nanoserve.commands.terminal import remark
from nanoserve.errors import UsageError
from nanoserve.measures.charts import Chart, draw
from nanoserve.models.hub import resolve_model
from nanoserve.processes.files import read_text

_AXES = {"perplexity": "perplexity of a token, lower is better", "accuracy": "share of right answers"}
"""What the bars of each measure are."""
_VALUE = Column("value", "value", ".5f")
_COLUMNS = [
    *columns(("", ("measure", "case"), "engine"), (",d", ("tokens or questions", "count"))),
    _VALUE,
    *columns((".0%", "same_answer", "same_tokens")),
]


class QualityOptions(EngineOptions, ResultOptions):
    """All options of the command."""

    text: Path | None = option(None, "Perplexity of this text file.", metavar="FILE")
    window: int = option(512, "Tokens seen at a time.", minimum=2)
    windows: int = option(8, "The most windows.", minimum=1)
    questions: Path | None = option(None, "Accuracy on a JSONL file like GSM8K's.", metavar="FILE")
    limit: int = option(20, "The most questions.", minimum=1)
    shots: int = option(4, "Rows shown as worked examples first.", minimum=0)
    max_tokens: int = option(256, "Longest answer.", minimum=1)


def run(options: QualityOptions) -> None:
    """A row of --questions is {"question": "...", "answer": "... #### 18"}; the number after #### must be found.

    [bold]Examples[/bold]

      nanoserve bench quality --text story.txt
      nanoserve bench quality -m Qwen/Qwen3-0.6B --questions gsm8k_test.jsonl \\
        --limit 50
    """
    shots, limit = options.shots, options.limit
    if options.text is None and options.questions is None:
        raise UsageError("give --text, --questions or both")
    content = None if options.text is None else read_text(options.text, UsageError)
    rows = None if options.questions is None else read_questions(options.questions, limit + shots)
    if rows is not None and len(rows) <= shots:
        raise UsageError(f"{options.questions} has {len(rows)} questions, all of them taken by --shots {shots}")
    settings = {"window": options.window, "windows": options.windows, "limit": limit, "shots": shots}
    with options.reported("quality", settings, _show) as report, options.open_llm() as llm:
        if missing := PEERS["transformers"].missing:
            report.note(f"{missing[0]} is not installed and left out: {PEERS['transformers'].install}")
        readers = _readers(llm, options, with_reference=not missing)
        if content is not None:
            _measure_perplexity(readers, llm, content, options, report)
        if rows is not None:
            _measure_accuracy(readers, llm, rows[:shots], rows[shots:], options.max_tokens, report)


def _readers(llm: "nanoserve.LLM", engine: EngineOptions, *, with_reference: bool) -> list[Reader]:
    from nanoserve.benchmarks.peers.weights import checkpoint_directory, dtype_name

    if not with_reference:
        return [NanoserveReader(llm)]
    dtype = dtype_name(engine.dtype, llm.config)
    directory = checkpoint_directory(resolve_model(engine.model, offline=engine.offline), dtype)
    return [NanoserveReader(llm), TransformersReader(directory, dtype, llm.end_tokens)]


def _measure_perplexity(
    readers: list[Reader], llm: "nanoserve.LLM", content: str, options: QualityOptions, report: Report
) -> None:
    pieces = windows(llm.tokenizer.encode(content), min(options.window, llm.max_model_len - 1), options.windows)
    tokens = sum(len(piece) - 1 for piece in pieces)
    for reader in readers:
        remark(f"perplexity with {reader.name}")
        value = perplexity(reader, watched(pieces, "texts"))
        report.add({"case": "perplexity", "engine": reader.name, "count": tokens, "value": value})


def _measure_accuracy(
    readers: list[Reader], llm: "nanoserve.LLM", examples: Any, rows: Any, max_tokens: int, report: Report
) -> None:
    prompts = [tuple(llm.tokenizer.encode(prompt_text(question, examples))) for question in rows]
    if (longest := max(map(len, prompts))) + max_tokens > llm.max_model_len:
        raise UsageError(
            f"the longest prompt has {longest} tokens, with --max-tokens {max_tokens} more than the context of "
            f"{llm.max_model_len}; lower --shots or --max-tokens"
        )
    ours: dict[str, Any] | None = None
    for reader in readers:
        remark(f"{len(rows)} questions with {reader.name}")
        tokens = [reader.answer(prompt, max_tokens) for prompt in watched(prompts, "questions")]
        answers = [extract_answer(llm.tokenizer.decode(answer)) for answer in tokens]
        right = sum(answer == question.gold for answer, question in zip(answers, rows, strict=True))
        found = {"answers": answers, "tokens": tokens}
        row = {"case": "accuracy", "engine": reader.name, "count": len(rows), "value": right / len(rows)}
        report.add(row | ({} if ours is None else compare_answers(ours, found)))
        ours = ours or found


def _show(report: Report, options: ResultOptions) -> None:
    print_results(report, "quality", _COLUMNS)
    if options.plot is not None:
        panels = []
        for case, axis in _AXES.items():
            rows = [row for row in report.rows if row["case"] == case]
            names, texts = [row["engine"] for row in rows], [_VALUE.text(row) for row in rows]
            panels += [text_bars(axis, names, texts, case)] if rows else []
        draw(Chart(report.titled("quality"), panels, columns=1), options.plot, panel_size=(7.0, 2.2))
