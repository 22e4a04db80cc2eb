"""An engine that is simulated, for the benchmark to measure: a device, and a CPU that tells what it
attended."""

from collections.abc import Iterable
from itertools import chain, repeat

import msgspec

from nanoserve.lab.benchmarks.policies.variants import OpenEngine
from nanoserve.lab.simulator.executor import SimulatedExecutor
from nanoserve.lab.simulator.pipeline import TieredTimes
from nanoserve.record.times import HostTimes
from nanoserve.scheduler.optional import HostWork, LayoutCapacity
from nanoserve.scheduler.plan import StepPlan, StepResult
from tests.fakes.linear_predictor import LinearPredictor
from tests.fakes.observed_executor import dummy_answers
from tests.lab.simulator.tier_times import TierTimes

BLOCK_SIZE, VOCAB_SIZE, HOST_BLOCKS = 4, 50, 400
LAYERS, HOST_KEY = 3, 2**-9
TIMES = TierTimes(
    num_layers=LAYERS, layer=1.0, token=2**-6, key=2**-9, host_key=HOST_KEY, swap_token=2**-9
)
"""The linear part of a layer is most of it, and the CPU attends as fast as the device: it helps."""
PREDICTOR = LinearPredictor(num_layers=LAYERS, linear=1.0, row=2**-6, key=2**-9, host_key=HOST_KEY)


class HostTellingExecutor(SimulatedExecutor):
    """In virtual time, which begins at ``began``; tells of the CPU's work with the next result."""

    def __init__(self, times: TieredTimes, *, began: float = 1000.0) -> None:
        super().__init__(times, block_size=BLOCK_SIZE, answer=dummy_answers)
        self._began = began
        self._attended: list[HostWork] = []
        self._whole_step = False

    def submit(self, plan: StepPlan) -> None:
        """Note whether the CPU's work will be that of a layer, or of a step."""
        self._whole_step = plan.host.strategy == "asymmetric"
        super().submit(plan)
        for times in self.take_times():
            if isinstance(times, HostTimes):
                layers = LAYERS if self._whole_step else 1
                seconds = times.seconds / layers
                self._attended += [
                    HostWork(times.sequences, round(seconds / HOST_KEY), seconds)
                ] * layers

    def collect(self, until: float | None) -> list[StepResult]:
        results = super().collect(None if until is None else until - self._began)
        if results and self._attended:
            host = msgspec.structs.replace(results[0].host, work=tuple(self._attended))
            results[0] = msgspec.structs.replace(results[0], host=host)
            self._attended.clear()
        return results

    def now(self) -> float:
        return self._began + super().now()


def simulated_engine(times: TierTimes = TIMES, measured: Iterable[TierTimes] = ()) -> OpenEngine:
    """With other times than the profile's, perhaps; and with other ones measured first, before the
    profile's."""
    measured = chain(measured, repeat(TIMES))
    return OpenEngine(
        name="simulated",
        vocab_size=VOCAB_SIZE,
        executor=HostTellingExecutor(times),
        capacities=(LayoutCapacity(50),),
        predictors=(PREDICTOR,),
        host_blocks=HOST_BLOCKS,
        host_threads=1,
        compiled=False,
        measure_times=lambda: next(measured),
    )
