"""``nanoserve bench pipeline``: scheduling policies side by side on the same worker processes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from nanoserve.commands.options import option
from nanoserve.commands.progress import show_progress
from nanoserve.commands.tables import columns
from nanoserve.commands.terminal import remark
from nanoserve.commands.torchrun import on_all_machines
from nanoserve.engine_config import MOST_PARALLEL, PAIR_OPTIONS
from nanoserve.errors import UsageError, shown
from nanoserve.executor.start.rendezvous import TorchrunProcess
from nanoserve.lab.benchmarks.floors import ModelCost
from nanoserve.lab.benchmarks.policies.metrics import stage_metrics, stages_picture
from nanoserve.lab.benchmarks.policies.rounds import Ratio
from nanoserve.lab.benchmarks.policies.variants import PolicyVariant, fitted
from nanoserve.lab.benchmarks.serving.requests import parse_rates
from nanoserve.lab.commands.bench_options import LengthOptions, fitting_work, operators_title
from nanoserve.lab.commands.bench_variants import Comparison, RandomModelOptions, Table
from nanoserve.scheduler.policies import parse_policies

METADATA: tuple[Literal["decoupled", "coupled"], ...] = ("decoupled", "coupled")
_KEYS = columns(("", ("policy, engine", "variant"), ("read", "state")))
_PREDICTED = columns((",.1f", ("predicted", "predicted_tokens_per_s")))
_REQUEST_COLUMNS = _KEYS + columns(
    ("", "rounds"),
    (",.1f", ("output tok/s", "output_tokens_per_s")),
    (",.1f", ("TTFT ms", "ttft_ms.mean"), ("TPOT ms", "tpot_ms.mean"), ("ITL p99", "itl_p99_ms")),
)
_STAGE_COLUMNS = _KEYS + columns(
    ("", "stage"),
    (",.0f", "steps"),
    (".2f", "variation"),
    (".1%", "bubbles", ("for inputs", "metadata"), ("for work", "waiting")),
)
_SIMULATED_COLUMNS = _KEYS + columns(
    (".3f", "simulated.makespan", ("TTFT", "simulated.ttft"), ("TPOT", "simulated.tpot")),
    (",.0f", "simulated.plans", ("others when simulated", "simulated.others")),
)


class PipelineOptions(LengthOptions, RandomModelOptions):
    rate: str = option("inf", "Requests per second, or inf: all at once.", metavar="X")
    metadata: str = option(
        "decoupled", "decoupled: plans go ahead (gLLM); coupled; or both.", metavar="NAME"
    )
    predicted: bool = option(False, "Measure the layouts first, and say what that predicts.")
    against_one_process: bool = option(
        False, "Also one process with all threads, on the same work."
    )
    policy: str = option(
        "sarathi,throttling",
        "Each on its own, as throttling:without_wt with parameters.",
        metavar="NAME,NAME",
        variables=(),
    )
    pp: int = option(2, "Stages of the pipeline.", minimum=1, maximum=MOST_PARALLEL, variables=())


@on_all_machines
def run(options: PipelineOptions) -> None:
    """Printed are tokens per second and latencies, where the stages' time went (bubbles), how even
    the micro-batches were, ratios with their spread, and what the simulator makes of the same stage
    times. Answers have the length that was asked for, prompts are random, no prefixes are shared.

    [bold]Examples[/bold]

      nanoserve bench pipeline --pp 2 -m dummy:smollm2-135m --rate 2 \\
        --plot pipeline.png
      nanoserve bench pipeline --policy throttling --metadata both \\
        --json metadata.json
      nanoserve bench pipeline --policy sarathi --against-one-process --rounds 5
    """
    options.check_is_for_cpu()
    StageComparison(options).run()


class StageComparison(Comparison):
    """Every policy on every engine: rates, latencies, and where the time of the stages went."""

    kind = "pipeline"
    reported = ("metadata", "predicted", "pp", "tp", "pp_split")
    picture = staticmethod(stages_picture)
    ratios = {  # noqa: RUF012
        "output_tokens_per_s": "tok/s",
        "ttft_ms": "TTFT",
        "tpot_ms": "",
        "itl_p99_ms": "ITL p99",
        "e2el_ms": "",
    }

    def __init__(self, options: PipelineOptions) -> None:
        if (
            options.prefill_parallel
            or options.decode_parallel
            or options.host_kv_memory
            or options.dp > 1
        ):
            raise UsageError(
                "policies are compared on one layout of one engine, without host memory: leave out "
                "--dp (which bench "
                f"throughput and serve have), {PAIR_OPTIONS[0]}, {PAIR_OPTIONS[1]} and "
                "--host-kv-memory"
            )
        config, rates = options.config(), parse_rates(options.rate, "--rate")
        if len(rates) > 1:
            raise UsageError(f"--rate takes one rate here, not {shown(options.rate)}")
        self.rate = rates[0]
        self.metadata = [one for one in METADATA if options.metadata in (one, "both")]
        if not self.metadata:
            raise UsageError(
                f"--metadata {shown(options.metadata)} is not one of {', '.join(METADATA)}, both"
            )
        if len(self.metadata) > 1 and TorchrunProcess.from_environment() is not None:
            raise UsageError(
                "--metadata both takes two groups of workers, but torchrun started one: measure "
                "each"
            )
        self.policies = tuple(parse_policies(options.policy, options.max_num_batched_tokens))
        self.against_one_process = options.against_one_process
        self.work = work = options.read(options.seed or 0)
        asked = {"request_rate": options.rate, "policies": options.policy}
        super().__init__(options, config, work=work.name, requests=len(work.shapes), **asked)

    def _open_engines(self) -> None:
        """Start the workers of each kind of metadata, and one process to compare them with."""
        from nanoserve.lab.benchmarks.policies import engines

        config = self.config
        degrees = [("pp", config.pipeline_parallel), ("tp", config.tensor_parallel)]
        words = [f"{name}={degree}" for name, degree in degrees if degree > 1] or ["pp=1"]
        for metadata in self.metadata:
            name = " ".join(words)
            if metadata == "coupled":
                name += " coupled"
            self.open(
                f"starting {name}",
                engines.open_workers,
                name,
                self.resolved,
                config,
                self.model,
                metadata=metadata,
                simulated=metadata == "decoupled" and config.pipeline_parallel > 1,
                predicted=self.settings["predicted"] and metadata == "decoupled",
            )
        if self.against_one_process:
            self.open(
                "opening one process",
                engines.open_one_process,
                "one process",
                self.resolved,
                config,
            )

    def prepare(self) -> dict[str, Any]:
        """Engines with equally many KV blocks, and the requests that fit."""
        import torch

        from nanoserve.lab.benchmarks.roofline import STAGE, machine_limits
        from nanoserve.models.dtypes import resolve_dtype

        model = self.model
        self._open_engines()
        config = fitted(self.config, model, self.engines)
        work = fitting_work(self.work, config.max_model_len, self.report)
        blocks = min(engine.capacities[0].num_blocks for engine in self.engines)
        variants = []
        for engine in self.engines:
            capacities = [replace(engine.capacities[0], num_blocks=blocks)]
            variant = partial(
                PolicyVariant,
                place=engine.name,
                engine=engine,
                config=config,
                capacities=capacities,
            )
            variants += [
                variant(policy=policy, predictors=engine.predictors) for policy in self.policies
            ]
        dtype = resolve_dtype(config.dtype, torch.device(config.device), model.dtype)
        remark(f"{STAGE} ...")
        with show_progress() as progress:
            limits = machine_limits(dtype, self.probe, progress=progress)
        measure = partial(stage_metrics, cost=ModelCost(model, dtype.itemsize), limits=limits)
        bench = partial(self.bench, case=work.name, shapes=work.shapes, measure=measure)
        self.benches.append(bench(variants=variants, rate=self.rate))
        return {
            "kv_blocks": blocks,
            "limit_read_gb_per_s": limits.bytes_per_second / 1e9,
            "limit_gflops": limits.operations_per_second / 1e9,
        }

    @property
    def title(self) -> str:
        settings, facts, rate = self.settings, self.facts, self.settings["request_rate"]
        together = f"{rate} a second"
        if rate == "inf":
            together = "all at once"
        how = f"{facts['dtype']}, {operators_title(facts)}"
        threads = (
            f"{facts['threads']} threads, {facts['threads_of_a_worker']} of them for each worker"
        )
        return (
            f"{settings['requests']} requests of {settings['work']}, {together}; {facts['model']}, "
            f"{how}, {threads}"
        )

    def tables(
        self, summary: Sequence[Mapping[str, Any]], compared: Sequence[Ratio]
    ) -> Iterator[Table]:
        shown = list(_REQUEST_COLUMNS)
        if self.settings["predicted"]:
            shown += _PREDICTED
        yield Table(self.title, shown, summary)
        heading = "micro-batches, and what the time of the stages went into"
        yield Table(heading, _STAGE_COLUMNS, _stage_rows(summary), keys=3)
        yield self.ratio_table("ratios within a round: median (lowest-highest)", compared)
        heading = "simulated, with the stage times of the real runs; ratios are simulated over real"
        yield Table(heading, _SIMULATED_COLUMNS, [row for row in summary if row["simulated"]])


def _stage_rows(summary: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """A row for each stage; that of a single process has no shares."""
    for row in summary:
        for stage, shares in (row["stages"] or {"-": {}}).items():
            bubbles = None
            if shares:
                bubbles = 1 - shares["computing"]
            yield {**row, **shares, "stage": stage, "bubbles": bubbles}
