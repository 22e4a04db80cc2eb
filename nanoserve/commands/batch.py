"""Offline batches: all rows of a file at once through the engine, each result written as it finishes."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoserve.commands.batch_files import ResultFile, Row, read_rows
from nanoserve.commands.failures import EXIT_OK, say
from nanoserve.commands.options import EngineOptions, sampling_params
from nanoserve.commands.terminal import is_terminal, load_progress
from nanoserve.commands.usage import Usage
from nanoserve.errors import NanoserveError, UsageError

if TYPE_CHECKING:
    from nanoserve.llm import LLM
    from nanoserve.request import RequestOutput, SamplingParams

Item = tuple[Any, "SamplingParams"]


@dataclass(slots=True)
class _Tally:
    """What this run wrote so far."""

    total: int
    done_before: int
    started: float
    written: int = 0
    errors: int = 0
    tokens: int = 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def summary(self, path: Path) -> str:
        parts = [f"{self.written - self.errors} rows written to {path}"]
        if self.errors:
            parts.append(f"{self.errors} rows with errors")
        if self.done_before:
            parts.append(f"{self.done_before} were there already")
        parts.append(f"{self.tokens} tokens in {self.seconds:.1f} s ({self.tokens / max(self.seconds, 1e-9):,.0f}/s)")
        return ", ".join(parts)


def run_batch(source: Path, target: Path, engine: EngineOptions, settings: dict[str, Any]) -> int:
    """Answer every row of ``source`` that ``target`` does not hold yet. Rows with errors do not make it fail.

    Raises:
        NanoserveError: if a file or the model cannot be used.
    """
    rows = read_rows(source)
    if target.exists() and source.samefile(target):
        raise UsageError("--file and --output are the same file")
    with ResultFile(target) as results:
        open_rows = [row for row in rows if row.key not in results.done]
        if not open_rows:
            say(f"all {len(rows)} rows are in {target} already")
            return EXIT_OK
        tally = _Tally(len(rows), len(rows) - len(open_rows), time.monotonic())
        usable = [row for row in open_rows if row.error is None]
        for row in open_rows:
            if row.error is not None:
                _write(results, tally, row, {"error": row.error})
        try:
            if usable:
                _answer_rows(usable, results, tally, engine, settings)
        except KeyboardInterrupt:
            left = tally.total - tally.done_before - tally.written
            state = f"{tally.summary(target)}, {left} rows are left; the same command goes on from here"
            raise KeyboardInterrupt(state) from None
    say(tally.summary(target))
    return EXIT_OK


def _answer_rows(
    rows: list[Row], results: ResultFile, tally: _Tally, engine: EngineOptions, settings: dict[str, Any]
) -> None:
    with load_progress() as progress:
        llm = engine.open_llm(progress)
        llm.prepare(progress)
    tally.started = time.monotonic()
    with llm, _progress_bar(tally) as draw:
        items = _Items(llm, settings, engine.seed, results, tally)
        for position, outcome in llm.generate_as_completed(items.of(rows)):
            row = items.accepted[position]
            if isinstance(outcome, NanoserveError):
                _write(results, tally, row, {"error": str(outcome)})
            else:
                tally.tokens += sum(len(sample.token_ids) for sample in outcome.outputs)
                _write(results, tally, row, _result(outcome))
            draw()


class _Items:
    """Turns rows into what the LLM takes; rows whose settings are wrong are answered with an error row at once.

    Attributes:
        accepted: the rows handed to the LLM, by position.
    """

    def __init__(self, llm: "LLM", settings: dict[str, Any], seed: int | None, results: ResultFile, tally: _Tally):
        self._defaults = llm.default_sampling_params()
        self._settings = settings
        self._seed = seed
        self._results = results
        self._tally = tally
        self.accepted: list[Row] = []

    def of(self, rows: list[Row]) -> Iterator[Item]:
        """The items of the usable rows."""
        for row in rows:
            try:
                params = sampling_params(self._defaults, self._settings, self._seed_of(row), dict(row.settings))
            except UsageError as error:
                _write(self._results, self._tally, row, {"error": str(error)})
                continue
            self.accepted.append(row)
            yield row.prompt, params

    def _seed_of(self, row: Row) -> dict[str, int]:
        """It depends on the row's place alone: a run that goes on after Ctrl-C gives what it would have given."""
        return {} if self._seed is None else {"seed": (self._seed + row.index) % 2**63}


def _result(output: "RequestOutput") -> dict[str, Any]:
    samples = sorted(output.outputs, key=lambda sample: sample.index)
    if errors := [sample.error for sample in samples if sample.error is not None]:
        return {"error": errors[0]}
    usage = Usage.of(output).counts()
    if len(samples) == 1:
        return {"text": samples[0].text, "finish_reason": samples[0].finish_reason, "usage": usage}
    reasons = [sample.finish_reason for sample in samples]
    return {"text": [sample.text for sample in samples], "finish_reason": reasons, "usage": usage}


def _write(results: ResultFile, tally: _Tally, row: Row, fields: Mapping[str, Any]) -> None:
    identity = {} if row.id is None else {"id": row.id}
    results.write({"index": row.index} | identity | dict(fields))
    tally.written += 1
    tally.errors += "error" in fields


@contextmanager
def _progress_bar(tally: _Tally) -> Iterator[Callable[[], None]]:
    """Draws rows, tokens/s and the time left on stderr, if someone watches; in this thread, when a row finishes."""
    if not is_terminal(sys.stderr):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]} tokens/s, left"), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as bars:
        task = bars.add_task("rows", total=tally.total, completed=tally.done_before + tally.written, rate="-")

        def draw() -> None:
            rate = f"{tally.tokens / max(tally.seconds, 1e-9):,.0f}"
            bars.update(task, completed=tally.done_before + tally.written, rate=rate)
            bars.refresh()

        yield draw
