"""The cost of scheduling: pure Python time per step with many running sequences and nothing
computed. No torch."""

import gc
import time
from collections.abc import Callable

from nanoserve.errors import UsageError
from nanoserve.request import Request, SamplingParams
from nanoserve.scheduler import make_policy
from nanoserve.scheduler.plan import Answer, StepPlan, StepResult
from nanoserve.scheduler.policies.baselines import ChunkedPrefill
from nanoserve.scheduler.scheduler import Scheduler

BLOCK_SIZE = 16
_PREFILL_TOKENS = 8192
_WARM_UP_STEPS = 5
_SOME_TOKEN = 7


def measure_scheduler(
    sequences: int,
    *,
    context: int,
    steps: int,
    policy: str = "sarathi",
    compute: Callable[[], object] = lambda: None,
) -> list[tuple[float, float]]:
    """Seconds of ``schedule`` and of ``apply``, step by step, with this many decoding sequences,
    each of ``context`` tokens at the start. ``compute`` runs before each step, untimed: it
    displaces data from the processor's caches. Raises UsageError for a policy that lets a sequence
    wait."""
    scheduler = _running_scheduler(sequences, context, steps, policy)
    seconds = []
    was_enabled = gc.isenabled()
    gc.collect()
    # a collection belongs to whoever made the garbage; the slowest step would show little else
    gc.disable()
    try:
        for _ in range(steps):
            compute()
            began = time.perf_counter()
            plan = scheduler.schedule(0.0)
            planned = time.perf_counter()
            if plan is None or len(plan.rows) != sequences:
                raise UsageError(
                    f"{policy} does not decode all sequences in every step: choose another policy"
                )
            result = _answered(plan)
            answered = time.perf_counter()
            scheduler.apply(result, 0.0)
            seconds.append((planned - began, time.perf_counter() - answered))
    finally:
        if was_enabled:
            gc.enable()
    return seconds


def _running_scheduler(sequences: int, context: int, steps: int, policy: str) -> Scheduler:
    """A scheduler whose sequences have all been prefilled, by chunked prefill, and are decoding."""
    budget = sequences + _PREFILL_TOKENS
    measured, filling = make_policy(policy, budget), ChunkedPrefill(budget)
    # the first ones decode while the others are prefilled
    prefill_steps = -(-sequences * context // _PREFILL_TOKENS)
    longest = context + prefill_steps + steps + _WARM_UP_STEPS + 2
    blocks_each = -(-longest // BLOCK_SIZE)
    scheduler = Scheduler(
        measured,
        num_blocks=sequences * blocks_each + 1,
        block_size=BLOCK_SIZE,
        max_model_len=longest + 1,
        max_num_seqs=sequences,
    )
    params = SamplingParams(max_tokens=longest, ignore_eos=True)
    for index in range(sequences):
        prompt = tuple((index * 31 + place) % 50021 for place in range(context))
        scheduler.add(Request(f"request-{index}", prompt, params, seed=index))
    decoding, scheduler.policy = 0, filling
    while decoding < _WARM_UP_STEPS:
        plan = scheduler.schedule(0.0)
        assert plan is not None
        decoding += len(plan.rows) == sequences and all(len(row.tokens) == 1 for row in plan.rows)
        scheduler.apply(_answered(plan), 0.0)
    scheduler.policy = measured
    return scheduler


def _answered(plan: StepPlan) -> StepResult:
    answers = tuple(Answer(row.sequence, (_SOME_TOKEN,)) for row in plan.rows if row.sample)
    return StepResult(plan.step, answers)
