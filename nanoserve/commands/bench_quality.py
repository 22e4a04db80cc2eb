"""``nanoserve bench quality``: are the outputs as good as those of Hugging Face transformers?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from nanoserve.commands.bench_options import ResultOptions, kept, print_head, work_option
from nanoserve.commands.failures import EXIT_OK
from nanoserve.commands.options import EngineOptions
from nanoserve.commands.progress import show_progress, watched
from nanoserve.commands.terminal import remark
from nanoserve.errors import UsageError

if TYPE_CHECKING:
    from nanoserve.benchmarks.quality import Reader
    from nanoserve.benchmarks.report import Report
    from nanoserve.llm import LLM


def quality(
    *,
    text: Annotated[Path | None, work_option("--text", help="Perplexity of this text file.", metavar="FILE")] = None,
    window: Annotated[int, work_option("--window", help="Tokens seen at a time.", min=2)] = 512,
    windows: Annotated[int, work_option("--windows", help="At most so many windows.", min=1)] = 8,
    questions: Annotated[
        Path | None, work_option("--questions", help="Accuracy on a JSONL file like GSM8K's.", metavar="FILE")
    ] = None,
    limit: Annotated[int, work_option("--limit", help="At most so many questions.", min=1)] = 20,
    shots: Annotated[int, work_option("--shots", help="Rows shown as worked examples first.", min=0)] = 4,
    max_tokens: Annotated[int, work_option("--max-tokens", help="Longest answer.", min=1)] = 256,
    engine: EngineOptions,
    results: ResultOptions,
) -> int:
    """Compare perplexity and exact-match accuracy with transformers on the same checkpoint, in one run.

    A row of --questions is {"question": "...", "answer": "... #### 18"}; the number after #### must be found.

    [bold]Examples[/bold]

      nanoserve bench quality --text story.txt
      nanoserve bench quality -m Qwen/Qwen3-0.6B --questions gsm8k_test.jsonl --limit 50
    """
    from nanoserve.benchmarks.peers.catalog import PEERS
    from nanoserve.benchmarks.quality import read_questions, read_text

    if text is None and questions is None:
        raise UsageError("give --text, --questions or both")
    content = None if text is None else read_text(text)
    rows = None if questions is None else read_questions(questions, limit + shots)
    if rows is not None and len(rows) <= shots:
        raise UsageError(f"{questions} has {len(rows)} questions, all of them taken by --shots {shots}")
    report = results.open_report("quality", {"window": window, "windows": windows, "limit": limit, "shots": shots})
    if missing := PEERS["transformers"].missing:
        report.note(f"{missing[0]} is not installed and left out: {PEERS['transformers'].install}")
    with show_progress() as progress:
        llm = engine.open_llm(progress)
    with llm, kept(report, lambda: _show(report, results)):
        readers = _readers(llm, engine, with_reference=not missing)
        if content is not None:
            _measure_perplexity(readers, llm, content, window, windows, report)
        if rows is not None:
            _measure_accuracy(readers, llm, rows[:shots], rows[shots:], max_tokens, report)
    return EXIT_OK


def _readers(llm: "LLM", engine: EngineOptions, *, with_reference: bool) -> list["Reader"]:
    from nanoserve.benchmarks.peers.weights import checkpoint_directory, dtype_name
    from nanoserve.benchmarks.quality_readers import NanoserveReader, TransformersReader
    from nanoserve.models.hub import resolve_model

    readers: list[Reader] = [NanoserveReader(llm)]
    if with_reference:
        dtype = dtype_name(engine.dtype, llm.config)
        directory = checkpoint_directory(resolve_model(engine.model, offline=engine.offline), dtype)
        readers.append(TransformersReader(directory, dtype, llm.end_tokens))
    return readers


def _measure_perplexity(
    readers: list["Reader"], llm: "LLM", content: str, window: int, limit: int, report: "Report"
) -> None:
    from nanoserve.benchmarks.quality import perplexity, windows

    pieces = windows(llm.tokenizer.encode(content), min(window, llm.max_model_len - 1), limit)
    for reader in readers:
        remark(f"perplexity with {reader.name}")
        tokens = sum(len(piece) - 1 for piece in pieces)
        value = perplexity(reader, watched(pieces, "texts"))
        report.add({"case": "perplexity", "engine": reader.name, "count": tokens, "value": value})


def _measure_accuracy(
    readers: list["Reader"], llm: "LLM", examples: Any, rows: Any, max_tokens: int, report: "Report"
) -> None:
    from nanoserve.benchmarks.quality import compare_answers, extract_answer, prompt_text

    prompts = [tuple(llm.tokenizer.encode(prompt_text(question, examples))) for question in rows]
    if (longest := max(map(len, prompts))) + max_tokens > llm.max_model_len:
        raise UsageError(
            f"the longest prompt has {longest} tokens, with --max-tokens {max_tokens} more than the context of "
            f"{llm.max_model_len}; lower --shots or --max-tokens"
        )
    found: list[dict[str, Any]] = []
    for reader in readers:
        remark(f"{len(rows)} questions with {reader.name}")
        tokens = [reader.answer(prompt, max_tokens) for prompt in watched(prompts, "questions")]
        answers = [extract_answer(llm.tokenizer.decode(answer)) for answer in tokens]
        right = sum(answer == question.gold for answer, question in zip(answers, rows, strict=True))
        found.append({"answers": answers, "tokens": tokens})
        report.add({"case": "accuracy", "engine": reader.name, "count": len(rows), "value": right / len(rows)})
    for row, theirs in zip(report.rows[-len(readers) + 1 :], found[1:], strict=False):
        row |= compare_answers(found[0], theirs)


def _show(report: "Report", results: ResultOptions) -> None:
    from nanoserve.benchmarks.plots import plot_bars
    from nanoserve.benchmarks.tables import Column, print_table

    value = Column("value", "value", ".5f")
    columns = [
        Column("measure", "case"),
        Column("engine", "engine"),
        Column("tokens or questions", "count", ",d"),
        value,
        Column("same answer", "same_answer", ".0%"),
        Column("same tokens", "same_tokens", ".0%"),
    ]
    print_head(report)
    print_table("quality", columns, report.rows)
    if results.plot is not None:
        plot_bars(results.plot, "quality", "{case} {engine}", [value], report.rows)
