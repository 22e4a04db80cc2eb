"""``nanoserve bench serve``: what clients of a server get to see under load."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from typing import TYPE_CHECKING, Any

import msgspec

from nanoserve.commands.engine_options import ServerOptions, WorkersOptions
from nanoserve.commands.options import option
from nanoserve.commands.progress import counted, show_progress
from nanoserve.commands.tables import columns
from nanoserve.commands.terminal import remark, say
from nanoserve.commands.torchrun import on_all_machines
from nanoserve.errors import RuntimeFailure, UsageError
from nanoserve.lab.benchmarks.machine import ForeignLoad
from nanoserve.lab.benchmarks.report import Report
from nanoserve.lab.benchmarks.rounds import counting_words
from nanoserve.lab.benchmarks.serving.own_server import OwnServer
from nanoserve.lab.benchmarks.serving.picture import PANEL_SIZE, load_chart, load_of
from nanoserve.lab.benchmarks.serving.records import LoadRun, knee, warnings
from nanoserve.lab.benchmarks.serving.requests import Point, RequestStyle, Work, parse_rates
from nanoserve.lab.benchmarks.verdicts import spread_text
from nanoserve.lab.charts import draw
from nanoserve.lab.commands.bench_options import (
    LengthOptions,
    ResultOptions,
    RoundOptions,
    engine_title,
    fitting_work,
    print_latencies,
    print_results,
)
from nanoserve.lab.highest_rate import HighestRate, RateTrial
from nanoserve.lab.workloads import parse_sizes
from nanoserve.record.metrics import parse_slo
from nanoserve.server.client.connection import ApiClient, ModelCard, served_model
from nanoserve.utils.children import run_module
from nanoserve.utils.installation import install_command

if TYPE_CHECKING:
    from nanoserve.lab.benchmarks.serving.sending import ServeBench

DEFAULT_CONCURRENCY = (1, 4, 16)
_LONGEST_TRIAL = 4  # times --requests, for a rate of --max-rate that shorter runs do not decide
_COLUMNS = columns(
    ("", ("load", "case")),
    (",d", ("complete", "completed"), "failed"),
    (",.2f", ("requests/s", "requests_per_s")),
    (",.1f", ("output tok/s", "output_tokens_per_s")),
    (",.2f", ("goodput/s", "goodput.requests_per_s")),
    (".0%", ("attained", "goodput.attainment")),
)


class BenchServeOptions(LengthOptions, RoundOptions, ServerOptions, WorkersOptions, ResultOptions):
    endpoint: str = option(
        "completions", "Token ids or words are sent.", choices=("completions", "chat")
    )
    allow_eos: bool = option(
        False, "Answers may end early: do not send ignore_eos, which some refuse."
    )
    slo: str | None = option(
        None,
        "Milliseconds that a good answer keeps to, as ttft=2000,tpot=100,e2el=9000.",
        metavar="LIMITS",
    )
    warm_up: int = option(4, "Unmeasured requests before.", minimum=1)
    repeats: int = option(1, "Measured runs of each load.", minimum=1)
    timeout: float = option(
        1800.0,
        "Limit for a whole answer; a later answer has failed.",
        metavar="SECONDS",
        minimum=0.1,
    )
    rate: tuple[float, ...] | None = option(
        None, "Open loop: requests per second, or inf.", metavar="X,X,...", parse=parse_rates
    )
    concurrency: tuple[int, ...] | None = option(
        None,
        "Closed loop: clients that ask one after another.",
        metavar="N,N,...",
        parse=parse_sizes,
    )
    arrivals: str = option(
        "poisson",
        "Or the times of --trace, stretched to --rate if given.",
        choices=("poisson", "trace"),
    )
    max_rate: bool = option(
        False,
        "Find the highest rate at which no queue grows, and with --slo 99% of the requests keep to "
        "it.",
    )

    def points(self) -> list[Point]:
        """The loads of the sweep, none if they are to be found; a UsageError says which options
        contradict."""
        traced = self.arrivals == "trace"
        if self.max_rate:
            if (self.rate, self.concurrency) != (None, None):
                raise UsageError("--max-rate finds the rate: leave out --rate and --concurrency")
            if self.repeats > 1:
                raise UsageError(
                    "--max-rate makes a run longer until it is decided: leave out --repeats"
                )
            return []
        if self.concurrency is not None and (traced or self.rate is not None):
            raise UsageError(
                "--concurrency is a closed loop: give it without --rate and --arrivals trace"
            )
        if self.rate is not None:
            return [Point(rate=rate, traced=traced) for rate in self.rate]
        if traced:
            return [Point(traced=True)]
        return [Point(concurrency=size) for size in self.concurrency or DEFAULT_CONCURRENCY]


@on_all_machines
def run(options: BenchServeOptions) -> None:
    """Without --url a server of our own is started with the options of the engine, and ended
    afterwards. Requests come in an open loop, at a rate whatever the answers, or in a closed loop,
    from clients that wait for each answer. Prompts are random, and new in every run. Failed
    requests are counted, by what went wrong.

    [bold]Examples[/bold]

      nanoserve bench serve -m dummy:qwen3-0.6b --concurrency 1,4,16 \\
        --lengths 128+64
      nanoserve bench serve --url http://127.0.0.1:8000 --rate 1,2,4 \\
        --slo ttft=2000,tpot=100 --plot load.png
      nanoserve bench serve -m dummy:qwen3-0.6b --max-rate --requests 100
      nanoserve bench serve --trace AzureLLMInferenceTrace_conv.csv \\
        --arrivals trace --requests 200 --json azure.json
    """
    if find_spec("h11") is None:
        raise RuntimeFailure(f"bench serve needs h11: {install_command('server')}")
    points, traced = options.points(), options.arrivals == "trace"
    parse_slo(options.slo)  # one that makes no sense is refused before a server starts
    work = options.read(options.seed or 0, traced=traced)
    settings = _settings(options, work, points)
    with options.reported("serve", settings, _show) as report, ExitStack() as opened:
        client, foreign = _server(options, report, opened)
        model = _served(options, client)
        is_own = options.url is None
        report.put("server", {"url": str(client.address), "own": is_own, "model": model.name})
        fitting = fitting_work(work, model.max_model_len, report)
        bench = _bench(options, client, model.id, fitting, foreign)
        remark(f"warming up with {options.warm_up} requests")
        bench.warm_up(options.warm_up)

        def measure(point: Point, bench: "ServeBench" = bench) -> list[LoadRun]:
            remark(f"measuring {work.name} at {point.name}")
            with show_progress() as progress:
                expected = options.repeats * len(bench.work.shapes)
                answers = counted(progress, "answers", expected)
                runs = bench.measure(point, options.repeats, report.add, answers)
            report.put("counting", counting_words(bench.done, "runs"))
            return runs

        def measure_rate(rate: float, requests: int) -> RateTrial:
            longer = bench
            if requests != len(fitting.shapes):
                longer = replace(bench, work=fitting.lengthened(requests))
            run = measure(Point(rate=rate, traced=traced, exact=True), longer)[-1]
            row = report.rows[-1]
            if len(report.rows) == 1:
                least = f"{row['seconds']:,.0f} s or more"
                remark(f"some eight more runs or longer ones find the rate, each of {least}")
            goodput = row["goodput"] or {"attainment": None}
            return RateTrial(row["requests_per_s"], run.answers, goodput["attainment"])

        for point in points:
            measure(point)
        if options.max_rate:
            requests = len(fitting.shapes)
            longest = 1 if traced else _LONGEST_TRIAL  # a trace has as many arrivals as it has
            search = HighestRate(measure_rate, requests, longest * requests)
            report.put("highest_rate", search.find())


def _served(options: BenchServeOptions, client: ApiClient) -> ModelCard:
    """The model that is asked: of a server of our own its only one."""
    if options.url is None:
        return served_model(client, None, say)
    return served_model(client, options.model, say)


def _bench(
    options: BenchServeOptions,
    client: ApiClient,
    model: str,
    work: Work,
    foreign: ForeignLoad | None,
) -> "ServeBench":
    from nanoserve.lab.benchmarks.serving.sending import Sender, ServeBench  # they need h11

    style = RequestStyle(model=model, endpoint=options.endpoint, ignore_eos=not options.allow_eos)
    return ServeBench(
        sender=Sender(client, style.path, timeout=options.timeout),
        style=style,
        work=work,
        seed=options.seed or 0,
        slo=parse_slo(options.slo),
        foreign=foreign,
        repeating=options.repeating(),
    )


def _settings(options: BenchServeOptions, work: Work, points: Sequence[Point]) -> dict[str, Any]:
    """The options as the report has them."""
    settings = {
        name: getattr(options, name)
        for name in ("repeats", "endpoint", "warm_up", "timeout", "slo")
    }
    settings |= {"work": work.name, "requests": len(work.shapes), "seed": options.seed or 0}
    return settings | {
        "ignore_eos": not options.allow_eos,
        "points": [point.name for point in points],
    }


def _server(
    options: BenchServeOptions, report: Report, opened: ExitStack
) -> tuple[ApiClient, ForeignLoad | None]:
    """A client of the server at --url, or of one of our own that ends with ``opened``; and what
    tells of other programs beside it, which cannot be known of a server elsewhere."""
    if options.url is not None:
        return options.client(options), None
    remark("preparing the engine")
    report.put("engine", prepare_engine(options.model, options.settings(), options.threads))
    remark("starting a server")
    own = OwnServer(options.flags())
    opened.callback(own.close)
    return ApiClient(own.address), ForeignLoad([own.process_id])


def prepare_engine(
    model: str | None, settings: dict[str, Any], threads: int | None
) -> dict[str, Any]:
    """Build what a server of our own will run on, in another process: a server builds it while it
    answers. Returns facts about the engine as it will run with these settings of LLM: model, dtype,
    operators, layers, threads. Raises RuntimeFailure in the process's own words if the model cannot
    be opened."""
    words = json.dumps(model), msgspec.json.encode(settings).decode()  # a layout is a dataclass
    environment: dict[str, str] = {}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    return run_module("nanoserve.lab.benchmarks.settling", *words, environment=environment)


def _show(report: Report, options: ResultOptions) -> str:
    document = report.document
    title = f"{document['settings']['work']} asked of {document['server']['model']}"
    if "engine" in document:
        title += f", {engine_title(document['engine'])}"
    else:
        title += f" at {document['server']['url']}"
    print_results(report, title, _COLUMNS)
    print_latencies(report, columns(("", ("load", "case"))))
    for row in report.rows:
        for warning in warnings(row):
            print(f"{row['case']}: {warning}")
    if options.plot is not None:
        draw(load_chart(report, title), options.plot, panel_size=PANEL_SIZE)
    return _verdict(report)


def _verdict(report: Report) -> str:
    """The highest rate if it was asked for, and else what the last load gains over the first."""
    found, settings = report.document.get("highest_rate"), report.document["settings"]
    rows = sorted(report.rows, key=load_of)
    words = []
    if found is not None:
        words.append(f"highest rate: {found['words']}")
        if found["rate"] is not None:
            at_once = rows[-1]["requests_per_s"]
            words.append(
                f"that is {found['rate'] / at_once:.2f} of the requests/s when all come at once"
            )
    else:
        words += _gains(rows)
    good = [row["goodput"]["attainment"] for row in rows if row["goodput"] is not None]
    if good and found is None:
        words.append(
            f"{min(good):.0%} to {max(good):.0%} of the requests of a load keep to "
            f"{settings['slo']}"
        )
    words.append(report.document.get("counting", "the first load was interrupted"))
    sentence = "; ".join(words)
    return f"{sentence[0].upper()}{sentence[1:]}."


def _gains(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Output and latency of the last load over those of the first, or how far the runs of a single
    load are apart."""
    first, last = rows[0], rows[-1]
    rates = [row["samples"]["output_tokens_per_s"] for row in (first, last)]
    if len(rows) > 1 and all(rates):
        gains = spread_text(most / least for most, least in product(rates[1], rates[0]))
        latency = last["e2el_ms"]["p50"] / first["e2el_ms"]["p50"]
        output = f"{last['case']} get {gains} times the output tok/s of {first['case']}"
        yield f"{output}, at {latency:.2f} times the median latency"
    elif rates[-1]:
        apart = max(rates[-1]) / min(rates[-1])
        yield (
            f"the fastest run of {last['case']} has {apart:.2f} times the output tok/s of the "
            "slowest"
        )
    if (bend := knee(rows)) is not None:
        yield f"output over latency is best at {bend['case']}"
