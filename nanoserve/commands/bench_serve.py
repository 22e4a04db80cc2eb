"""``nanoserve bench serve``: what clients of a server get to see under load."""

from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from nanoserve.commands.bench_lengths import LengthOptions
from nanoserve.commands.bench_options import ResultOptions, engine_title, kept, print_head, work_option
from nanoserve.commands.failures import EXIT_OK, say
from nanoserve.commands.options import EngineOptions, ServerOptions
from nanoserve.commands.progress import counted, show_progress
from nanoserve.commands.terminal import remark
from nanoserve.commands.torchrun import on_all_machines
from nanoserve.commands.workers_options import WorkersOptions
from nanoserve.errors import RuntimeFailure, UsageError

if TYPE_CHECKING:
    from nanoserve.benchmarks.cpu_load import ForeignLoad
    from nanoserve.benchmarks.report import Report
    from nanoserve.benchmarks.serving.measuring import Point
    from nanoserve.client.address import ServerAddress

DEFAULT_CONCURRENCY = "1,4,16"
ARRIVALS = ("poisson", "trace")
LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """When requests come."""

    request_rate: Annotated[
        str | None,
        work_option("--request-rate", help="Open loop: requests per second, or inf.", metavar="X,X,..."),
    ] = None
    concurrency: Annotated[
        str | None,
        work_option("--concurrency", help="Closed loop: clients that ask one after another.", metavar="N,N,..."),
    ] = None
    arrivals: Annotated[
        str,
        work_option(
            "--arrivals",
            help="poisson, or trace: the times of --trace, stretched to --request-rate if given.",
            metavar="NAME",
        ),
    ] = ARRIVALS[0]

    def points(self) -> "list[Point]":
        """The loads of the sweep.

        Raises:
            UsageError: for options that contradict each other.
        """
        from nanoserve.benchmarks.serving.measuring import Point
        from nanoserve.benchmarks.serving.requests import parse_rates
        from nanoserve.measures.workloads import parse_sizes

        if self.arrivals not in ARRIVALS:
            raise UsageError(f"--arrivals {self.arrivals!r:.40} is not one of {', '.join(ARRIVALS)}")
        traced = self.arrivals == "trace"
        if self.concurrency is not None and (traced or self.request_rate is not None):
            raise UsageError("--concurrency is a closed loop: give it without --request-rate and --arrivals trace")
        if self.request_rate is not None:
            return [Point(rate=rate, traced=traced) for rate in parse_rates(self.request_rate, "--request-rate")]
        if traced:
            return [Point(traced=True)]
        sizes = parse_sizes(self.concurrency or DEFAULT_CONCURRENCY, "--concurrency")
        return [Point(concurrency=size) for size in sizes]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkOptions(LengthOptions):
    """What is asked."""

    endpoint: Annotated[
        str, work_option("--endpoint", help="completions (token ids) or chat (words).", metavar="NAME")
    ] = "completions"
    allow_eos: Annotated[
        bool,
        work_option(
            "--allow-eos", help="Answers may end early: do not send ignore_eos, which some refuse.", metavar=""
        ),
    ] = False


@on_all_machines
def serve(
    *,
    load: LoadOptions,
    work: WorkOptions,
    slo: Annotated[
        str | None,
        work_option("--slo", help="Milliseconds that a good answer keeps to.", metavar="ttft=X,tpot=X,e2el=X"),
    ] = None,
    warm_up: Annotated[int, work_option("--warm-up", help="Unmeasured requests before.", min=1)] = 4,
    repeats: Annotated[int, work_option("--repeats", help="Measured runs of each load.", min=1)] = 1,
    timeout: Annotated[
        float, work_option("--timeout", help="For a whole answer; a later one has failed.", metavar="SECONDS", min=0.1)
    ] = 1800.0,
    server: ServerOptions,
    engine: WorkersOptions,
    results: ResultOptions,
) -> int:
    """Send requests to a server and see how long its clients wait: ours, or any that speaks OpenAI's API.

    Without --url a server of our own is started with the options of the engine, and ended afterwards. Requests come
    in an open loop, at a rate whatever the answers, or in a closed loop, from clients that wait for each answer.
    Prompts are random, and new in every run. Failed requests are counted, by what went wrong.

    [bold]Examples[/bold]

      nanoserve bench serve -m dummy:qwen3-0.6b --concurrency 1,4,16 --input 128 --output 64
      nanoserve bench serve --url http://127.0.0.1:8000 --request-rate 1,2,4 --slo ttft=2000,tpot=100 --plot load.png
      nanoserve bench serve --trace AzureLLMInferenceTrace_conv.csv --arrivals trace --requests 200 --json azure.json
    """
    if find_spec("h11") is None:
        from nanoserve.processes.installation import install_command

        raise RuntimeFailure(f"bench serve needs h11: {install_command('server')}")
    from nanoserve.benchmarks.serving.measuring import ServeBench
    from nanoserve.benchmarks.serving.requests import RequestStyle, check_endpoint
    from nanoserve.benchmarks.serving.sending import Sender
    from nanoserve.measures.slo import parse_slo

    points, limits, seed = load.points(), parse_slo(slo), engine.seed or 0
    endpoint = check_endpoint(work.endpoint)
    asked = work.read(seed, traced=load.arrivals == "trace")
    settings: dict[str, Any] = {"work": asked.name, "requests": len(asked.shapes), "repeats": repeats, "seed": seed}
    settings |= {"endpoint": endpoint, "ignore_eos": not work.allow_eos, "warm_up": warm_up, "timeout": timeout}
    report = results.open_report("serve", settings | {"slo": slo, "points": [point.name for point in points]})
    with ExitStack() as opened, kept(report, lambda: _show(report, results)):
        target = _target(server, engine, report, opened)
        fitting = asked.fitting(target.context)
        if left_out := len(asked.shapes) - len(fitting.shapes):
            report.note(f"{left_out} requests are longer than the context of {target.context} and left out")
        style = RequestStyle.of(target.model, endpoint, ignore_eos=not work.allow_eos)
        sender = Sender(target.address, style.path, api_key=target.api_key, timeout=timeout)
        bench = ServeBench(sender, style, fitting, seed=seed, slo=limits, foreign=target.foreign)
        remark(f"warming up with {warm_up} requests")
        bench.warm_up(warm_up)
        for point in points:
            remark(f"measuring {asked.name} at {point.name}")
            with show_progress() as progress:
                answers = counted(progress, "answers", repeats * len(fitting.shapes))
                bench.measure(point, repeats, report.add, answers)
    return EXIT_OK


@dataclass(frozen=True, slots=True)
class _Target:
    """The server under load. ``context`` and ``foreign`` are None where they cannot be known."""

    address: "ServerAddress"
    api_key: str | None
    model: str
    context: int | None
    foreign: "ForeignLoad | None"


def _target(server: ServerOptions, engine: EngineOptions, report: "Report", opened: ExitStack) -> _Target:
    """The server at --url, or one of our own that ends with ``opened``."""
    from nanoserve.benchmarks.cpu_load import ForeignLoad
    from nanoserve.client.connection import ApiClient
    from nanoserve.client.models import served_model

    if server.url is not None:
        client, key, foreign = server.client(), server.api_key, None
        if idle := engine.without_effect_on_servers():
            say(f"with --url these have no effect: {', '.join(idle)}")
        card = served_model(client, engine.model, say)
    else:
        from nanoserve.benchmarks.serving.own_server import OwnServer
        from nanoserve.benchmarks.serving.preparing import prepare_elsewhere

        remark("preparing the engine")
        report.put("engine", prepare_elsewhere(engine.model, engine.settings(), engine.threads))
        remark("starting a server")
        own = OwnServer(engine.flags())
        opened.callback(own.close)
        client, key, foreign = ApiClient(own.address), None, ForeignLoad([own.process_id])
        card = served_model(client, own.model, say)
    report.put("server", {"url": str(client.address), "own": server.url is None, "model": card.name})
    return _Target(client.address, key, card.id, card.max_model_len, foreign)


def _show(report: "Report", results: ResultOptions) -> None:
    from nanoserve.benchmarks.serving.records import warnings
    from nanoserve.benchmarks.tables import Column, print_table

    document = report.document
    title = f"{document['settings']['work']} asked of {document['server']['model']}"
    title += f", {engine_title(document['engine'])}" if "engine" in document else f" at {document['server']['url']}"
    print_head(report)
    columns = [
        Column("load", "case"),
        Column("complete", "completed", ",d"),
        Column("failed", "failed", ",d"),
        Column("at a time", "peak_concurrency", ",d"),
        Column("requests/s", "requests_per_s", ",.2f"),
        Column("output tok/s", "output_tokens_per_s", ",.1f"),
        Column("total tok/s", "total_tokens_per_s", ",.1f"),
        Column("goodput/s", "goodput.requests_per_s", ",.2f"),
        Column("attained", "goodput.attainment", ".0%"),
        Column("foreign cores", "foreign_cores", ".2f"),
    ]
    print_table(title, columns, report.rows)
    statistics = [Column(name, name, ",.1f") for name in ("mean", "p50", "p90", "p99", "max")]
    rows = [
        {"case": row["case"], "metric": _short(metric), **(row[metric] or {})}
        for row in report.rows
        for metric in LATENCIES
    ]
    columns = [Column("load", "case"), Column("metric", "metric"), Column("n", "n", ",d"), *statistics]
    print_table("milliseconds", columns, rows)
    for row in report.rows:
        for warning in warnings(row):
            print(f"{row['case']}: {warning}")
    if results.plot is not None:
        _plot(results.plot, report.titled(title), report.rows)


def _plot(path: Path, title: str, rows: list[dict[str, Any]]) -> None:
    """Percentiles of each latency, and the output, over the loads."""
    from nanoserve.benchmarks.plots import LinePanel, plot_lines
    from nanoserve.benchmarks.tables import Column

    panels = [
        LinePanel(
            f"{_short(metric)} in ms", [Column(name, f"{metric}.{name}", ".3f") for name in ("p50", "p90", "p99")]
        )
        for metric in LATENCIES
    ]
    panels.append(LinePanel("output tokens/s", [Column("mean", "output_tokens_per_s", ".3f")]))
    axis = "clients" if rows[0]["concurrency"] else "requests/s offered"
    plot_lines(path, title, axis, "tick", panels, rows)


def _short(metric: str) -> str:
    """``ttft_ms`` as people write it."""
    return metric.removesuffix("_ms").upper()
