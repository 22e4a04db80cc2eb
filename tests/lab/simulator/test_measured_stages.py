"""Micro-batches of the real run take what they took; others, what one of their size took at about
that time."""

from nanoserve.lab.simulator.replay import MeasuredStages, MeasuredStep
from nanoserve.scheduler.work import StepWork


def _step(work: StepWork, seconds: float) -> MeasuredStep:
    return MeasuredStep(work, (seconds, 2 * seconds), (seconds / 10,), seconds / 100)


def test_each_plan_takes_what_it_took() -> None:
    same = StepWork.of([4, 5], [(0, 8)])
    times = MeasuredStages([_step(same, 1.0), _step(StepWork.of([9]), 7.0), _step(same, 3.0)])
    taken = []
    for contexts, chunks in (([4, 5], [(0, 8)]), ([9], []), ([4, 5], [(0, 8)])):
        work = times.work(contexts, chunks)
        taken.append(
            [
                times.stage_seconds(work, 0),
                times.stage_seconds(work, 1),
                times.send_seconds(work, 0),
            ]
        )
    assert taken == [[1.0, 2.0, 0.1], [7.0, 14.0, 0.7], [3.0, 6.0, 3.0 / 10]]
    assert times.host_seconds(same) == 0.03
    assert times.others == 0


def test_another_takes_what_the_nearest_of_its_size_took() -> None:
    sizes = (10, 40, 11, 12, 40)
    steps = [_step(StepWork.of([5] * size), float(place)) for place, size in enumerate(sizes)]
    times = MeasuredStages(steps)

    def taken(tokens: int) -> float:
        return times.stage_seconds(times.work([6] * tokens), 0)

    assert [taken(38), taken(12), taken(14), taken(10), taken(1000)] == [1.0, 0.0, 2.0, 3.0, 4.0]
    assert taken(11) == 3.0, "behind the last one it is still the nearest"
    assert times.others == 6
