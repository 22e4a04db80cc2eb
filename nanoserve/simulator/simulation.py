"""simulate: Scheduler, Engine and policy as they are, on a SimulatedExecutor, with meters around them."""

from collections.abc import Iterable, Iterator, Sequence

from nanoserve.benchmarks.slo import Slo
from nanoserve.engine import Engine
from nanoserve.errors import UsageError
from nanoserve.request import Request
from nanoserve.scheduler.load import Policy
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.simulator.executor import VOCAB_SIZE, SimulatedExecutor, StepObserver
from nanoserve.simulator.fleet import Replica, check_replicas, drive_fleet, make_router
from nanoserve.simulator.meters import RequestMeter, RequestObserver, Sketch, SloMeter, StepMeter, mean_series
from nanoserve.simulator.pipeline import DECOUPLED, Runtime, StepTimes
from nanoserve.simulator.result import SimulationResult


def simulate(
    policy: Policy,
    times: StepTimes,
    requests: Iterable[Request],
    *,
    num_blocks: int,
    block_size: int = 16,
    max_num_seqs: int = 2048,
    runtime: Runtime = DECOUPLED,
    observers: Sequence[StepObserver] = (),
    slo: Slo | None = None,
    request_observers: Sequence[RequestObserver] = (),
    replicas: int = 1,
    router: str = "round-robin",
) -> SimulationResult:
    """Run requests to their ends in virtual time. Prefixes are not cached, for the tokens mean nothing.

    Args:
        policy: decides, as it would for real.
        times: of stages, links and the host; there are as many micro-batches in flight as it has stages.
        requests: of a Workload, in order of arrival; they are taken as their time comes.
        num_blocks: KV blocks; all stages share one block table.
        block_size: tokens per block.
        max_num_seqs: sequences that hold blocks at a time.
        runtime: how the stages' processes work together.
        observers: are shown every step; of a fleet, every step of its first engine.
        slo: what a good answer keeps to, for attainment and goodput.
        request_observers: are shown every request when it has ended.
        replicas: whole engines, each with all that is said above.
        router: which of them gets a request: a name in ROUTERS.

    Raises:
        UsageError: for a request that the blocks can never hold, or none at all, and for an impossible fleet.
    """
    check_replicas(replicas)
    within = SloMeter(slo or Slo())
    fleet = [
        _replica(
            policy,
            times,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            runtime=runtime,
            observers=() if number else observers,
            request_observers=(within, *request_observers),
        )
        for number in range(replicas)
    ]
    drive_fleet(fleet, make_router(router), _fitting(requests, _longest(num_blocks, block_size)))
    if not within.requests:
        raise UsageError("there are no requests to simulate")
    return _result(fleet, None if slo is None else within)


def _longest(num_blocks: int, block_size: int) -> int:
    """Tokens of a sequence that takes all blocks; the KV of its last token is never written."""
    return num_blocks * block_size + 1


def _replica(
    policy: Policy,
    times: StepTimes,
    *,
    num_blocks: int,
    block_size: int,
    max_num_seqs: int,
    runtime: Runtime,
    observers: Sequence[StepObserver],
    request_observers: Sequence[RequestObserver],
) -> Replica:
    """One engine with meters around it."""
    scheduler = Scheduler(
        policy,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=_longest(num_blocks, block_size),
        max_num_seqs=max_num_seqs,
        prefix_caching=False,
        pipeline_depth=times.num_stages,
    )
    steps, lives = StepMeter(scheduler.pool), RequestMeter(request_observers)
    executor = SimulatedExecutor(times, runtime=runtime, observers=(steps, *observers))
    engine = Engine(scheduler, executor, vocab_size=VOCAB_SIZE)
    return Replica(engine, scheduler, executor, steps, lives)


def _fitting(requests: Iterable[Request], longest: int) -> Iterator[Request]:
    """Refuses what would be cut off."""
    for request in requests:
        length = len(request.prompt) + request.seed
        if length > longest:
            raise UsageError(
                f"{request.request_id} takes {length} tokens, but all KV blocks together hold {longest}; "
                "use more or larger devices, or shorter requests"
            )
        yield request


def _result(fleet: Sequence[Replica], within: SloMeter | None) -> SimulationResult:
    lives, steps = [replica.lives for replica in fleet], [replica.steps for replica in fleet]
    seconds = max(replica.executor.now() for replica in fleet)
    working = sum(replica.working_seconds for replica in fleet)
    busy = zip(*(replica.executor.pipeline.busy_seconds for replica in fleet), strict=True)
    requests = sum(one.requests for one in lives)
    inputs, outputs = sum(one.input_tokens for one in lives), sum(one.output_tokens for one in lives)
    tokens = Sketch.merged(one.tokens for one in steps).distribution()
    assert tokens is not None, "requests ran, so there were steps"
    return SimulationResult(
        requests=requests,
        input_tokens=inputs,
        output_tokens=outputs,
        seconds=seconds,
        requests_per_second=requests / seconds,
        output_tokens_per_second=outputs / seconds,
        tokens_per_second=(inputs + outputs) / seconds,
        ttft_ms=Sketch.merged(one.ttft for one in lives).distribution(),
        tpot_ms=Sketch.merged(one.tpot for one in lives).distribution(),
        itl_ms=Sketch.merged(one.itl for one in lives).distribution(),
        e2el_ms=Sketch.merged(one.e2el for one in lives).distribution(),
        bubble_shares=tuple(1 - sum(stage) / working for stage in busy),
        steps=tokens.n,
        tokens_per_step=tokens,
        tokens_variation=tokens.std / tokens.mean,
        preemptions=sum(replica.scheduler.preemptions for replica in fleet),
        forced_steps=sum(replica.scheduler.forced_steps for replica in fleet),
        kv_occupancy=sum(one.occupancy_seconds for one in steps) / (seconds * len(fleet)),
        kv_peak=max(one.peak_occupancy for one in steps),
        kv_series=tuple(mean_series([one.occupancy for one in steps]).points),
        tokens_series=tuple((time, *counts) for time, counts in steps[0].counts.points),
        slo_attainment=None if within is None else within.attainment,
        goodput=None if within is None else within.attaining / seconds,
        replicas=tuple(replica.figures(seconds) for replica in fleet),
    )
