"""``nanoserve explain``: what each step of a run saw, decided and did."""

import os
import sys
from collections.abc import Collection
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import msgspec

from nanoserve.commands.batch_files import PromptRow, read_rows
from nanoserve.commands.engine_options import (
    SamplingOptions,
    WorkersOptions,
    check_utf8,
    sampling_params,
)
from nanoserve.commands.options import HARDWARE_PANEL, argument, file_option, flag_of, option
from nanoserve.commands.terminal import is_terminal, remark
from nanoserve.errors import NanoserveError, RuntimeFailure, UsageError
from nanoserve.lab.commands.explain_view import print_steps, show_steps
from nanoserve.lab.commands.simulate import HardwareOptions, SimulatedHardware, WorkloadOptions
from nanoserve.lab.explanation import ExplainedRun, Explanation, explain_run, explanation_page
from nanoserve.lab.simulator.scenarios import SCENARIOS, explained_simulation
from nanoserve.record.recorder import recorder_of
from nanoserve.record.run_record import RunRecord
from nanoserve.scheduler.policies import parse_policies
from nanoserve.utils.files import read_bytes, replace_file

_MODEL = "qwen2.5-14b"  # unless another is named


class ExplainOptions(WorkersOptions, SamplingOptions, WorkloadOptions):
    prompts: list[str] | None = argument(None, "Texts to go on with.")
    file: Path | None = file_option("Prompts: a text file with one per line, or .jsonl rows.", "-f")
    recorded: Path | None = file_option("A run that --json wrote.")
    scenario: str | None = option(None, "A drawing of a paper.", choices=tuple(SCENARIOS))
    simulate: bool = option(False, "Run the requests of --lengths in virtual time.")
    policy: str | None = option(None, "One policy or several, to compare.", metavar="NAME,NAME")
    json: Path | None = file_option("Write the run to a file; - is stdout.")
    html: Path | None = file_option("Write it as a page for a browser.")
    samples: int = option(1, "Answers to each prompt, which share its blocks.", minimum=1)
    max_tokens: int | None = option(16, "Longest answer.", "-n")
    seed: int = option(0, "Makes the run repeatable.", minimum=0)
    requests: int = option(8, "How many.", minimum=1, maximum=1000)
    hardware: str = option(
        HardwareOptions.hardware, "A machine or device.", metavar="NAME", panel=HARDWARE_PANEL
    )
    num_blocks: int | None = option(
        None, "KV blocks; default: what fits.", minimum=1, panel=HARDWARE_PANEL
    )

    def simulated(self) -> HardwareOptions:
        """The hardware to simulate. The options of an engine mean the same for it."""
        shared = {
            one.name: getattr(self, one.name)
            for one in fields(HardwareOptions)
            if hasattr(self, one.name)
        }
        shared["model"] = self.model or _MODEL
        if self.profile is not None:
            shared["profile"] = Path(self.profile)
        return HardwareOptions(**shared)


_SIMULATED = {one.name for group in (WorkloadOptions, HardwareOptions) for one in fields(group)}
_LIVE = {one.name for group in (WorkersOptions, SamplingOptions) for one in fields(group)} | {
    "samples"
}
_READ: dict[str, Collection[str]] = {
    **dict.fromkeys(("prompts", "file"), _LIVE),
    "recorded": (),
    "scenario": ("policy",),
    "simulate": _SIMULATED | {"policy", "max_num_batched_tokens", "max_num_seqs"},
}
"""The options that count, by what is explained."""


def run(options: ExplainOptions) -> None:
    """For each step: the snapshot that the policy saw, its decision and which part of its formula
    gave it, the rows, the block tables and the tokens. On a terminal, the arrow keys go from step
    to step and q ends.

    [bold]Examples[/bold]

      nanoserve explain "Once upon a time" "A dog and a kite"
      nanoserve explain --simulate --pp 4 --policy sarathi,throttling
      nanoserve explain --scenario gllm-7 --json run.json --html run.html
      nanoserve explain --recorded run.json
    """
    sources = [source for source in _READ if getattr(options, source)]
    if len(sources) != 1:
        raise UsageError("give one of these: prompts, --file, --recorded, --scenario, --simulate")
    read = {sources[0], "json", "html"}.union(_READ[sources[0]])
    for one in fields(options):
        is_given = (
            getattr(options, one.name) != one.default
            and f"NANOSERVE_{one.name.upper()}" not in os.environ
        )
        if is_given and one.name not in read:
            raise UsageError(
                f"{flag_of(one.name)} has no effect on what is explained here: leave it out"
            )
    explanation = _explanation(options)
    writers = (
        (options.json, lambda one: msgspec.json.encode(one).decode()),
        (options.html, explanation_page),
    )
    for path, write in writers:
        if path == Path("-"):
            print(write(explanation))
        elif path is not None:
            replace_file(path, write(explanation))
            remark(f"{path} holds {sum(len(run.steps) for run in explanation.runs)} steps")
    if options.html is options.json is None:
        if is_terminal(sys.stdout) and is_terminal(sys.stdin):
            show_steps(explanation)
        else:
            print_steps(explanation)


def _explanation(options: ExplainOptions) -> Explanation:
    if options.recorded is not None:
        try:
            return msgspec.json.decode(read_bytes(options.recorded, UsageError), type=Explanation)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise UsageError(
                f"{options.recorded} is not what explain --json writes: {error}"
            ) from None
    if options.scenario is not None:
        scenario = SCENARIOS[options.scenario]
        policies = parse_policies(options.policy or scenario.policies, scenario.token_budget)
        return Explanation(
            scenario.title, tuple(scenario.run(name, policy) for name, policy in policies.items())
        )
    if options.simulate:
        return _simulated(options)
    texts = [check_utf8(text, "the prompt") for text in options.prompts or ()]
    rows = [PromptRow(place, prompt=text) for place, text in enumerate(texts)]
    if options.file is not None:
        rows += read_rows(options.file)
    if wrong := next((row for row in rows if row.error is not None), None):
        raise UsageError(f"{options.file} line {wrong.index + 1}: {wrong.error}")
    names: list[str | None] = [None]
    if options.policy is not None:
        names = list(parse_policies(options.policy, options.max_num_batched_tokens))
    title = f"{len(rows)} prompts"
    if len(rows) == 1:
        title = "one prompt"
    return Explanation(f"{title}, run here", tuple(_live(options, name, rows) for name in names))


def _simulated(options: ExplainOptions) -> Explanation:
    policies = parse_policies(options.policy or "throttling", options.max_num_batched_tokens)
    simulated, size = options.simulated(), options.block_size
    hardware = SimulatedHardware.of(simulated, options.max_num_batched_tokens, options.max_num_seqs)
    most = hardware.max_num_seqs
    what = (
        hardware.layouts,
        hardware.kv_blocks,
        hardware.host_blocks,
        hardware.predictors,
        hardware.windows,
    )
    runs = [
        explained_simulation(
            name, policy, options.workload(), *what, block_size=size, max_num_seqs=most
        )
        for name, policy in policies.items()
    ]
    return Explanation(
        f"{simulated.model} on {options.hardware}, {hardware.name}, simulated", tuple(runs)
    )


def _live(options: ExplainOptions, policy: str | None, rows: list[PromptRow]) -> ExplainedRun:
    """One run on this machine, all prompts at once. Raises UsageError for one that cannot be
    used."""
    given = options.given() | {"n": options.samples}
    # workers tell their times only where they are recorded
    record_file = options.record or os.devnull
    with replace(options, policy=policy, record=record_file).open_llm() as llm:
        engine, defaults, tokenizer = llm.engine, llm.default_sampling_params(), llm.tokenizer
        record = RunRecord(engine.executor.max_in_flight, keeps_tables=True)
        recorder = recorder_of(engine)
        recorder.add(record)
        items = [(row.prompt, sampling_params(defaults, given, row.settings)) for row in rows]
        for _, output in llm.generate_as_completed(items):
            if isinstance(output, NanoserveError):
                raise output
            if (error := output.outputs[0].error) is not None:
                raise RuntimeFailure(error)
        recorder.finish()
        name, size = policy or llm.built.config.policy_name, llm.built.config.block_size
        decode, stages = (
            partial(tokenizer.decode, skip_special_tokens=False),
            engine.scheduler.pipeline_depth,
        )
        return explain_run(
            name, record, size, stages, lambda tokens: tuple(decode([one]) for one in tokens)
        )
