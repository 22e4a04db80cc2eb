"""``nanoserve generate``: go on with a text, or with a whole file of them."""

import sys
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from nanoserve.commands.answers import LocalModel, stream_answer
from nanoserve.commands.engine_options import SamplingOptions, WorkersOptions, check_utf8
from nanoserve.commands.options import argument, file_option, option
from nanoserve.commands.printers import AnswerPrinter
from nanoserve.commands.state_line import StateLine
from nanoserve.commands.terminal import read_stdin, say
from nanoserve.commands.torchrun import on_all_machines
from nanoserve.errors import RuntimeFailure, UsageError
from nanoserve.utils.interrupts import prompt_interrupts


class GenerateOptions(
    WorkersOptions, SamplingOptions, panel="Input and output", has_variables=True
):
    prompt: str | None = argument(None, "Text to continue; - reads it from stdin.")
    file: Path | None = file_option(
        "Many prompts: a text file with one per line, or .jsonl rows.", "-f"
    )
    output: Path | None = file_option("Results of --file, one JSON row per prompt.", "-o")
    json: bool = option(False, "One JSON object instead of text.")


@on_all_machines
def run(options: GenerateOptions) -> None:
    """[bold]Examples[/bold]

      nanoserve generate "Once upon a time" --max-tokens 60
      cat story.txt | nanoserve generate - --json
      nanoserve generate --file prompts.jsonl --output results.jsonl
      nanoserve generate -f in.jsonl -o out.jsonl --prefill-parallel p2 \\
        --decode-parallel t2 --host-kv-memory 4GiB

    A row of a .jsonl file is an object with "prompt" or "messages", and if you
    like "id" and sampling settings, as {"id": 7, "prompt": "Once", "top_p": 0.9}.
    The answer to "messages" has its reasoning, if any, in "reasoning".
    Results are written as they finish; the same command goes on where an earlier
    run was stopped. A row that cannot be used becomes an error row; delete its
    line from the output to try it again.
    """
    settings = options.given()
    if options.file is not None:
        if options.prompt is not None:
            raise UsageError("give a prompt or --file, not both")
        if options.output is None:
            raise UsageError("--file needs --output, the file for the results")
        if options.json:
            raise UsageError(
                "--json is for a single prompt: the rows of --output are JSON in any case"
            )
        # and the planner, which a single prompt does not need
        from nanoserve.commands.batch import run_batch

        return run_batch(options.file, options.output, options, settings)
    if options.output is not None:
        raise UsageError("--output goes with --file; use > to keep the text of one prompt")
    if options.prompt is None:
        raise UsageError("give a prompt, - to read it from stdin, or --file")
    if options.prompt == "-":
        text = read_stdin()
    else:
        text = check_utf8(options.prompt, "the prompt")
    if not text:
        raise UsageError("the prompt is empty")
    found = options.find_model()
    model = LocalModel(found.name, partial(options.open_llm, found), say, options.seed)
    with closing(model), prompt_interrupts(), StateLine(lambda: model.waiting) as line:
        _show(model, text, settings, line, as_json=options.json)


def _show(
    model: LocalModel, prompt: str, settings: dict[str, Any], line: StateLine, *, as_json: bool
) -> None:
    """Go on with one prompt, and show the text as it comes, or at the end as an object."""
    printer, texts, last = AnswerPrinter(Console(file=sys.stdout)), [], None
    try:
        with closing(stream_answer(model.llm, prompt, settings)) as stream:
            for last in stream:
                texts.append(last.text)
                if not as_json:
                    line.end()
                    printer.answer(last.text)
    finally:
        line.end()
        printer.finish()
    if last is None:
        raise RuntimeFailure("the model gave no answer")
    if as_json:
        print(replace(last, text="".join(texts)).json(model.name))
