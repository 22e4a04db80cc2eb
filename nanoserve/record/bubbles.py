"""Shares of a pipeline's time: stages compute, send, wait for inputs, or wait for work. No torch."""

from collections.abc import Sequence

import msgspec

from nanoserve.record.run_record import RunRecord
from nanoserve.record.times import StageTimes


class StageShares(msgspec.Struct, frozen=True, kw_only=True):
    """One stage's time with something in flight, divided; the four shares add up to 1."""

    computing: float
    """Share in which the device computed; 1 minus this is the stage's share of bubbles."""
    sending: float
    """Share from the end of computing until the activations, or the answer, were on their way."""
    metadata: float
    """Share in which only the inputs were missing, as ``metadata_seconds`` defines it."""
    waiting: float
    """Share in which the stage waited for activations, or for a plan: the rest."""
    metadata_of_step: float
    """Time waiting for inputs, as a share of the time waiting for inputs, computing and sending."""

    @property
    def bubbles(self) -> float:
        return 1 - self.computing


def working_seconds(record: RunRecord) -> float:
    """Seconds with anything in flight. Time without a request is no bubble."""
    seconds = end = 0.0
    for step, planned in record.planned.items():
        submitted, known = planned.time, record.known[step]
        seconds += max(0.0, known - max(end, submitted))
        end = max(end, known)
    return seconds


def metadata_seconds(record: RunRecord, stages: Sequence[Sequence[StageTimes]], stage: int) -> list[float]:
    """For each plan, how long the stage could have computed it already, had its inputs been prepared.

    A stage can compute a plan once it has finished the previous one and has its work: in the first stage the plan
    from the engine, in a later stage the activations of the stage before. The result is a little too large: it
    includes the transfer of the activations, if preparing took that long.
    """
    submitted = [record.planned[times.step].time for times in stages[0]]
    given = submitted if stage == 0 else [times.sent for times in stages[stage - 1]]
    free = [given[0], *(times.sent for times in stages[stage][:-1])]
    return [
        max(0.0, times.prepared - max(work, own)) for times, work, own in zip(stages[stage], given, free, strict=True)
    ]


def stage_shares(record: RunRecord, tensor_parallel: int = 1) -> list[StageShares]:
    """Shares of every stage; none if the executor reported no times."""
    stages, working = record.stages(tensor_parallel), working_seconds(record)
    shares = []
    for stage, parts in enumerate(stages):
        computing = sum(times.computed - times.started for times in parts)
        sending = sum(times.sent - times.computed for times in parts)
        metadata = sum(metadata_seconds(record, stages, stage))
        shares.append(
            StageShares(
                computing=computing / working,
                sending=sending / working,
                metadata=metadata / working,
                waiting=1 - (computing + sending + metadata) / working,
                metadata_of_step=metadata / (metadata + computing + sending),
            )
        )
    return shares


def engine_seconds(record: RunRecord) -> list[float]:
    """For each plan, the seconds that the engine took to apply the previous result and to decide."""
    seconds, done = [], 0.0
    for planned in record.planned.values():
        seconds.append(max(0.0, planned.time - max(planned.clock, done)))  # the clock is in ticks
        done = planned.time
    return seconds
