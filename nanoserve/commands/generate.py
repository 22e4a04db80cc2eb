"""``nanoserve generate``: go on with a text, or with a whole file of them."""

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from nanoserve.commands.batch import run_batch
from nanoserve.commands.failures import EXIT_OK
from nanoserve.commands.options import EngineOptions, SamplingOptions, check_utf8, option, sampling_params, switch
from nanoserve.commands.printers import PlainPrinter
from nanoserve.commands.progress import show_progress
from nanoserve.commands.terminal import read_stdin
from nanoserve.commands.torchrun import on_all_machines
from nanoserve.commands.usage import Usage, envelope
from nanoserve.commands.workers_options import ServingOptions
from nanoserve.errors import RuntimeFailure, UsageError

PANEL = "Input and output"


@on_all_machines
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The text to go on with; - reads it from stdin.", show_default=False)
    ] = None,
    *,
    file: Annotated[
        Path | None,
        option(
            "--file",
            "-f",
            panel=PANEL,
            metavar="FILE",
            help="Many prompts: a text file with one per line, or .jsonl rows.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        option("--output", "-o", panel=PANEL, metavar="FILE", help="Results of --file, one JSON row per prompt."),
    ] = None,
    json_output: Annotated[bool, switch("--json", panel=PANEL, help="One JSON object instead of text.")] = False,
    engine: ServingOptions,
    sampling: SamplingOptions,
) -> int:
    """Go on with a text exactly as given, without a chat template.

    [bold]Examples[/bold]

      nanoserve generate "Once upon a time" --max-tokens 60
      cat story.txt | nanoserve generate - --json
      nanoserve generate --file prompts.jsonl --output results.jsonl
      nanoserve generate -f in.jsonl -o out.jsonl --prefill-parallel p2 \\
        --decode-parallel t2 --host-kv-memory 4GiB

    A row of a .jsonl file is an object with "prompt" or "messages", and if you
    like "id" and sampling settings, as {"id": 7, "prompt": "Once", "top_p": 0.9}.
    Results are written as they finish; the same command goes on where an earlier
    run was stopped. A row that cannot be used becomes an error row; delete its
    line from the output to try it again.
    """
    settings = sampling.given()
    if file is not None:
        if prompt is not None:
            raise UsageError("give a prompt or --file, not both")
        if output is None:
            raise UsageError("--file needs --output, the file for the results")
        if json_output:
            raise UsageError("--json is for a single prompt: the rows of --output are JSON in any case")
        return run_batch(file, output, engine, settings)
    if output is not None:
        raise UsageError("--output goes with --file; use > to keep the text of one prompt")
    text = _prompt_text(prompt)
    return _generate_one(text, engine, settings, as_json=json_output)


def _prompt_text(prompt: str | None) -> str:
    if prompt is None:
        raise UsageError("give a prompt, - to read it from stdin, or --file")
    text = read_stdin() if prompt == "-" else check_utf8(prompt, "the prompt")
    if not text:
        raise UsageError("the prompt is empty")
    return text


def _generate_one(text: str, engine: EngineOptions, settings: dict[str, Any], *, as_json: bool) -> int:
    with show_progress() as progress:
        llm = engine.open_llm(progress)
    with llm:
        params = sampling_params(llm.default_sampling_params(), settings)
        printer = PlainPrinter(sys.stdout)
        pieces: list[str] = []
        tokens, last = 0, None
        with closing(llm.stream(text, params)) as stream:
            for last in stream:
                tokens += len(last.outputs[0].token_ids)
                pieces.append(last.outputs[0].text)
                if not as_json:
                    printer.answer(last.outputs[0].text)
        printer.finish()
        if last is None or last.outputs[0].error is not None:
            raise RuntimeFailure((last and last.outputs[0].error) or "the model gave no answer")
        if as_json:
            usage = Usage.of(last, tokens)
            result = envelope(llm.model_name, "".join(pieces), "", usage, last.outputs[0].finish_reason)
            print(json.dumps(result, ensure_ascii=False))
    return EXIT_OK
