"""Offline batches: all rows of a file at once through the engine, each result written as it finishes."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoserve.commands.batch_advice import advice_for
from nanoserve.commands.batch_files import PromptRow, ResultFile, read_rows
from nanoserve.commands.batch_progress import Phases, Tally, progress_bar
from nanoserve.commands.engine_options import WorkersOptions, sampling_params
from nanoserve.commands.failures import EXIT_OK, say
from nanoserve.commands.progress import show_progress
from nanoserve.commands.terminal import remark
from nanoserve.commands.usage import TokenUsage
from nanoserve.errors import NanoserveError, UsageError, WorkersFailed
from nanoserve.request import RequestOutput, SamplingParams, SequenceUpdate

if TYPE_CHECKING:
    from nanoserve.llm import LLM

Item = tuple[Any, SamplingParams]


def run_batch(source: Path, target: Path, engine: WorkersOptions, settings: dict[str, Any]) -> int:
    """Answer every row of ``source`` that ``target`` does not hold yet. Rows with errors do not make it fail.

    Raises:
        NanoserveError: if a file or the model cannot be used.
    """
    rows = read_rows(source)
    if target.exists() and source.samefile(target):
        raise UsageError("--file and --output are the same file")
    with ResultFile(target) as results:
        open_rows = [row for row in rows if not results.holds(row)]
        if not open_rows:
            say(f"all {len(rows)} rows are in {target} already")
            return EXIT_OK
        tally = Tally(len(rows), len(rows) - len(open_rows), time.monotonic())
        layouts = engine.layouts()
        phases = Phases(layouts) if len(layouts) > 1 else None
        usable = [row for row in open_rows if row.error is None]
        for row in open_rows:
            if row.error is not None:
                _write(results, tally, row, {"error": row.error})
        try:
            if usable:
                _answer_rows(usable, results, tally, phases, engine, settings)
        except (KeyboardInterrupt, WorkersFailed) as error:
            left = f"{tally.left} rows are left; the same command goes on from here"
            separator = "," if phases is None else ";"
            state = f"{_summary(tally, phases, target)}{separator} {left}"
            if isinstance(error, WorkersFailed):
                raise WorkersFailed(f"{error}; {state}") from None
            raise KeyboardInterrupt(state) from None
    say(_summary(tally, phases, target))
    return EXIT_OK


def _answer_rows(
    rows: list[PromptRow],
    results: ResultFile,
    tally: Tally,
    phases: Phases | None,
    engine: WorkersOptions,
    settings: dict[str, Any],
) -> None:
    with show_progress() as progress:
        llm = engine.open_llm(progress)
        llm.prepare(progress)
    with llm:
        items = _Items(llm, settings, engine.seed, results, tally)
        if phases is not None and (advice := advice_for(llm, phases.layouts, items.like(rows))) is not None:
            remark(advice)
        tally.started = time.monotonic()
        with progress_bar(tally, phases) as draw:
            _run(llm, items, rows, phases, draw)


def _run(llm: "LLM", items: "_Items", rows: list[PromptRow], phases: Phases | None, draw: Callable[[], None]) -> None:
    def look(updates: Sequence[SequenceUpdate]) -> None:
        if phases is not None:
            phases.observe(time.monotonic(), updates, llm.status)
        draw()

    for position, outcome in llm.generate_as_completed(items.of(rows), on_step=look):
        items.answer(position, outcome)
    if items.lost is not None:
        raise WorkersFailed(items.lost)


class _Items:
    """Turns rows into what the LLM takes and its answers into results; rows whose settings are wrong end as errors."""

    def __init__(self, llm: "LLM", settings: dict[str, Any], seed: int | None, results: ResultFile, tally: Tally):
        self._llm = llm
        self._defaults = llm.default_sampling_params()
        self._settings = settings
        self._seed = seed
        self._results = results
        self._tally = tally
        self._accepted: list[PromptRow] = []
        # why an engine runs nothing any more, if it took rows with it: they are left for the next run.
        self.lost: str | None = None

    def of(self, rows: list[PromptRow]) -> Iterator[Item]:
        """The items of the usable rows."""
        for row in rows:
            try:
                params = self._params(row)
            except UsageError as error:
                _write(self._results, self._tally, row, {"error": str(error)})
                continue
            self._accepted.append(row)
            yield row.prompt, params

    def answer(self, position: int, outcome: RequestOutput | NanoserveError) -> None:
        """Write what came of an item.

        Raises:
            WorkersFailed: if it failed because nothing runs any more.
        """
        row = self._accepted[position]
        if isinstance(outcome, NanoserveError):
            _write(self._results, self._tally, row, {"error": str(outcome)})
            return
        result = _result(outcome)
        if result.get("error") in self._llm.driven.failures:  # not because of the row
            self.lost = result["error"]
            if self._llm.driven.failure is not None:
                raise WorkersFailed(self._llm.driven.failure)
            return  # other engines go on with other rows
        self._tally.tokens += sum(len(sample.token_ids) for sample in outcome.outputs)
        _write(self._results, self._tally, row, result)

    def like(self, rows: list[PromptRow]) -> list[Item]:
        """What `of` will yield, as far as it can be known before."""
        items = []
        for row in rows:
            with suppress(UsageError):
                items.append((row.prompt, self._params(row)))
        return items

    def _params(self, row: PromptRow) -> SamplingParams:
        return sampling_params(self._defaults, self._settings, self._seed_of(row), dict(row.settings))

    def _seed_of(self, row: PromptRow) -> dict[str, int]:
        """It depends on the row's place alone: a run that goes on after Ctrl-C gives what it would have given."""
        return {} if self._seed is None else {"seed": (self._seed + row.index) % 2**63}


def _result(output: RequestOutput) -> dict[str, Any]:
    samples = sorted(output.outputs, key=lambda sample: sample.index)
    if errors := [sample.error for sample in samples if sample.error is not None]:
        return {"error": errors[0]}
    usage = TokenUsage.of(output).counts()
    if len(samples) == 1:
        return {"text": samples[0].text, "finish_reason": samples[0].finish_reason, "usage": usage}
    reasons = [sample.finish_reason for sample in samples]
    return {"text": [sample.text for sample in samples], "finish_reason": reasons, "usage": usage}


def _write(results: ResultFile, tally: Tally, row: PromptRow, fields: Mapping[str, Any]) -> None:
    identity = {} if row.id is None else {"id": row.id}
    results.write({"index": row.index} | identity | dict(fields))
    tally.written += 1
    tally.errors += "error" in fields


def _summary(tally: Tally, phases: Phases | None, path: Path) -> str:
    parts = [f"{tally.written - tally.errors} rows written to {path}"]
    if tally.errors:
        parts.append(f"{tally.errors} rows with errors")
    if tally.done_before:
        parts.append(f"{tally.done_before} were there already")
    rates = f"{tally.rate:,.0f}/s"
    if phases is not None:
        rates += f", {(tally.tokens + phases.prompt_tokens) / max(tally.seconds, 1e-9):,.0f}/s with prompts"
    parts.append(f"{tally.tokens} tokens in {tally.seconds:.1f} s ({rates})")
    said = ", ".join(parts)
    return said if phases is None else f"{said}; {phases.summary}"
