"""``nanoserve bench reshard``: two parallel layouts on the same workers, in turn, and each of them
alone."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

from nanoserve.commands.options import option
from nanoserve.commands.tables import columns
from nanoserve.commands.torchrun import on_all_machines
from nanoserve.engine_config import PAIR_OPTIONS, EngineConfig
from nanoserve.errors import UsageError
from nanoserve.executor.start.rendezvous import TorchrunProcess
from nanoserve.lab.benchmarks.policies.metrics import layout_metrics, phases_picture
from nanoserve.lab.benchmarks.policies.rounds import Pair, Ratio
from nanoserve.lab.benchmarks.policies.variants import RESHARDING, OpenEngine, PolicyVariant, fitted
from nanoserve.lab.commands.bench_options import LengthOptions, fitting_work, operators_title
from nanoserve.lab.commands.bench_variants import Comparison, RandomModelOptions, Table
from nanoserve.layout import ParallelLayout
from nanoserve.scheduler.policies import parse_policies

_MOVES = {"re-sharding": "reshards", "swaps out": "swaps_out", "swaps in": "swaps_in"}
_KEYS = columns(("", ("policy, layouts", "variant"), ("read", "state")))
_OF_STAGES = ("throttling", "adaptive")
_POLICIES = ["sarathi", *_OF_STAGES, *RESHARDING]
_PREDICTED = columns((",.1f", ("predicted", "predicted_tokens_per_s")))
_RUN_COLUMNS = _KEYS + columns(
    ("", "rounds"),
    (",.1f", ("output tok/s", "output_tokens_per_s")),
    (",.0f", "transitions"),
    (".0%", "pool_peak"),
)
_PHASE_COLUMNS = _KEYS + columns(
    (",.2f", "phases.prefill", "phases.decode"),
    (",.3f", "phases.draining", ("re-sharding", "phases.resharding")),
)
_MOVE_COLUMNS = _KEYS + columns(
    ("", "moves"),
    (",.2f", ("GB/s of a worker", "gb_per_s")),
    (".0%", ("of host link", "share_of_link"), ("behind computing", "hidden")),
)
_SIMULATED_COLUMNS = _KEYS + columns(
    (".3f", "simulated.makespan"),
    (
        ",.0f",
        ("transitions", "simulated.simulated_transitions"),
        ("others when simulated", "simulated.others"),
    ),
)


class ReshardOptions(LengthOptions, RandomModelOptions):
    against_own_workers: bool = option(False, "Also each layout on workers that have no other.")
    predicted: bool = option(False, "Measure the layouts first, and say what that predicts.")
    policy: str | None = option(
        None, "Variants to compare; default: all.", metavar="NAME,NAME", variables=()
    )
    prefill_parallel: str | None = option("p2", "Layout for prompts.", metavar="NAME", variables=())
    decode_parallel: str | None = option("t2", "Layout for decodes.", metavar="NAME", variables=())


@on_all_machines
def run(options: ReshardOptions) -> None:
    """All requests come at once, answers have the length that was asked for, prompts are random.
    Printed are tokens per second, where the time went, what was moved between device and host
    memory and how fast, ratios with their spread, and what the simulator makes of the same step
    times.

    [bold]Examples[/bold]

      nanoserve bench reshard -m dummy:qwen2.5-0.5b --max-model-len 1024 \\
        --host-kv-memory 64MiB --plot pool.png
      nanoserve bench reshard --prefill-parallel p2 --decode-parallel t2 \\
        --lengths 256+32 --requests 64
      nanoserve bench reshard --against-own-workers --rounds 5 \\
        --json reshard.json --record reshard-trace.json
    """
    options.check_is_for_cpu()
    LayoutComparison(options).run()


def resharding_variants(
    engines: Sequence[OpenEngine], config: EngineConfig, policies: Sequence[str] = _POLICIES
) -> Iterator[PolicyVariant]:
    """Each layout alone, on all workers that have it, before the ways of going from one to the
    other. Chunked prefill is the paper's baseline; a pipeline also has the policies made for
    pipelines."""
    for engine in engines:
        for number, (layout, capacity) in enumerate(
            zip(engine.layouts, engine.capacities, strict=True)
        ):
            place = layout.name
            if len(engine.layouts) == 1:
                place = f"{layout.name}, {engine.name}"
            alone = partial(
                PolicyVariant, place=place, engine=engine, config=config, capacities=[capacity]
            )
            predictors = engine.predictors[number : number + 1]
            for policy in policies:
                if policy not in RESHARDING and (
                    layout.pipeline_parallel > 1 or policy not in _OF_STAGES
                ):
                    yield alone(policy=policy, first=number, predictors=predictors)
    for engine in engines:
        if len(engine.layouts) == 1:
            continue
        in_turn = partial(
            PolicyVariant,
            place=engine.name,
            engine=engine,
            config=config,
            capacities=engine.capacities,
        )
        for policy in policies:
            if policy in RESHARDING:
                yield in_turn(
                    policy=policy, host_blocks=engine.host_blocks, predictors=engine.predictors
                )


def resharding_pairs(variants: Sequence[PolicyVariant]) -> list[Pair]:
    """Each way of re-sharding over every variant before it."""
    ahead = [(one, other) for one, other in combinations(variants, 2) if len(other.layouts) == 2]
    return [(f"{other.policy} over {one.name}", other.name, one.name) for one, other in ahead]


class LayoutComparison(Comparison):
    """Each layout alone, and the ways of changing between the two: rates, phases, and what was
    moved."""

    kind = "reshard"
    reported = (
        "against_own_workers",
        "policy",
        "predicted",
        "prefill_parallel",
        "decode_parallel",
        "host_kv_memory",
        "kv_cache_memory",
    )
    picture = staticmethod(phases_picture)
    pairs = staticmethod(resharding_pairs)

    def __init__(self, options: ReshardOptions) -> None:
        if options.against_own_workers and TorchrunProcess.from_environment() is not None:
            raise UsageError(
                "--against-own-workers takes three groups of workers, but torchrun started one"
            )
        self.policies = list(_POLICIES)
        if options.policy is not None:
            self.policies = options.policy.split(",")
        others = set(self.policies) - set(RESHARDING)
        parse_policies(",".join(others) or "sarathi", options.max_num_batched_tokens)
        if options.layouts()[0].data_parallel > 1:
            raise UsageError(
                f"{PAIR_OPTIONS[0]} {options.prefill_parallel}: bench serve takes a D, here is one "
                "engine"
            )
        config, self.work = options.config(), options.read(options.seed or 0)
        super().__init__(options, config, work=self.work.name, requests=len(self.work.shapes))

    def prepare(self) -> dict[str, Any]:
        """Workers with both layouts, perhaps workers with each of them alone, and the requests that
        fit."""
        from nanoserve.lab.benchmarks.policies import engines

        config, model = self.config, self.model
        names = [layout.name for layout in config.layouts]
        workers = (engines.open_workers, " -> ".join(names), self.resolved, config, model)
        pair = self.open(
            f"starting workers for {' and '.join(names)}",
            *workers,
            predicted=self.settings["predicted"],
        )
        apart: Sequence[ParallelLayout] = ()
        if self.settings["against_own_workers"]:
            apart = config.layouts
        for layout in apart:
            degrees = {
                name: getattr(layout, name) for name in ("pipeline_parallel", "tensor_parallel")
            }
            alone = replace(config, **degrees, decode_layout=None, host_kv_memory=None)
            workers = (engines.open_workers, "own workers", self.resolved, alone, model)
            self.open(f"starting workers for {layout.name} alone", *workers)
        config = fitted(config, model, self.engines)
        work = fitting_work(self.work, config.max_model_len, self.report)
        variants = list(resharding_variants(self.engines, config, self.policies))
        self.benches.append(
            self.bench(
                case=work.name, shapes=work.shapes, variants=variants, measure=layout_metrics
            )
        )
        return {
            "kv_blocks": " and ".join(f"{capacity.num_blocks:,}" for capacity in pair.capacities),
            "host_blocks": pair.host_blocks,
            "host_link_bandwidth": pair.host_link_bandwidth,
        }

    @property
    def title(self) -> str:
        settings, facts = self.settings, self.facts
        return (
            f"{settings['requests']} requests of {settings['work']}; {facts['model']}, "
            f"{facts['dtype']}"
        )

    def tables(
        self, summary: Sequence[Mapping[str, Any]], compared: Sequence[Ratio]
    ) -> Iterator[Table]:
        facts = self.facts
        threads = (
            f"{facts['threads']} threads, {facts['threads_of_a_worker']} of them for each worker"
        )
        blocks = (
            f"KV blocks: {facts['kv_blocks']} on the devices, {facts['host_blocks']:,} in the host "
            "pool"
        )
        in_turn = [row for row in summary if row["phases"] is not None]
        shown = list(_RUN_COLUMNS)
        if self.settings["predicted"]:
            shown += _PREDICTED
        yield Table(f"{self.title}, {operators_title(facts)}, {threads}; {blocks}", shown, summary)
        yield Table("where the time of re-sharding runs went, in seconds", _PHASE_COLUMNS, in_turn)
        yield Table(
            "what was moved between device and host memory",
            _MOVE_COLUMNS,
            _move_rows(in_turn),
            keys=3,
        )
        yield self.ratio_table("output tok/s within a round: median (lowest-highest)", compared)
        heading = (
            "simulated, with what steps and moves of the real runs took; makespan is simulated "
            "over real"
        )
        yield Table(heading, _SIMULATED_COLUMNS, [row for row in summary if row["simulated"]])


def _move_rows(summary: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """A row for each kind of moves."""
    for row in summary:
        for moves, field in _MOVES.items():
            yield {"variant": row["variant"], "state": row["state"], "moves": moves, **row[field]}
