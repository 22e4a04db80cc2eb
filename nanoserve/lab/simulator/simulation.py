"""simulate: Scheduler, Engine and policy as they are, on a SimulatedExecutor, measured as they
run."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from nanoserve.errors import PolicyFailed, UsageError
from nanoserve.lab.simulator.executor import SimulatedDrafter, SimulatedExecutor
from nanoserve.lab.simulator.fleet import (
    Replica,
    bubble_share,
    check_replicas,
    drive_fleet,
    make_router,
)
from nanoserve.lab.simulator.pipeline import DECOUPLED, Runtime, StepTimes, TieredTimes
from nanoserve.lab.simulator.result import SimulationResult
from nanoserve.record.events import Observer
from nanoserve.record.forecasts import learn_from_results
from nanoserve.record.metrics import Slo
from nanoserve.record.metrics_observer import (
    ArrivalWindow,
    LatencyMetrics,
    RequestObserver,
    SloMeter,
    StepMetrics,
)
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
    times: StepTimes,  # of stages, links and the host; each stage allows one micro-batch in flight
    # of a Workload, in order of arrival; they are taken as their time comes
    requests: Iterable[Request],
    *,
    num_blocks: int,  # KV blocks, of which all stages share one table
    block_size: int = 16,  # tokens per KV block
    windows: tuple[int, ...] = (0,),  # of the cache groups, one block each
    max_num_seqs: int = 2048,  # sequences that hold blocks at a time
    runtime: Runtime = DECOUPLED,
    # are shown all events; of a fleet, the events of its first engine
    observers: Sequence[Observer] = (),
    slo: Slo | None = None,
    request_observers: Sequence[RequestObserver] = (),  # are shown every request when it has ended
    replicas: int = 1,  # whole engines of this kind
    router: str = "round-robin",  # decides which engine gets a request: a name in ROUTERS
    # KV blocks in host memory; for these, and for other layouts, ``times`` are TieredTimes
    host_blocks: int = 0,
    other_layouts: Sequence[tuple[TieredTimes, int]] = (),
    # for the policy, one per layout; they tell how many draft tokens pay
    predictors: Sequence[Predictor] = (),
    drafter: SimulatedDrafter | None = None,  # in one layout and without host memory
    is_over: Callable[[], bool] = lambda: False,  # whether to stop once all requests have arrived
) -> SimulationResult:
    """Run requests to their ends in virtual time, or until ``is_over``; the result is of the
    requests that ran.

    Prefixes are not cached, for the tokens mean nothing. ``other_layouts`` are times and KV blocks
    of the parallel layouts 1, 2, ... that the policy may change to. Raises UsageError for a request
    that the blocks can never hold, or none at all, for an impossible fleet, and for attention on
    the host under a layout of several stages.
    """
    check_replicas(replicas)
    system = _System(
        policy=policy,
        layouts=[(times, num_blocks), *other_layouts],
        block_size=block_size,
        windows=windows,
        max_num_seqs=max_num_seqs,
        runtime=runtime,
        host_blocks=host_blocks,
        predictors=predictors,
        drafter=drafter,
    )
    system.check()
    within, window = SloMeter(slo or Slo()), ArrivalWindow(slo or Slo())
    shown: list[RequestObserver] = [within, window.on_request, *request_observers]
    fleet = [system.replica(shown, window) for _ in range(replicas)]
    fleet[0].recorder.add(*observers)
    drive_fleet(fleet, make_router(router), _fitting(requests, system.longest), is_over)
    _check_end(fleet)
    fleet[0].recorder.finish()
    if slo is None:
        return _result(fleet, window, None)
    return _result(fleet, window, within)


@dataclass(frozen=True, kw_only=True)
class _System:
    """A simulated engine and its devices, of which a fleet has several alike."""

    policy: Policy
    layouts: Sequence[tuple[StepTimes, int]]
    """Times and KV blocks of each parallel layout."""
    block_size: int
    windows: tuple[int, ...]
    max_num_seqs: int
    runtime: Runtime
    host_blocks: int
    predictors: Sequence[Predictor]
    drafter: SimulatedDrafter | None

    def check(self) -> None:
        """Raises UsageError for draft tokens beside host memory or other layouts, TypeError for
        times that do not know these."""
        times, _ = self.layouts[0]
        if not self.host_blocks and len(self.layouts) == 1:
            return
        if self.drafter is not None:
            raise UsageError(
                "draft tokens are simulated in one layout, and without host memory: leave one of "
                "them out"
            )
        if not isinstance(times, TieredTimes):
            raise TypeError(
                "host memory and other layouts want step times that know them: see TieredTimes"
            )

    @property
    def kept_windows(self) -> tuple[int, ...]:
        """The windows of the cache groups; all positions stay beside host memory in a single
        layout."""
        if self.host_blocks and len(self.layouts) == 1:
            return (0,) * len(self.windows)
        return self.windows

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sequence. It may take all blocks in every layout; the KV of its
        last token is never written."""
        fewest_blocks = min(blocks for _, blocks in self.layouts)
        return most_tokens(self.kept_windows, fewest_blocks, self.block_size, sys.maxsize) + 1

    def replica(self, shown: Sequence[RequestObserver], window: ArrivalWindow) -> Replica:
        """Make one engine with its own devices; ``shown`` and ``window`` observe it."""
        groups = len(self.windows)
        executor = SimulatedExecutor(
            *[times for times, _ in self.layouts],
            block_size=self.block_size,
            groups=groups,
            runtime=self.runtime,
            drafter=self.drafter,
        )
        scheduler = self._scheduler()
        learn_from_results(scheduler)
        steps = StepMetrics(self.block_size, len(self.layouts), groups)
        replica = Replica(scheduler, executor, steps, LatencyMetrics(shown))
        replica.recorder.add(window)
        return replica

    def _scheduler(self) -> Scheduler:
        (times, num_blocks), *others = self.layouts
        proposer = None
        if self.drafter is not None:
            proposer = DraftProposer(looks_up=False, token_budget=_MOST_TOKENS)
        extensions = make_extensions(
            host_blocks=self.host_blocks,
            other_layouts=[LayoutCapacity(blocks, other.num_stages) for other, blocks in others],
            proposer=proposer,
        )
        return Scheduler(
            self.policy,
            num_blocks=num_blocks,
            block_size=self.block_size,
            max_model_len=self.longest,
            max_num_seqs=self.max_num_seqs,
            prefix_caching=False,
            pipeline_depth=times.num_stages,
            predictors=self.predictors,
            windows=self.kept_windows,
            extensions=extensions,
        )


def _check_end(fleet: Sequence[Replica]) -> None:
    """Raise the error of a policy that failed, and UsageError if nothing ran."""
    for replica in fleet:
        if replica.scheduler.policy_failure is not None:
            raise PolicyFailed(replica.scheduler.policy_failure)
    if not any(replica.scheduler.steps for replica in fleet):
        raise UsageError("there are no requests to simulate")


def _fitting(requests: Iterable[Request], longest: int) -> Iterator[Request]:
    """Refuse a request that would be cut off."""
    for request in requests:
        length = len(request.prompt) + request.seed
        if length > longest:
            raise UsageError(
                f"{request.request_id} takes {length} tokens, but all KV blocks together hold "
                f"{longest}; "
                "use more KV blocks (--num-blocks), more or larger devices, or shorter requests"
            )
        yield request


def _result(
    fleet: Sequence[Replica], window: ArrivalWindow, within: SloMeter | None
) -> SimulationResult:
    lives = [replica.lives for replica in fleet]
    steps = [replica.steps for replica in fleet]
    seconds = max(replica.executor.now() for replica in fleet)
    requests = sum(one.requests for one in lives)
    inputs = sum(one.input_tokens for one in lives)
    outputs = sum(one.output_tokens for one in lives)
    stages = zip(*(replica.stages for replica in fleet), strict=True)
    layouts = zip(*(replica.layout_times for replica in fleet), strict=True)
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
        bubble_shares=tuple(map(bubble_share, stages)),
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
        layout_seconds=tuple(sum(time.seconds for time in times) for times in layouts),
        swapped_out_tokens=sum(one.swapped_tokens["out"] for one in steps),
        swapped_in_tokens=sum(one.swapped_tokens["in"] for one in steps),
        host_occupancy=sum(one.host_occupancy.seconds for one in steps) / (seconds * len(fleet)),
        host_peak=max(one.host_occupancy.peak for one in steps),
        host_series=tuple(mean_series([one.host_occupancy.series for one in steps]).points),
        host_tokens=sum(one.executor.host_tokens for one in fleet),
        processor_share=sum(one.processor_seconds for one in steps) / (seconds * len(fleet)),
    )
