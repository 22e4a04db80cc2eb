"""Attention on the CPU in virtual time: cohorts that advance a layer a step (APEX), and asymmetric
steps (NEO).

Both want a pipeline of one stage; with tensor parallelism one CPU serves all its devices. A layer
on the device counts as two halves: before attention (queries, keys and values) and after it (output
and feed-forward part). All layers take the mean time of the stage's.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import attrgetter

import msgspec

from nanoserve.lab.simulator.pipeline import Passage, TieredTimes
from nanoserve.record.times import HostTimes
from nanoserve.scheduler.optional import CohortProgress, HostWork
from nanoserve.scheduler.plan import Answer
from nanoserve.scheduler.work import StepWork


@dataclass(frozen=True, slots=True)
class HostToken:
    """A host sequence whose token is under way."""

    context: int
    answer: Answer
    """Keys that its attention reads in each layer, and its token, which becomes known in the
    end."""
    # layers whose attention the CPU was given before this step; the last of them is not passed yet
    attended: int = 0

    @property
    def first_layer(self) -> int:
        """The layer whose linear part comes next for this row."""
        return max(0, self.attended - 1)


@dataclass(slots=True)
class _Cohort:
    """Host sequences that began a token in the same step."""

    step: int
    rows: dict[int, HostToken]  # by sequence id
    layers: int
    ready: float
    """Layers that it has passed, and when the CPU finishes its attention in the next layer, in
    seconds."""


@dataclass(frozen=True, slots=True)
class SubBatch:
    """One of the two sub-batches of an asymmetric step."""

    device: StepWork
    host: Sequence[HostToken] = ()
    """Its rows whose KV is in host memory, each from its layer on."""


class Processor:
    """The host's CPUs; ``tell`` is called with what they compute in turn: one cohort in one layer,
    or a whole step."""

    def __init__(self, tell: Callable[[HostTimes], None] = lambda times: None) -> None:
        self.free = 0.0  # when everything they were given is computed
        self._tell = tell

    def compute(self, seconds: float, rows: int, arrived: float) -> float:
        """Return when work is done that arrives then."""
        start = max(self.free, arrived)
        self.occupy(Passage(start, start + seconds), seconds, rows)
        return self.free

    def occupy(self, passage: Passage, seconds: float, rows: int) -> None:
        """Compute for this number of seconds within the passage, and be free at its end."""
        self.free = passage.end
        self._tell(HostTimes(passage.start, passage.end, seconds, rows))


class HostAttention:
    """The CPU and the host sequences whose tokens are under way; the times are those of a layout of
    one stage."""

    def __init__(self, times: TieredTimes, processor: Processor) -> None:
        self._processor, self._times, self._layers = processor, times, times.num_layers
        self._cohorts: list[_Cohort] = []
        self._works: list[tuple[float, HostWork]] = []  # when each ended or will have, not told yet

    def take_work(self, now: float) -> tuple[HostWork, ...]:
        """CPU work that has ended by ``now``, returned once; an asymmetric step's work counts one
        layer of several."""
        done = tuple([work for ended, work in self._works if ended <= now])
        self._works = [(ended, work) for ended, work in self._works if ended > now]
        return done

    @property
    def under_way(self) -> bool:
        return bool(self._cohorts)

    @property
    def progress(self) -> tuple[CohortProgress, ...]:
        """Progress of the cohorts under way, the oldest first."""
        return tuple([CohortProgress(cohort.step, cohort.layers) for cohort in self._cohorts])

    def take(self, sequence: int) -> HostToken:
        """Take one host sequence out of its cohort; raises RuntimeError if its token is not under
        way."""
        for cohort in self._cohorts:
            if row := cohort.rows.pop(sequence, None):
                if not cohort.rows:
                    self._cohorts.remove(cohort)
                return HostToken(row.context, row.answer, cohort.layers + 1)
        raise RuntimeError(f"sequence {sequence} has no token under way")

    def overlap(
        self, step: int, device: StepWork, beginning: dict[int, HostToken], start: float
    ) -> tuple[Passage, list[Answer]]:
        """A step of Asynchronous Overlap (APEX): one batch on the device, cohorts join where the
        CPU is done in time.

        A cohort whose attention in layer i is done when the step comes to the second half of layer
        i joins that half and the first half of layer i + 1; behind the last layer its tokens are
        sampled. Another tries again in the next step: the device never waits, unless it has nothing
        else to compute. Joining makes the halves longer by as much as the linear layers take longer
        for the additional rows; what only these rows pass, half a layer for each, is all that a
        step without device rows computes.

        The step's number names the cohort of the host sequences that begin a token in it, with the
        first half of layer 0; ``start`` is when the stage could begin. Returns when the device
        computes, and the tokens that are sampled.
        """
        if not device.tokens and not beginning and self._cohorts:
            start = max(start, min(cohort.ready for cohort in self._cohorts))
        base = 0.0
        if device.tokens:
            base = self._times.stage_seconds(device, 0)
        layer, joined, answers = base / self._layers, 0.0, list[Answer]()
        waiting = sorted(self._cohorts, key=attrgetter("layers"))
        if beginning:
            joined += self._half_layer(device, len(beginning))
            cohort = _Cohort(step, beginning, 0, 0.0)
            self._cohorts.append(cohort)
            self._send(cohort, start + layer / 2 + joined)
        for behind, group in groupby(waiting, attrgetter("layers")):
            reached = start + (behind + 0.5) * layer + joined
            ready = [cohort for cohort in group if cohort.ready <= reached]
            rows = sum(len(cohort.rows) for cohort in ready)
            joined += self._half_layer(device, rows)
            if behind + 1 < self._layers:
                joined += self._half_layer(device, rows)
            for cohort in ready:
                cohort.layers += 1
                if cohort.layers < self._layers:
                    self._send(cohort, start + (behind + 1.5) * layer + joined)
                else:
                    answers += [row.answer for row in cohort.rows.values()]
                    self._cohorts.remove(cohort)
        ends = self._additional_ends(device, len(beginning), len(answers))
        return Passage(start, start + base + joined + ends), answers

    def _send(self, cohort: _Cohort, arrived: float) -> None:
        seconds = self._seconds(cohort.rows.values())
        cohort.ready = self._processor.compute(seconds, len(cohort.rows), arrived)
        self._note(cohort.rows.values(), seconds, cohort.ready)

    def _half_layer(self, device: StepWork, rows: int) -> float:
        """Extra seconds of half a layer for additional rows."""
        if not rows:
            return 0.0
        longer = self._times.layers_seconds(device.tokens + rows, 0) - self._times.layers_seconds(
            device.tokens, 0
        )
        return longer / (2 * self._layers)

    def _additional_ends(self, device: StepWork, beginning: int, sampled: int) -> float:
        """Extra seconds of embedding and head for the host sequences that begin or end a token in
        this step."""
        if not beginning and not sampled:
            return 0.0
        together = msgspec.structs.replace(
            device, decodes=device.decodes + beginning, sampled=device.sampled + sampled
        )
        return self._times.ends_seconds(together, 0) - self._times.ends_seconds(device, 0)

    def asymmetric(self, first: SubBatch, second: SubBatch, start: float) -> Passage:
        """A step of Asymmetric Pipelining (NEO): the device computes one sub-batch while the CPU
        attends for the other.

        In each layer the device computes the first sub-batch's linear part and its attention on the
        device, the CPU attends for the second; then they change sides. So a layer takes
        ``max(linear_0 + attention_0, cpu_1) + max(linear_1 + attention_1, cpu_0)``. Before the
        first layer the CPU ends what it was given earlier. Sequences that are part-way take part in
        the layers that are not behind them; the first of these the CPU was given earlier.

        All host rows of both sub-batches end their token; ``start`` is when the stage could begin.
        Returns when the step is under way; the device waits for the CPU within it.
        """
        batches = (first, second)
        attention = [self._device_attention(batch.device) for batch in batches]
        host = [row for batch in batches for row in batch.host]
        ends = self._times.ends_seconds(_together(first.device, second.device, host), 0)
        late = 0.0
        if host:
            late = max(0.0, self._processor.free - start)
        changes = {0, 1, self._layers}
        changes.update(row.first_layer for row in host)
        changes.update(row.attended for row in host)
        seconds = busy = 0.0
        for layer, until in pairwise(sorted(changes)):
            device = [
                self._linear(batch, layer) + attention[index] for index, batch in enumerate(batches)
            ]
            attending = [[row for row in batch.host if row.attended <= layer] for batch in batches]
            cpu = [self._seconds(rows) for rows in attending]
            for rows, layer_seconds in zip(attending, cpu, strict=True):
                self._note(rows, layer_seconds, start)
            waits = 0.0
            if layer == 0:
                waits = late
            taking = max(device[0], cpu[1] + waits) + max(device[1], cpu[0])
            seconds += (until - layer) * taking
            busy += (until - layer) * sum(cpu)
        passage = Passage(start, start + seconds + ends)
        if host:
            self._processor.occupy(Passage(start + late, passage.end), busy, len(host))
        return passage

    def _device_attention(self, work: StepWork) -> float:
        if not work.tokens:
            return 0.0
        return self._times.attention_seconds(work, 0) / self._layers

    def _linear(self, batch: SubBatch, layer: int) -> float:
        """The linear part of one layer, for the rows that have come to it."""
        rows = sum(row.first_layer <= layer for row in batch.host)
        return self._times.layers_seconds(batch.device.tokens + rows, 0) / self._layers

    def _note(self, rows: Collection[HostToken], seconds: float, ended: float) -> None:
        if rows:
            self._works.append(
                (ended, HostWork(len(rows), sum([row.context for row in rows]), seconds))
            )

    def _seconds(self, rows: Iterable[HostToken]) -> float:
        """Seconds of the CPU for one layer's attention of these rows, moving its inputs and results
        included."""
        if not (contexts := [row.context for row in rows]):
            return 0.0
        return self._times.host_attention_seconds(
            sum(contexts)
        ) + self._times.host_exchange_seconds(len(contexts))


def _together(first: StepWork, second: StepWork, host: Sequence[HostToken]) -> StepWork:
    """Embedding and head of both sub-batches, which run once: rows that begin are embedded, all are
    sampled."""
    decodes = first.decodes + second.decodes + sum(row.attended == 0 for row in host)
    sampled = first.sampled + second.sampled + len(host)
    return msgspec.structs.replace(
        first, decodes=decodes, sampled=sampled, chunks=first.chunks + second.chunks
    )
