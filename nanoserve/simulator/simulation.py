"""simulate: Scheduler, Engine and policy as they are, on a SimulatedExecutor, with meters around them."""

from collections.abc import Iterable, Iterator, Sequence

from nanoserve.engine import Engine
from nanoserve.errors import UsageError
from nanoserve.request import Request
from nanoserve.scheduler.load import Policy
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.simulator.driving import drive
from nanoserve.simulator.executor import VOCAB_SIZE, SimulatedExecutor, StepObserver
from nanoserve.simulator.meters import RequestMeter, StepMeter
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
        observers: are shown every step.

    Raises:
        UsageError: for a request that the blocks can never hold, or none at all.
    """
    longest = num_blocks * block_size + 1  # the KV of the last token is never written
    scheduler = Scheduler(
        policy,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=longest,
        max_num_seqs=max_num_seqs,
        prefix_caching=False,
        pipeline_depth=times.num_stages,
    )
    steps, lives = StepMeter(scheduler.pool), RequestMeter()
    executor = SimulatedExecutor(times, runtime=runtime, observers=(steps, *observers))
    engine = Engine(scheduler, executor, vocab_size=VOCAB_SIZE)
    drive(engine, _fitting(requests, longest), lives.on_updates)
    if not lives.requests:
        raise UsageError("there are no requests to simulate")
    return _result(scheduler, executor, steps, lives)


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


def _result(
    scheduler: Scheduler, executor: SimulatedExecutor, steps: StepMeter, lives: RequestMeter
) -> SimulationResult:
    seconds = executor.now()
    working = seconds - steps.idle_seconds
    tokens = steps.tokens.distribution()
    assert tokens is not None, "requests ran, so there were steps"
    return SimulationResult(
        requests=lives.requests,
        input_tokens=lives.input_tokens,
        output_tokens=lives.output_tokens,
        seconds=seconds,
        requests_per_second=lives.requests / seconds,
        output_tokens_per_second=lives.output_tokens / seconds,
        tokens_per_second=(lives.input_tokens + lives.output_tokens) / seconds,
        ttft_ms=lives.ttft.distribution(),
        tpot_ms=lives.tpot.distribution(),
        itl_ms=lives.itl.distribution(),
        e2el_ms=lives.e2el.distribution(),
        bubble_shares=tuple(1 - busy / working for busy in executor.pipeline.busy_seconds),
        steps=tokens.n,
        tokens_per_step=tokens,
        tokens_variation=tokens.std / tokens.mean,
        preemptions=scheduler.preemptions,
        forced_steps=scheduler.forced_steps,
        kv_occupancy=steps.occupancy_seconds / seconds,
        kv_peak=steps.peak_occupancy,
        kv_series=tuple(steps.occupancy.points),
    )
