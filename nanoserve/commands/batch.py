"""Offline batches: all rows of a file at once through the engine, each result written as it
finishes."""

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

import nanoserve
from nanoserve.commands.answers import AnswerUsage
from nanoserve.commands.batch_files import PromptRow, ResultFile, read_rows
from nanoserve.commands.engine_options import WorkersOptions, sampling_params
from nanoserve.commands.progress import show_progress
from nanoserve.commands.terminal import REDRAW_SECONDS, is_terminal, remark, say
from nanoserve.engine.settings_chooser import settings_chooser
from nanoserve.errors import NanoserveError, UsageError, WorkersFailed
from nanoserve.layout import ParallelLayout
from nanoserve.record.counters import EngineStatus
from nanoserve.request import (
    CompletionOutput,
    RequestOutput,
    RequestShape,
    SamplingParams,
    SequenceUpdate,
)
from nanoserve.text.answers.reader import Piece
from nanoserve.text.tokenizer import Tokenizer

# the most rows whose prompts are tokenized; the others are taken to be like them
_SAMPLED_ROWS = 200
_USUAL_ANSWER = 256  # tokens of an answer without a limit, to choose a layout by
# a phase is its layout's number, or this while an engine changes from one layout to another
_MOVING = -1


def run_batch(source: Path, target: Path, engine: WorkersOptions, settings: dict[str, Any]) -> None:
    """Answer every row of ``source`` that ``target`` does not hold yet. Rows with errors do not
    make it fail."""
    rows = read_rows(source)
    if target.exists() and source.samefile(target):
        raise UsageError("--file and --output are the same file")
    with ResultFile(target) as results:
        open_rows = [row for row in rows if not results.holds(row)]
        if not open_rows:
            say(f"all {len(rows)} rows are in {target} already")
            return
        batch = _Batch(
            results, engine, settings, len(rows), len(rows) - len(open_rows), time.monotonic()
        )
        try:
            batch.answer(open_rows)
        except (KeyboardInterrupt, WorkersFailed) as error:
            state = batch.summary(target)
            state += "," if batch.phases is None else ";"
            state += (
                f" {len(open_rows) - batch.written} rows are left; the same command goes on from "
                "here"
            )
            if isinstance(error, WorkersFailed):
                state = f"{error}; {state}"
            raise type(error)(state) from None
    say(batch.summary(target))


@dataclass(slots=True)
class Phases:
    """The phases of engines with two layouts, and their rates, as seen between their steps.

    Where there are several engines, a second that one of them spends in a phase counts as its part
    of a second, so rates are those of all engines in that phase.
    """

    layouts: Sequence[ParallelLayout]  # for prompts and for decodes, of all engines together
    # in each phase
    seconds: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    prompts: int = 0  # prompts with a known first token
    prompt_tokens: int = 0
    answer_tokens: int = 0  # generated tokens without these first ones
    # the share of the blocks in host memory that are in use, and the largest that was seen
    pool_share: float = 0.0
    fullest: float = 0.0
    _seen: float = 0.0
    _transitions: int = 0
    _phases: Sequence[int] = ()  # of each engine
    _begun: set[tuple[str, int]] = field(default_factory=set)

    def observe(self, now: float, updates: Sequence[SequenceUpdate], status: EngineStatus) -> None:
        """Count what sequences gained until now, and the time since the last call to the phase that
        was then seen."""
        for update in updates:
            self.answer_tokens += len(update.new_tokens)
            sample = update.request_id, update.index
            if update.new_tokens and sample not in self._begun:
                self._begun.add(sample)
                self.answer_tokens -= 1
                if update.index == 0:  # further samples of a prompt begin with the KV of the first
                    self.prompts += 1
                    self.prompt_tokens += (
                        update.sequence.prompt_length - update.sequence.cached_tokens
                    )
        for update in updates:
            if update.finished:
                self._begun.discard((update.request_id, update.index))
        for phase in self._phases:
            self.seconds[phase] += (now - self._seen) / len(self._phases)
        phases = zip(status.layouts, status.changing, strict=True)
        self._phases = [_MOVING if changing else layout for layout, changing in phases]
        self._seen, self._transitions = now, status.transitions
        if status.total_host_blocks:
            self.pool_share = 1 - status.free_host_blocks / status.total_host_blocks
        self.fullest = max(self.fullest, self.pool_share)

    @property
    def state(self) -> str:
        """Phase, rates, host memory and transitions, for now; if phases differ, the number of
        engines in each."""
        prefill, decode = self.layouts
        phases = {0: f"prefill {prefill.name}", 1: f"decode {decode.name}", _MOVING: "moving"}
        counts = Counter(self._phases or [0])
        names = [
            f"{number} {phases[phase]}" for phase, number in sorted(counts.items(), reverse=True)
        ]
        if len(counts) == 1:
            names = [phases[phase] for phase in counts]
        return f"{', '.join(names)}, host pool {self.pool_share:.0%}, {self._turns}; {self._rates}"

    @property
    def summary(self) -> str:
        return f"{self._rates}, host pool at most {self.fullest:.0%}, {self._turns}"

    def seconds_left(self, rows: int, finished: int, tokens: int) -> float | None:
        """Seconds until ``rows`` are done, at the pace of the ``finished`` ones with ``tokens``;
        None before any."""
        if not finished or not self.prompts:
            return None
        prompts_left = max(0, rows - self.prompts)
        tokens_left = max(0.0, rows * (tokens / finished - 1) - self.answer_tokens)
        if tokens_left and not self.answer_tokens:
            return None
        prefill, decode = self.seconds[0], self.seconds[1]
        seconds = prompts_left * prefill / self.prompts + tokens_left * decode / max(
            1, self.answer_tokens
        )
        return seconds * (1 + self.seconds[_MOVING] / max(prefill + decode, 1e-9))

    @property
    def _rates(self) -> str:
        prefill, decode = self.layouts
        return (
            f"{prefill.name} {self._rate(0, self.prompt_tokens)}, {decode.name} "
            f"{self._rate(1, self.answer_tokens)}"
        )

    def _rate(self, phase: int, tokens: int) -> str:
        if not self.seconds[phase]:
            return "-"
        return f"{tokens / self.seconds[phase]:,.0f} tokens/s"

    @property
    def _turns(self) -> str:
        if self._transitions == 1:
            return "1 transition"
        return f"{self._transitions} transitions"


@dataclass(slots=True)
class _Batch:
    """Takes rows to the LLM and its answers to the file, and counts them."""

    results: ResultFile
    engine: WorkersOptions
    settings: dict[str, Any]
    total: int  # rows of the file, with those that an earlier run has done
    done_before: int
    started: float  # seconds of the monotonic clock
    phases: Phases | None = None  # with two layouts
    written: int = 0  # rows, also those with errors
    errors: int = 0
    tokens: int = 0  # of the answers written

    def answer(self, rows: Sequence[PromptRow]) -> None:
        """Answer the rows that can be used, and write an error for each of the others."""
        for row in rows:
            if row.error is not None:
                self._write(row, {"error": row.error})
        usable = [row for row in rows if row.error is None]
        if not usable:
            return
        with self.engine.open_llm(expected=partial(self._expected, usable)) as llm:
            engine, layouts = llm.built.engine, llm.built.config.whole_layouts
            if len(layouts) > 1:
                self.phases = Phases(layouts)
            with show_progress() as progress:
                llm.built.prepare(progress)
            items = list(self._items(usable, llm.default_sampling_params()))
            prompts = [(row.prompt, params) for row, params in items]
            if len(layouts) > 1 and llm.built.choice is None:
                advice = advice_for(llm, layouts, prompts)
                if advice is not None:
                    remark(advice)
            self.started = time.monotonic()
            with self._progress_bar() as draw:

                def look(updates: Sequence[SequenceUpdate]) -> None:
                    if self.phases is not None:
                        self.phases.observe(time.monotonic(), updates, llm.status)
                    draw()

                lost: str | None = None
                for position, outcome in llm.generate_as_completed(prompts, on_step=look):
                    is_chat = not isinstance(prompts[position][0], str)
                    result = _result(outcome, llm.tokenizer if is_chat else None)
                    failures = [one.failure for one in engine.engines if one.failure is not None]
                    if isinstance(outcome, NanoserveError) or result.get("error") not in failures:
                        self._write(items[position][0], result)
                        continue
                    # An engine failed, not the row. Its rows are left for the next run; other
                    # engines go on.
                    lost = result["error"]
                    if engine.failure is not None:
                        raise WorkersFailed(engine.failure)
        if lost is not None:
            raise WorkersFailed(lost)

    def _expected(
        self, rows: Sequence[PromptRow], tokenizer: Tokenizer, longest: int
    ) -> list[RequestShape]:
        """The lengths of the rows to come, before anything is loaded."""
        usual, items = SamplingParams(max_tokens=_USUAL_ANSWER), []
        for row in rows:
            with suppress(UsageError):  # it will end as an error
                items.append((row.prompt, sampling_params(usual, self.settings, row.settings)))
        return _shapes(tokenizer, longest, items)

    def _items(
        self, rows: Sequence[PromptRow], defaults: SamplingParams
    ) -> Iterator[tuple[PromptRow, SamplingParams]]:
        """The rows with their settings; rows whose settings are wrong end as errors."""
        for row in rows:
            # A row's seed depends on its place alone, so a run that goes on after Ctrl-C repeats
            # what it began.
            seed = {}
            if self.engine.seed is not None:
                seed["seed"] = (self.engine.seed + row.index) % 2**63
            try:
                yield row, sampling_params(defaults, self.settings, seed, row.settings)
            except UsageError as error:
                self._write(row, {"error": str(error)})

    def _write(self, row: PromptRow, result: dict[str, Any]) -> None:
        identity: dict[str, Any] = {"index": row.index}
        if row.id is not None:
            identity["id"] = row.id
        self.results.write(identity | result)
        self.written += 1
        if "error" in result:
            self.errors += 1
        self.tokens += result.get("usage", {}).get("completion_tokens", 0)

    def summary(self, path: Path) -> str:
        parts = [f"{self.written - self.errors} rows written to {path}"]
        if self.errors:
            parts.append(f"{self.errors} rows with errors")
        if self.done_before:
            parts.append(f"{self.done_before} were there already")
        seconds = max(time.monotonic() - self.started, 1e-9)
        speed = f"{self.tokens} tokens in {seconds:.1f} s ({self.tokens / seconds:,.0f}/s"
        if self.phases is None:
            parts.append(f"{speed})")
        else:
            with_prompts = (self.tokens + self.phases.prompt_tokens) / seconds
            parts.append(f"{speed}, {with_prompts:,.0f}/s with prompts); {self.phases.summary}")
        return ", ".join(parts)

    @contextmanager
    def _progress_bar(self) -> Iterator[Callable[[], None]]:
        """Yield a function that draws rows, tokens/s, time left and phases on a terminal; most
        calls draw nothing."""
        if not is_terminal(sys.stderr):
            yield lambda: None
            return
        left_column = (
            TimeRemainingColumn() if self.phases is None else TextColumn("{task.fields[left]}")
        )
        rate_column = TextColumn("{task.fields[rate]} tokens/s, left")
        bars = Progress(
            BarColumn(), MofNCompleteColumn(), rate_column, left_column, auto_refresh=False
        )
        task = bars.add_task(
            "rows", total=self.total, completed=self.done_before + self.written, rate="-", left="-"
        )
        with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:
            drawn = 0.0

            def draw(*, at_end: bool = False) -> None:
                nonlocal drawn
                now = time.monotonic()
                if not at_end and now - drawn < REDRAW_SECONDS:
                    return
                drawn = now
                rate = f"{self.tokens / max(now - self.started, 1e-9):,.0f}"
                bars.update(
                    task,
                    completed=self.done_before + self.written,
                    rate=rate,
                    left=self._time_left(),
                )
                shown: RenderableType = bars
                if self.phases is not None:
                    shown = Group(bars, Text(self.phases.state, no_wrap=True, overflow="ellipsis"))
                live.update(shown, refresh=True)

            yield draw
            draw(at_end=True)  # all rows are done

    def _time_left(self) -> str:
        """The time until all rows are done, by the pace of the phases; a dash where it is
        unknown."""
        if self.phases is None:
            return "-"
        rows, finished = self.total - self.done_before - self.errors, self.written - self.errors
        seconds = self.phases.seconds_left(rows, finished, self.tokens)
        if seconds is None:
            return "-"
        return str(timedelta(seconds=round(seconds)))


def _result(outcome: RequestOutput | NanoserveError, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The row written for an outcome. The answer to a conversation needs the ``tokenizer``, which
    knows its form."""
    if isinstance(outcome, NanoserveError):
        return {"error": str(outcome)}
    samples = sorted(outcome.outputs, key=lambda sample: sample.index)
    for sample in samples:
        if sample.error is not None:
            return {"error": sample.error}
    usage = AnswerUsage.of(outcome, sum(len(sample.token_ids) for sample in samples)).counts()
    pieces = [_pieces(sample, outcome.prompt_token_ids, tokenizer) for sample in samples]
    columns: dict[str, list[Any]] = {
        "text": ["".join(text for part, text in each if part == "answer") for each in pieces],
        "reasoning": [
            "".join(text for part, text in each if part == "thinking") for each in pieces
        ],
        "finish_reason": [sample.finish_reason for sample in samples],
    }
    if not any(columns["reasoning"]):
        del columns["reasoning"]
    if len(samples) > 1:
        return {**columns, "usage": usage}
    return {**{name: values[0] for name, values in columns.items()}, "usage": usage}


def _pieces(
    sample: CompletionOutput, prompt: Sequence[int], tokenizer: Tokenizer | None
) -> list[Piece]:
    """The reasoning and the text of a sample."""
    if tokenizer is None:
        return [("answer", sample.text)]
    return tokenizer.answer_parser(prompt).push(sample.text, sample.marks, ended=True)


def advice_for(
    llm: "nanoserve.LLM",
    layouts: Sequence[ParallelLayout],
    items: Sequence[tuple[Any, SamplingParams]],
) -> str | None:
    """The planner's prediction for prompts with their settings, and a faster choice; None without
    speeds."""
    speeds, shapes = llm.built.speeds, _shapes(llm.tokenizer, llm.built.max_model_len, items)
    if speeds is None or not shapes:
        return None
    return settings_chooser().advise_on_batch(
        llm.built.model, llm.built.config, speeds, llm.status, layouts, shapes
    )


def _shapes(
    tokenizer: Tokenizer, longest: int, items: Sequence[tuple[Any, SamplingParams]]
) -> list[RequestShape]:
    """The lengths of all items, from the prompts of some, evenly over all. Answers are as long as
    they may become."""
    count, shapes = min(len(items), _SAMPLED_ROWS), []
    for place in range(count):
        prompt, params = items[place * len(items) // count]
        encode = tokenizer.encode if isinstance(prompt, str) else tokenizer.encode_chat
        with suppress(UsageError):  # a prompt that will be refused
            tokens = len(encode(prompt))
            room = longest - tokens
            if tokens and room > 0:
                shapes.append(RequestShape(tokens, params.n * min(params.max_tokens or room, room)))
    if not shapes:
        return []
    return [shapes[place * len(shapes) // len(items)] for place in range(len(items))]
