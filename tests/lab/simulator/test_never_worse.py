"""Our hybrid policy against the device alone, on a small model whose parts are fast and slow in
every mixture."""

from itertools import product

import pytest

from nanoserve.lab.benchmarks.policies.variants import KvCase, KvCases, make_requests, run_requests
from nanoserve.lab.simulator.executor import SimulatedExecutor
from nanoserve.record.run_record import RunRecord
from nanoserve.scheduler import make_policy
from nanoserve.scheduler.assembly import make_extensions
from nanoserve.scheduler.predictor import Predictor
from nanoserve.scheduler.scheduler import Scheduler
from tests.fakes.distorted_predictor import DistortedPredictor
from tests.fakes.linear_predictor import LinearPredictor
from tests.fakes.observed_executor import dummy_answers
from tests.lab.simulator.tier_times import TierTimes

BLOCK_SIZE, BUDGET, LAYERS = 16, 2048, 4
REQUESTS, PROMPT = 16, 256
TOKEN, KEY, SWAPPED_TOKEN = 0.019, 8e-5, 5e-4
LAYER, ENDS, HOST, SLOWDOWN = (0.25, 0.45), (0.7, 2.0, 5.0), (1.0, 8.0), (1.0, 1.2)
"""The slowdown is predicted of hybrid steps, and is not so."""


def run(policy: str, case: KvCase, times: TierTimes, predictor: Predictor) -> RunRecord:
    def scheduler() -> Scheduler:
        return Scheduler(
            make_policy(policy, BUDGET),
            num_blocks=case.num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=512,
            max_num_seqs=64,
            prefix_caching=False,
            extensions=make_extensions(host_blocks=REQUESTS * 32 if policy == "hybrid" else 0),
            predictors=(predictor,),
        )

    executor = SimulatedExecutor(times, block_size=BLOCK_SIZE, answer=dummy_answers)
    return run_requests(
        executor,
        scheduler,
        make_requests([case.shape] * REQUESTS, [0.0] * REQUESTS, 50, 1),
        vocab_size=50,
    )


@pytest.mark.parametrize(("output", "share"), [(24, 0.15), (24, 0.25), (48, 0.25)])
def test_hybrid_is_hardly_ever_slower_than_the_device_alone(output: int, share: float) -> None:
    """The device holds three of the sequences, or four; times are about the bundled model's, in
    milliseconds."""
    work = KvCases(
        input_tokens=PROMPT,
        outputs=(output,),
        requests=REQUESTS,
        shares=(share,),
        block_size=BLOCK_SIZE,
    )
    case = next(work.cases())
    alone: dict[tuple[float, float], float] = {}  # the same whatever the host does
    for layer, ends, host, slowdown in product(LAYER, ENDS, HOST, SLOWDOWN):
        times = TierTimes(
            num_layers=LAYERS,
            layer=layer,
            token=TOKEN,
            key=KEY,
            ends=ends,
            swap_token=SWAPPED_TOKEN,
            host_key=host * KEY,
        )
        predictor = LinearPredictor(
            num_layers=LAYERS,
            linear=layer,
            row=TOKEN,
            key=KEY,
            overhead=ends,
            swap_token=SWAPPED_TOKEN,
            host_key=host * KEY,
        )
        if (layer, ends) not in alone:
            alone[layer, ends] = run("sarathi", case, times, predictor).makespan
        beside = run("hybrid", case, times, DistortedPredictor(predictor, hybrid=slowdown)).makespan
        assert alone[layer, ends] / beside > 0.98, f"{layer=} {ends=} {host=} {slowdown=}"
