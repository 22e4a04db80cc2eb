"""Offline batches: all rows of a file at once through the engine, each result written as it finishes.

Before a batch of two layouts runs, the planner says how fast it is predicted to be, and what would be faster.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import nanoserve
from nanoserve.commands.batch_files import PromptRow, ResultFile, read_rows
from nanoserve.commands.batch_progress import Phases, Tally, progress_bar
from nanoserve.commands.engine_options import WorkersOptions, sampling_params
from nanoserve.commands.progress import show_progress
from nanoserve.commands.terminal import remark, say
from nanoserve.commands.usage import AnswerUsage
from nanoserve.costs import Machine, Precision
from nanoserve.costs.counts import ModelCounts
from nanoserve.costs.hardware import Efficiency, MachineSpeeds
from nanoserve.errors import NanoserveError, UsageError, WorkersFailed
from nanoserve.layout import ParallelLayout
from nanoserve.measures.workloads import RequestShape
from nanoserve.request import RequestOutput, SamplingParams, SequenceUpdate
from nanoserve.simulator.advice import advise
from nanoserve.simulator.planning import CacheLimits

_SAMPLED_ROWS = 200
"""The most rows whose prompts are tokenized; the others are taken to be like them."""


def run_batch(source: Path, target: Path, engine: WorkersOptions, settings: dict[str, Any]) -> None:
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
            return
        layouts = engine.layouts()
        tally = Tally(len(rows), len(rows) - len(open_rows), time.monotonic())
        batch = _Batch(results, tally, Phases(layouts) if len(layouts) > 1 else None, engine, settings)
        try:
            batch.answer(open_rows)
        except (KeyboardInterrupt, WorkersFailed) as error:
            left = f"{tally.left} rows are left; the same command goes on from here"
            state = f"{batch.summary(target)}{',' if batch.phases is None else ';'} {left}"
            if isinstance(error, WorkersFailed):
                raise WorkersFailed(f"{error}; {state}") from None
            raise KeyboardInterrupt(state) from None
    say(batch.summary(target))


@dataclass(slots=True)
class _Batch:
    """Takes rows to the LLM and its answers to the file."""

    results: ResultFile
    tally: Tally
    phases: Phases | None
    engine: WorkersOptions
    settings: dict[str, Any]

    def answer(self, rows: Sequence[PromptRow]) -> None:
        """Answer the rows that can be used, and write an error for each of the others."""
        usable = [row for row in rows if row.error is None]
        for row in rows:
            if row.error is not None:
                self._write(row, {"error": row.error})
        if not usable:
            return
        with self.engine.open_llm() as llm:
            with show_progress() as progress:
                llm.prepare(progress)
            items = self._items(usable, llm.default_sampling_params())
            prompts = [(row.prompt, params) for row, params in items]
            if self.phases is not None and (advice := advice_for(llm, self.phases.layouts, prompts)) is not None:
                remark(advice)
            self.tally.started = time.monotonic()
            with progress_bar(self.tally, self.phases) as draw:

                def look(updates: Sequence[SequenceUpdate]) -> None:
                    if self.phases is not None:
                        self.phases.observe(time.monotonic(), updates, llm.status)
                    draw()

                lost: str | None = None
                for position, outcome in llm.generate_as_completed(prompts, on_step=look):
                    result = _result(outcome)
                    if isinstance(outcome, RequestOutput) and result.get("error") in llm.driven.failures:
                        # An engine failed, not the row. Its rows are left for the next run; other engines go on.
                        lost = result["error"]
                        if llm.driven.failure is not None:
                            raise WorkersFailed(llm.driven.failure)
                        continue
                    self._write(items[position][0], result)
        if lost is not None:
            raise WorkersFailed(lost)

    def _items(self, rows: Sequence[PromptRow], defaults: SamplingParams) -> list[tuple[PromptRow, SamplingParams]]:
        """The rows with their settings; rows whose settings are wrong end as errors."""
        items = []
        for row in rows:
            # A row's seed depends on its place alone, so a run that goes on after Ctrl-C repeats what it began.
            seed = {} if self.engine.seed is None else {"seed": (self.engine.seed + row.index) % 2**63}
            try:
                items.append((row, sampling_params(defaults, self.settings, seed, dict(row.settings))))
            except UsageError as error:
                self._write(row, {"error": str(error)})
        return items

    def _write(self, row: PromptRow, result: dict[str, Any]) -> None:
        self.results.write({"index": row.index} | ({} if row.id is None else {"id": row.id}) | result)
        self.tally.written += 1
        self.tally.errors += "error" in result
        self.tally.tokens += result.get("usage", {}).get("completion_tokens", 0)

    def summary(self, path: Path) -> str:
        """What was written, how fast, and where."""
        tally, phases = self.tally, self.phases
        parts = [f"{tally.written - tally.errors} rows written to {path}"]
        if tally.errors:
            parts.append(f"{tally.errors} rows with errors")
        if tally.done_before:
            parts.append(f"{tally.done_before} were there already")
        rates = f"{tally.rate:,.0f}/s"
        if phases is not None:
            rates += f", {(tally.tokens + phases.prompt_tokens) / max(tally.seconds, 1e-9):,.0f}/s with prompts"
        parts.append(f"{tally.tokens} tokens in {tally.seconds:.1f} s ({rates})")
        return ", ".join(parts) + ("" if phases is None else f"; {phases.summary}")


def _result(outcome: RequestOutput | NanoserveError) -> dict[str, Any]:
    if isinstance(outcome, NanoserveError):
        return {"error": str(outcome)}
    samples = sorted(outcome.outputs, key=lambda sample: sample.index)
    if errors := [sample.error for sample in samples if sample.error is not None]:
        return {"error": errors[0]}
    texts, reasons = [sample.text for sample in samples], [sample.finish_reason for sample in samples]
    several = len(samples) > 1
    return {
        "text": texts if several else texts[0],
        "finish_reason": reasons if several else reasons[0],
        "usage": AnswerUsage.of(outcome).counts(),
    }


def advice_for(
    llm: "nanoserve.LLM", layouts: Sequence[ParallelLayout], items: Sequence[tuple[Any, SamplingParams]]
) -> str | None:
    """A few lines for the user, or None where the speeds of workers were not measured.

    Args:
        layouts: that of prompts and that of decodes, of all engines together.
        items: prompts with their settings.
    """
    speeds, shapes = llm.speeds, _shapes(llm, items)
    if speeds is None or not shapes:
        return None
    import torch

    from nanoserve.models.dtypes import resolve_dtype

    config = llm.engine_config
    dtype = resolve_dtype(config.dtype, torch.device(config.device), llm.config.dtype)
    precision, limits = Precision.of(8 * dtype.itemsize), _limits(llm, dtype.itemsize)
    try:
        return advise(
            llm.config,
            _machine(llm, speeds, precision, limits),
            layouts,
            shapes,
            precision=precision,
            limits=limits,
            policy=config.policy_name,
            token_budget=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
        ).text
    except UsageError as error:
        return f"nothing can be predicted: {error}"


def _shapes(llm: "nanoserve.LLM", items: Sequence[tuple[Any, SamplingParams]]) -> list[RequestShape]:
    """The lengths of all items, from the prompts of some, evenly over all. Answers are as long as they may become."""
    count = min(len(items), _SAMPLED_ROWS)
    shapes = list(chain.from_iterable(_shape(llm, *items[place * len(items) // count]) for place in range(count)))
    return [shapes[place * len(shapes) // len(items)] for place in range(len(items))] if shapes else []


def _shape(llm: "nanoserve.LLM", prompt: Any, params: SamplingParams) -> Iterator[RequestShape]:
    """Nothing for a prompt that will be refused."""
    encode = llm.tokenizer.encode if isinstance(prompt, str) else llm.tokenizer.encode_chat
    try:
        tokens = len(encode(prompt))
    except UsageError:
        return
    room = llm.max_model_len - tokens
    if tokens and room > 0:
        yield RequestShape(tokens, params.n * min(params.max_tokens or room, room))


def _limits(llm: "nanoserve.LLM", item_bytes: int) -> CacheLimits:
    """What the engines' own caches take."""
    model, config, status = llm.config, llm.engine_config, llm.status
    block = 2 * model.num_layers * model.num_kv_heads * model.head_dim * config.block_size * item_bytes
    return CacheLimits(
        device_bytes=status.total_blocks * block / config.data_parallel, host_bytes=status.total_host_blocks * block
    )


def _machine(llm: "nanoserve.LLM", speeds: MachineSpeeds, precision: Precision, limits: CacheLimits) -> Machine:
    """This one: memory is what the engines hold, and on CPUs what is free: of a GPU workers have taken all they can."""
    from nanoserve.runtime.launch.memory import available_memory

    config, usable = llm.engine_config, Efficiency().usable_memory
    devices = config.data_parallel * config.num_workers
    weights = ModelCounts(llm.config, precision=precision).stage_weight_bytes(0)
    host = available_memory("cpu")
    free = host / devices if config.device == "cpu" else 0.0
    held = (weights + (limits.device_bytes or 0.0)) / config.num_workers
    return speeds.machine(
        devices=devices,
        memory_bytes=(free + held) / usable,
        host_memory_bytes=(host + weights + (limits.host_bytes or 0.0)) / usable,
    )
