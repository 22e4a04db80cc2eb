"""``nanoserve bench hybrid``: attention on the CPU beside the device, as several policies have it,
and without."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from statistics import geometric_mean
from typing import Any

from nanoserve.commands.options import option
from nanoserve.commands.tables import columns
from nanoserve.costs.corrected_predictor import CorrectedPredictor
from nanoserve.engine_config import PAIR_OPTIONS, EngineConfig
from nanoserve.errors import UsageError, shown
from nanoserve.lab.benchmarks.policies.metrics import findings, throughputs_picture, tier_metrics
from nanoserve.lab.benchmarks.policies.rounds import Bench, Ratio, ratios_within
from nanoserve.lab.benchmarks.policies.variants import KvCases, OpenEngine, PolicyVariant, fitted
from nanoserve.lab.commands.bench_options import MOST_REQUESTS, operators_title
from nanoserve.lab.commands.bench_variants import Comparison, Table, VariantsOptions
from nanoserve.lab.workloads import parse_lengths
from nanoserve.scheduler.optional import LayoutCapacity
from nanoserve.scheduler.policies import find_policy, parse_policies

_NEVER_WORSE, _PREDICTING = 0.98, "hybrid"
"""Least ratio of the predicting policy to the device alone, in every case, and that policy's name.
An engine that is opened with it has all that any other policy wants."""
_KEYS = columns(("", ("case", "case"), ("policy", "variant")))
_STEP_COLUMNS = _KEYS + columns(
    (
        ",.0f",
        "steps.device",
        "steps.asymmetric",
        "steps.overlap",
        ("tokens on host", "latencies.host.tokens"),
    ),
    (",.0f", "swaps_out"),
    (".0%", ("CPU busy", "processor_share")),
)
_LATENCY_COLUMNS = _KEYS + columns(
    (",.0f", ("TTFT p50", "latencies.ttft_ms.p50")),
    (",.1f", ("ms/token p50", "latencies.token_ms.p50")),
    (
        ",.2f",
        ("ITL device p50", "latencies.device.itl_ms.p50"),
        ("p99", "latencies.device.itl_ms.p99"),
    ),
    (",.2f", ("ITL host p50", "latencies.host.itl_ms.p50")),
)
_ERROR_COLUMNS = _KEYS + columns(
    (".1%", ("all", "errors.all.median")),
    ("+.1%", "errors.all.bias"),
    (".1%", ("device", "errors.device.median"), ("asymmetric", "errors.asymmetric.median")),
    (".1%", ("overlap", "errors.overlap.median")),
    ("+.0%", ("simulated tok/s", "simulation_error")),
)
_GAIN_COLUMNS = _KEYS + columns(
    ("", "strategy"), (",.0f", "steps"), ("+.1%", "gain", "bound"), (".0%", "reached")
)


class HybridOptions(VariantsOptions):
    lengths: str = option(
        "256+48,256+96,256+192",
        "Tokens of every prompt and of answers, one after the other.",
        metavar="IN+OUT,...",
    )
    requests: int = option(16, "Requests of a run, all at once.", minimum=1, maximum=MOST_REQUESTS)
    kv_limits: str = option(
        "0.25,0.5,1",
        "KV memory of the device, as shares of what holds everything.",
        metavar="X,X,...",
    )
    policy: str = option(
        "sarathi,neo,overlap,apex,hybrid",
        "Each on its own, the device alone first; overlap:cohorts=4 with parameters.",
        metavar="NAME,NAME",
        variables=(),
    )


def run(options: HybridOptions) -> None:
    """Answers get longer, as in APEX's figure 7, and the device's KV memory smaller; with the last
    limit it holds everything. All requests come at once, prompts are random. Printed are throughput
    with ratios to the first policy, latencies by where the KV was, how busy device and CPU were,
    how well steps were predicted, how much of the closed forms' bounds was reached, and what the
    simulator makes of what is measured before each round. Of two cores, give each one to one side.

    [bold]Examples[/bold]

      nanoserve bench hybrid --threads 1 --host-threads 1 --plot hybrid.png
      nanoserve bench hybrid -m dummy:smollm2-135m --lengths 256+64,256+256 \\
        --kv-limits 0.2,1 --rounds 5
      nanoserve bench hybrid --policy sarathi,overlap,overlap:cohorts=4,hybrid
    """
    TierComparison(options).run()


class TierComparison(Comparison):
    """Policies with less and less KV memory on the device: rates, latencies by tier, predictions
    and gains."""

    kind = "hybrid"
    reported = ("requests", "host_kv_memory", "host_threads", "profile")
    picture = staticmethod(throughputs_picture)

    def __init__(self, options: HybridOptions) -> None:
        if options.kv_cache_memory is not None:
            raise UsageError("--kv-cache-memory: how much there is, --kv-limits says; leave it out")
        config = options.config(_PREDICTING)
        if config.num_workers * config.data_parallel > 1 or config.decode_layout is not None:
            raise UsageError(
                f"one device is measured: leave out --dp, --pp, --tp, {PAIR_OPTIONS[0]} and "
                f"{PAIR_OPTIONS[1]}, "
                "which bench throughput has"
            )
        shapes = parse_lengths(options.lengths, "--lengths")
        if len({shape.input_tokens for shape in shapes}) > 1:
            raise UsageError(
                f"--lengths takes prompts of one length here, not {shown(options.lengths)}"
            )
        self.work = work = KvCases(
            input_tokens=shapes[0].input_tokens,
            outputs=sorted(shape.output_tokens for shape in shapes),
            requests=options.requests,
            shares=parse_shares(options.kv_limits),
            block_size=options.block_size,
        )
        list(work.cases())  # a share that holds no request is refused
        self.policies = parse_contenders(options.policy, config.max_num_batched_tokens)
        asked = {"kv_limits": work.shares, "policies": options.policy}
        super().__init__(
            options, config, work=work.name, input=work.input_tokens, outputs=work.outputs, **asked
        )

    def prepare(self) -> dict[str, Any]:
        """One engine with memory for the largest case."""
        config, model, longest = self.config, self.model, self.work.longest
        context = config.max_model_len or model.max_position_embeddings
        if longest.total_tokens > context:
            raise UsageError(
                f"--lengths {longest.input_tokens}+{longest.output_tokens} are "
                f"{longest.total_tokens} tokens, more than"
                f" the context of {context}: choose shorter ones"
            )
        from nanoserve.lab.benchmarks.policies import engines

        engine = self.open(
            "opening the engine", engines.open_with_host, self.resolved, config, model, self.work
        )
        config = fitted(config, model, [engine])
        self.benches += hybrid_benches(self.bench, engine, self.policies, self.work, config)
        layers = model.num_layers
        return {
            "host_threads": engine.host_threads,
            "host_blocks": engine.host_blocks,
            "model_layers": layers,
        }

    @property
    def title(self) -> str:
        return f"{self.work.name}; {self.facts['model']}, {self.facts['dtype']}"

    def tables(
        self, summary: Sequence[Mapping[str, Any]], compared: Sequence[Ratio]
    ) -> Iterator[Table]:
        facts, first = self.facts, self.policies[0]
        run_columns = _KEYS + columns(
            ("", ("read", "state"), "rounds"),
            (",.1f", ("output tok/s", "output_tokens_per_s")),
            ("", (f"over {first}", "ratio")),
            (",.1f", ("ms/token", "latencies.token_ms.mean")),
        )
        threads = (
            f"{facts['threads']} threads for the device, {facts['host_threads']} for attention in "
            "host memory"
        )
        yield Table(f"{self.title}, {operators_title(facts)}, {threads}", run_columns, summary)
        yield Table(
            "steps, what was moved, and what the engine takes per step", _STEP_COLUMNS, summary
        )
        yield Table(
            "latencies, in ms: tokens apart by where their KV was", _LATENCY_COLUMNS, summary
        )
        heading = (
            "errors: of the predicted time of steps (median of their sizes), of the simulated "
            "output tok/s"
        )
        yield Table(heading, _ERROR_COLUMNS, summary)
        heading = (
            f"steps without prompts: gain over {first} with the same rows, and the closed forms' "
            "bound"
        )
        yield Table(heading, _GAIN_COLUMNS, _gain_rows(summary))

    def notes(self) -> Iterator[str]:
        """Check the promises and report whether they hold; the figures go into the report."""
        found, fitting = {}, []
        for bench in self.benches:
            if bench.done:
                everything = bench.facts["share"] >= 1
                if everything:
                    fitting.append(bench.case)
                found[bench.case] = findings(bench.done, holds_everything=everything)
        means = self._means()
        self.report.put("findings", found)
        self.report.put("means", means)
        if broken := [
            f"{name} in {case}" for case in found for name in found[case]["hybrid_although_it_fits"]
        ]:
            yield f"HYBRID STEPS although the device holds everything: {'; '.join(broken)}"
        elif fitting:
            yield "where the device holds everything, no step was hybrid"
        if beyond := [
            f"{name} in {case}" for case in found for name in found[case]["beyond_bound"]
        ]:
            yield f"beyond the closed forms' bounds in some round: {'; '.join(beyond)}"
        for share, of in means.items():
            each = ", ".join(f"{name} {mean:.3f}" for name, mean in of.items())
            yield f"geometric means of all rounds that count, {share}: {each}"
        counted = {bench.case for bench in self.benches if any(one.counts for one in bench.done)}
        held = [
            (one["case"], one["ratio"]["median"])
            for one in self.report.document["ratios"]
            if one["case"] in counted and one["ratio"]["variants"].startswith(f"{_PREDICTING} over")
        ]
        worse = [f"{median:.2f} in {case}" for case, median in held if median < _NEVER_WORSE]
        if held:
            words = f"{_PREDICTING} is at {_NEVER_WORSE:.0%} of the device alone or above"
            words += f" in {len(held) - len(worse)} of {len(held)} cases with rounds that count"
            if worse:
                words += f"; below: {'; '.join(worse)}"
            yield words

    def _means(self) -> dict[str, dict[str, float]]:
        """By KV limit, over all lengths of answers: geometric means of the ratios within rounds."""
        found: dict[str, dict[str, list[float]]] = {}
        for bench in self.benches:
            of_share = found.setdefault(f"KV {bench.facts['share']:.0%}", {})
            for done in filter(attrgetter("counts"), bench.done):
                for (called, _), ratio in ratios_within(
                    done, self.pairs(bench.variants), list(self.ratios)
                ).items():
                    of_share.setdefault(called, []).append(ratio)
        return {
            share: {name: geometric_mean(held) for name, held in of.items()}
            for share, of in found.items()
            if of
        }


def parse_shares(text: str) -> tuple[float, ...]:
    """Shares above 0 and up to 1, separated by commas: "0.3,0.6,1"; ascending, each once. Raises
    UsageError."""
    try:
        shares = set(map(float, text.split(",")))
    except ValueError:
        shares = {math.nan}
    if not all(0 < share <= 1 for share in shares):
        raise UsageError(
            f"--kv-limits takes shares above 0 and up to 1 such as 0.25,0.5,1, not {shown(text)}"
        )
    return tuple(sorted(shares))


def parse_contenders(text: str, token_budget: int) -> tuple[str, ...]:
    """Names separated by commas, the device alone before those that use the CPU:
    "sarathi,neo,overlap:cohorts=4". Raises UsageError for an unknown name or parameter, one out of
    its range, or another order."""
    names = tuple(parse_policies(text, token_budget))
    if _attends_on_host(names[0]):
        raise UsageError(
            f"--policy begins with one that leaves the CPU alone, as sarathi, not {names[0]}"
        )
    return names


def _attends_on_host(policy: str) -> bool:
    return find_policy(policy)[0].attends_on_host


def hybrid_benches(
    make_bench: Callable[..., Bench],
    engine: OpenEngine,
    policies: Sequence[str],
    work: KvCases,
    config: EngineConfig,
) -> Iterator[Bench]:
    """Every policy with the KV memory of each case; its predictor goes on learning from run to run,
    as in a server."""
    host_blocks = dict.fromkeys(policies, 0)
    for policy in filter(_attends_on_host, policies):
        host_blocks[policy] = engine.host_blocks
    learning = {policy: CorrectedPredictor(engine.predictors[0]) for policy in policies}
    for shape, share, num_blocks in work.cases():
        variant = partial(
            PolicyVariant, engine=engine, config=config, capacities=[LayoutCapacity(num_blocks)]
        )
        yield make_bench(
            case=f"{shape.input_tokens}+{shape.output_tokens}, KV {share:.0%}",
            facts={"share": share, "output": shape.output_tokens, "blocks": num_blocks},
            variants=[
                variant(
                    policy=policy, host_blocks=host_blocks[policy], predictors=(learning[policy],)
                )
                for policy in policies
            ],
            shapes=[shape] * work.requests,
            measure=tier_metrics,
        )


def _gain_rows(summary: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """A row for each strategy that had steps without prompts."""
    for row in summary:
        for strategy, gain in (row["gains"] or {}).items():
            if gain is not None:
                yield {"case": row["case"], "variant": row["variant"], "strategy": strategy, **gain}
