"""simulate: Scheduler, Engine and policy as they are, on a SimulatedExecutor, measured as they run."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from nanoserve.errors import PolicyFailed, UsageError
from nanoserve.lab.simulator.executor import SimulatedDrafter, SimulatedExecutor
from nanoserve.lab.simulator.fleet import Replica, bubble_share, check_replicas, drive_fleet, make_router
from nanoserve.lab.simulator.pipeline import DECOUPLED, Runtime, StepTimes, TieredTimes
from nanoserve.lab.simulator.result import SimulationResult
from nanoserve.record.events import Observer
from nanoserve.record.forecasts import learn_from_results
from nanoserve.record.metrics import Slo
from nanoserve.record.metrics_observer import ArrivalWindow, LatencyMetrics, RequestObserver, SloMeter, StepMetrics
from nanoserve.record.sketches import Sketch, mean_series
from nanoserve.request import Request
from nanoserve.scheduler.assembly import make_extensions
from nanoserve.scheduler.load import Policy
from nanoserve.scheduler.optional import LayoutCapacity
from nanoserve.scheduler.predictor import Predictor
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.scheduler.speculation.draft_proposer import DraftProposer
from nanoserve.scheduler.windows import most_tokens
from nanoserve.scheduler.work import DraftCounts

_MOST_TOKENS = 2**20  # of a step with its draft tokens: predicted times limit them


def simulate(
    policy: Policy,
    times: StepTimes,
    requests: Iterable[Request],
    *,
    num_blocks: int,
    block_size: int = 16,
    windows: tuple[int, ...] = (0,),
    max_num_seqs: int = 2048,
    runtime: Runtime = DECOUPLED,
    observers: Sequence[Observer] = (),
    slo: Slo | None = None,
    request_observers: Sequence[RequestObserver] = (),
    replicas: int = 1,
    router: str = "round-robin",
    host_blocks: int = 0,
    other_layouts: Sequence[tuple[TieredTimes, int]] = (),
    predictors: Sequence[Predictor] = (),
    drafter: SimulatedDrafter | None = None,
    is_over: Callable[[], bool] = lambda: False,
) -> SimulationResult:
    """Run requests to their ends in virtual time. Prefixes are not cached, for the tokens mean nothing.

    Args:
        times: of stages, links and the host; each stage allows one micro-batch in flight.
        requests: of a Workload, in order of arrival; they are taken as their time comes.
        num_blocks, block_size: KV blocks, of which all stages share one table, and tokens per block.
        windows: of the cache groups, one block each; beside host memory all positions stay if there is one layout.
        max_num_seqs: sequences that hold blocks at a time.
        observers: are shown all events; of a fleet, those of its first engine.
        request_observers: are shown every request when it has ended.
        replicas, router: whole engines like that, and which of them gets a request: a name in ROUTERS.
        host_blocks: KV blocks in host memory; for these, and for other layouts, ``times`` are TieredTimes.
        other_layouts: times and KV blocks of the parallel layouts 1, 2, ... that the policy may change to.
        predictors: for the policy, one per layout.
        drafter: what drafts, in one layout and without host memory; predictors tell how many draft tokens pay.
        is_over: whether to stop once all requests have arrived; the result is then of what was run.

    Raises UsageError for a request that the blocks can never hold, or none at all, for an impossible fleet, and for
    attention on the host under a layout of several stages.
    """
    check_replicas(replicas)
    if host_blocks or other_layouts:
        _check_tiers(times, drafter)
    within, window = SloMeter(slo or Slo()), ArrivalWindow(slo or Slo())
    groups = len(windows)
    if host_blocks and not other_layouts:
        windows = (0,) * groups
    # A sequence may take all blocks in every layout; the KV of its last token is never written.
    fewest_blocks = min([num_blocks] + [blocks for _, blocks in other_layouts])
    longest = most_tokens(windows, fewest_blocks, block_size, sys.maxsize)
    make_scheduler = partial(
        Scheduler,
        policy,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=longest + 1,
        max_num_seqs=max_num_seqs,
        prefix_caching=False,
        pipeline_depth=times.num_stages,
        predictors=predictors,
        windows=windows,
    )
    layouts: list[StepTimes] = [times]
    layouts += [other for other, _ in other_layouts]
    shown: list[RequestObserver] = [within, window.on_request]
    shown += request_observers
    fleet = []
    for _ in range(replicas):
        steps = StepMetrics(block_size, len(layouts), groups)
        executor = SimulatedExecutor(*layouts, block_size=block_size, groups=groups, runtime=runtime, drafter=drafter)
        proposer = None
        if drafter is not None:
            proposer = DraftProposer(looks_up=False, token_budget=_MOST_TOKENS)
        extensions = make_extensions(
            host_blocks=host_blocks,
            other_layouts=[LayoutCapacity(blocks, other.num_stages) for other, blocks in other_layouts],
            proposer=proposer,
        )
        scheduler = make_scheduler(extensions=extensions)
        learn_from_results(scheduler)
        fleet.append(Replica(scheduler, executor, steps, LatencyMetrics(shown)))
        fleet[-1].recorder.add(window)
    fleet[0].recorder.add(*observers)
    drive_fleet(fleet, make_router(router), _fitting(requests, longest + 1), is_over)
    if failures := [each.scheduler.policy_failure for each in fleet if each.scheduler.policy_failure]:
        raise PolicyFailed(failures[0])
    if not any(replica.scheduler.steps for replica in fleet):
        raise UsageError("there are no requests to simulate")
    fleet[0].recorder.finish()
    if slo is None:
        return _result(fleet, window, None)
    return _result(fleet, window, within)


def _check_tiers(times: StepTimes, drafter: SimulatedDrafter | None) -> None:
    """Raises UsageError for draft tokens beside host memory or other layouts, TypeError for times that do not know
    these."""
    if drafter is not None:
        raise UsageError("draft tokens are simulated in one layout, and without host memory: leave one of them out")
    if not isinstance(times, TieredTimes):
        raise TypeError("host memory and other layouts want step times that know them: see TieredTimes")


def _fitting(requests: Iterable[Request], longest: int) -> Iterator[Request]:
    """Refuse a request that would be cut off."""
    for request in requests:
        if (length := len(request.prompt) + request.seed) > longest:
            raise UsageError(
                f"{request.request_id} takes {length} tokens, but all KV blocks together hold {longest}; "
                "use more KV blocks (--num-blocks), more or larger devices, or shorter requests"
            )
        yield request


def _result(fleet: Sequence[Replica], window: ArrivalWindow, within: SloMeter | None) -> SimulationResult:
    lives, steps = [replica.lives for replica in fleet], [replica.steps for replica in fleet]
    seconds = max(replica.executor.now() for replica in fleet)
    requests = sum(one.requests for one in lives)
    inputs, outputs = sum(one.input_tokens for one in lives), sum(one.output_tokens for one in lives)
    tokens = Sketch.merged(one.tokens for one in steps).distribution()
    assert tokens is not None, "requests ran, so there were steps"
    drafts = [replica.scheduler.extensions.drafts for replica in fleet]
    counts = sum([one.proposer.counts for one in drafts if one is not None], DraftCounts())
    attainment: float | None = None
    goodput: float | None = None
    if within is not None:
        attainment, goodput = within.attainment, within.attaining / seconds
    return SimulationResult(
        requests=requests,
        input_tokens=inputs,
        output_tokens=outputs,
        seconds=seconds,
        requests_per_second=requests / seconds,
        output_tokens_per_second=outputs / seconds,
        tokens_per_second=(inputs + outputs) / seconds,
        steady=window.rates(),
        ttft_ms=Sketch.merged(one.ttft for one in lives).distribution(),
        tpot_ms=Sketch.merged(one.tpot for one in lives).distribution(),
        itl_ms=Sketch.merged(one.itl for one in lives).distribution(),
        e2el_ms=Sketch.merged(one.e2el for one in lives).distribution(),
        bubble_shares=tuple(bubble_share(stage) for stage in zip(*(replica.stages for replica in fleet), strict=True)),
        steps=tokens.n,
        tokens_per_step=tokens,
        tokens_variation=tokens.std / tokens.mean,
        preemptions=sum(replica.scheduler.table.preemptions for replica in fleet),
        forced_steps=sum(replica.scheduler.forced_steps for replica in fleet),
        draft_tokens=counts.draft_tokens,
        accepted_draft_tokens=tuple(counts.accepted),
        accepted_share=sum(counts.accepted) / max(1, counts.draft_tokens),
        kv_occupancy=sum(one.occupancy.seconds for one in steps) / (seconds * len(fleet)),
        kv_peak=max(one.occupancy.peak for one in steps),
        kv_series=tuple(mean_series([one.occupancy.series for one in steps]).points),
        tokens_series=tuple((time,) + counts for time, counts in steps[0].counts.points),
        slo_attainment=attainment,
        goodput=goodput,
        replicas=tuple(replica.figures(seconds) for replica in fleet),
        strategy_steps=dict(sum((one.strategy_steps for one in steps), Counter[str]())),
        transitions=sum(one.transitions for one in steps),
        transition_seconds=sum(one.transition_seconds for one in steps),
        layout_seconds=tuple(
            sum(time.seconds for time in times) for times in zip(*(one.layout_times for one in fleet), strict=True)
        ),
        swapped_out_tokens=sum(one.swapped_tokens["out"] for one in steps),
        swapped_in_tokens=sum(one.swapped_tokens["in"] for one in steps),
        host_occupancy=sum(one.host_occupancy.seconds for one in steps) / (seconds * len(fleet)),
        host_peak=max(one.host_occupancy.peak for one in steps),
        host_series=tuple(mean_series([one.host_occupancy.series for one in steps]).points),
        host_tokens=sum(one.executor.host_tokens for one in fleet),
        processor_share=sum(one.processor_seconds for one in steps) / (seconds * len(fleet)),
    )
