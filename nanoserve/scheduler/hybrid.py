"""CPU-GPU hybrid decoding: NEO's asymmetric pipelining, APEX's asynchronous overlap, and who chooses between them.

The linear layers always run on the device. A *host sequence* has its KV in host memory, and the CPU computes its
decode attention. Symbols, as in APEX, section 3.2, seconds of one layer: Tlin = T_glinear and Tgatt = T_gatt, the
device's linear and attention time for its decodes; Tlin_pref, Tgatt_pref, the same with prompts in the step; NG and
NC, sequences whose decode attention the device and the CPU compute per second; L = ``predictor.num_layers``.

All four are GPU-first (APEX, section 3.4, rule 1): prompts go to device memory while it can hold them beside the
expected growth of what runs, host sequences come back as soon as it has room, oldest first, and only what then does
not fit is parked in host memory. Without a host tier or a predictor they are ChunkedPrefill.
"""

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from nanoserve.scheduler.load import Alternative, Decision, Load, Predictor, check_parameter

_COHORTS = 4
"""That share the CPU's time in a step of HybridByPrediction."""


@dataclass(frozen=True, slots=True)
class AsymmetricPipelining:
    """NEO (arXiv:2411.01142), as APEX, sections 2.3, 2.4 and figure 2, describes it.

    A step is two sub-batches that alternate: while the device runs the linear layers of one, the CPU computes the
    attention of the other. Sub-batch 0 holds prompts, device decodes and host sequences, sub-batch 1 host sequences
    only. Greedily, each takes as many host sequences as the device's work for the other hides::

        CPU attention of sub-batch 1  <=  Tlin_pref + Tgatt_pref
        CPU attention of the host sequences in sub-batch 0  <=  Tlin of sub-batch 1

    The linear layers run twice, so the step is taken only if more sequences advance per second than on the device
    alone, a prompt counting as one. Without prompts in the step that is seldom so.

    Attributes:
        token_budget: device decodes and prompt tokens of one step together.
    """

    token_budget: int

    reads_forecast: ClassVar[bool] = True

    def decide(self, load: Load) -> Decision:
        plan = _device_first(load, self.token_budget)
        step = _Step.of(load, plan)
        if step is None or step.host == 0 or step.rows == 0:
            return plan
        prompts = step.prefill / max(1, load.first_waiting_tokens)
        advanced = step.decodes + prompts
        sizes, seconds = step.pipelined()
        alone, pipelined = advanced / step.seconds, (advanced + sum(sizes)) / seconds
        weighed = Alternative("device", step.seconds, alone), Alternative("asymmetric", seconds, pipelined)
        if pipelined > alone:
            return replace(plan, strategy="asymmetric", host_decodes=sizes, alternatives=weighed)
        return replace(plan, alternatives=weighed)


@dataclass(frozen=True, slots=True)
class AsynchronousOverlap:
    """APEX, section 3.3, always: one batch for the linear layers, host attention beside the steps.

    Host sequences that begin a token together are a cohort. What the CPU computes for layer i is needed when a later
    step comes to layer i, so a cohort advances one layer a step and has its token after L + 1 steps, while nothing on
    the device waits. A cohort begins, with all host sequences that are ready, when fewer than ``cohorts`` are under
    way.

    Attributes:
        token_budget: device decodes and prompt tokens of one step together.
        cohorts: how many are under way at most: one in the paper; more is its task pool (section 6).
    """

    token_budget: int
    cohorts: int = 1

    reads_forecast: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_parameter("cohorts", self.cohorts, 1)

    def decide(self, load: Load) -> Decision:
        plan = _device_first(load, self.token_budget)
        return plan if load.predictor is None else _overlapped(load, plan, self.cohorts)


@dataclass(frozen=True, slots=True)
class ApexAlgorithm1:
    """APEX, section 3.4: algorithm 1 as printed, with its four rules.

    1. Without host sequences, the device alone; and prompts go there first.
    2. Without prompts in the step, inequality (5), which is (6): asymmetric pipelining if it holds, else asynchronous
       overlap.
    3. With prompts, the same inequality, but the CPU has Tlin_pref + Tlin + Tgatt_pref.
    4. Host sequences that are part way through their layers go first when an asymmetric step is filled. It takes no
       more of them than the device's work on one layer hides, or the device would wait for the CPU in each that is
       left.

    A token on the host is begun only if there are ``minimum_ratio`` times as many host sequences as device decodes
    (section 4.2). What is printed has weaknesses, kept here: (5) counts what the CPU could compute, whether or not so
    many host sequences exist, and compares with the device alone, never with overlap; rule 3 divides what is done in
    the longer window by the time of a step without prompts, so it holds nearly always.

    Attributes:
        token_budget: device decodes and prompt tokens of one step together.
        minimum_ratio: measured in the paper, to amortise what a Python thread costs.
    """

    token_budget: int
    minimum_ratio: float = 8.0

    reads_forecast: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_parameter("minimum_ratio", self.minimum_ratio, 0)

    def decide(self, load: Load) -> Decision:
        plan = _device_first(load, self.token_budget)
        step = _Step.of(load, plan)
        if step is None or step.host == 0:
            return plan
        if not load.cohorts and load.host_decodes < self.minimum_ratio * step.decodes:
            return plan
        tlin, tgatt = step.tlin, step.tgatt
        window = step.tlin_pref + tlin + step.tgatt_pref if step.prefill else 2 * tlin + tgatt
        pipelined, alone = pipelined_rate(step.ng, step.nc, tlin, tgatt, window), device_rate(step.ng, tlin, tgatt)
        layers = step.predictor.num_layers  # the inequality's rates are those of a model of one layer
        weighed = (
            Alternative("device", step.decode_only_seconds, alone / layers),
            Alternative("asymmetric", step.whole_seconds(2 * tlin + tgatt), pipelined / layers),
        )
        plan = replace(plan, alternatives=weighed)
        if pipelined > alone:
            sizes, _ = step.pipelined()
            if sum(sizes) > 0:
                return replace(plan, strategy="asymmetric", host_decodes=sizes)
        return _overlapped(load, plan, cohorts=1)


@dataclass(frozen=True, slots=True)
class HybridByPrediction:
    """Ours: device alone, asymmetric or overlapped, whichever is predicted to advance most sequences per second.

    A prompt counts as as many sequences as the device could decode in its time. Were it one, any sequence of the host
    would seem worth a large part of the time of a step with a prompt, though the device could have decoded many after a
    shorter one. What the host adds is counted by the sequences that are there, not by what the CPU could compute, and
    by their keys: a token of a short one is soon computed, by the device too, whose memory it relieves of as little.
    Were it worth as much, the host would take the beginnings of all answers and leave their costly ends to the device::

        work = the step's seconds on the device alone / seconds of one of its decodes without prompts
        worth = keys of a host sequence / keys of a decode, on average
        device alone      work / its seconds
        overlap           (work + worth * host sequences under way / (L + 1)) / seconds
        asymmetric        (work + worth * host sequences taken) / seconds

    Overlap is the choice where host sequences are too few, or the CPU too slow, to pay for a second pass of the linear
    layers: cohorts begin whenever the CPU can serve one layer of each within a step. But a sequence that is under way
    cannot come back to the device, where it would be L + 1 times as fast, so a small gain is no gain.

    A prompt that the device has no room for is computed and parked as long as the CPU could serve one more under
    overlap without prompts: it costs no more now than later, and yields tokens meanwhile. Beyond that it would only
    take room in the host, and prompts wait for room on the device. And where too little would be gained with as many
    host sequences as there are, or as the CPU can serve, prompts and decodes keep to the device as if there were no
    host: passing prompts on takes room that decodes could use. Sequences that must give way move to the host all the
    same, and come back.

    Attributes:
        token_budget: device decodes and prompt tokens of one step together.
        least_gain: by overlap, as a share of what the device advances, for which cohorts begin.
        worthwhile: by asymmetric steps, for which they are taken, and by the host at its best, for which prompts are
            parked. What rates do not show costs about as much: prompts that pass through keep decodes out of memory,
            and what the host has begun ends late, in steps with few rows. Where the host is of use, it gains far more.
    """

    token_budget: int
    least_gain: float = 0.02
    worthwhile: float = 0.1

    reads_forecast: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_parameter("least_gain", self.least_gain, 0)
        check_parameter("worthwhile", self.worthwhile, 0)

    def decide(self, load: Load) -> Decision:
        plan = _device_first(load, self.token_budget)
        if (step := _Step.of(load, plan)) is None:
            return plan
        if (plan.park or plan.swap_out) and load.first_waiting_tokens and not self._pays(load, step):
            plan = _device_alone(load, self.token_budget)
            step = _Step.of(load, plan) or step
        if plan.park and step.cpu_seconds(load.host_decodes + load.moving + 1) > step.decode_only_seconds:
            plan = replace(plan, park=False, prefill_tokens=_fitting_tokens(load, self.token_budget, plan))
            step = replace(step, prefill=plan.prefill_tokens)
        if step.host == 0:
            return plan
        advanced = step.seconds / step.token_seconds
        overlapped, overlap_seconds, overlap_tokens = self._overlap(load, plan, step)
        if step.rows == 0:
            # Who begins a token on the host cannot come back before it is there: none needs to while others come back.
            return plan if not load.cohorts and (plan.swap_in or load.moving) else overlapped
        sizes, asymmetric_seconds = step.pipelined()
        weighed = (
            Alternative("device", step.seconds, advanced / step.seconds),
            Alternative("overlap", overlap_seconds, (advanced + step.worth * overlap_tokens) / overlap_seconds),
            Alternative("asymmetric", asymmetric_seconds, (advanced + step.worth * sum(sizes)) / asymmetric_seconds),
        )
        alone, beside, pipelined = (one.per_second for one in weighed)
        if pipelined > max(beside, (1 + self.worthwhile) * alone):
            plan = replace(plan, strategy="asymmetric", host_decodes=sizes)
        elif beside > alone:
            plan = overlapped
        return replace(plan, alternatives=weighed)

    def _pays(self, load: Load, step: "_Step") -> bool:
        """Whether anything would be gained with all who wait on the host, or as many as the CPU serves by overlap.

        In steps without prompts, whether or not this one has any: were it asked of each as it is, decodes would leave
        in one step to make room for a prompt, and come back in the next.
        """
        step = replace(step, prefill=0) if step.decodes else step
        predictor, alone = step.predictor, step.decode_only_seconds
        waiting = load.waiting_tokens // max(load.first_waiting_tokens, step.host_keys)
        served = step.hidden(alone, min(load.host_decodes + waiting, load.host_blocks // load.first_parked_blocks))
        sizes, seconds = step.pipelined(served)
        asymmetric = (step.seconds + sum(sizes) * step.token_seconds) / seconds
        joining = step.linear_seconds(step.decodes + served) - step.linear_seconds(step.decodes)
        # Sequences come and go: half of so many are there on average.
        gained = served / 2 / (predictor.num_layers + 1) * step.token_seconds
        overlap = (alone + gained) / ((alone + joining) * predictor.slowdown("overlap"))
        return max(asymmetric, overlap) > 1 + self.worthwhile

    def _overlap(self, load: Load, plan: Decision, step: "_Step") -> tuple[Decision, float, float]:
        """The overlapped step with as many new host tokens as the CPU has time for; its seconds and host tokens.

        They begin in several cohorts, step by step: one for which the CPU takes but little more than a step would
        advance in every second one.
        """
        busy = sum(
            step.predictor.host_attention_seconds(cohort.sequences, cohort.context_tokens) for cohort in load.cohorts
        )
        begin = ready = load.ready_host - plan.swap_in
        if step.rows:
            window = step.seconds / load.pipeline_depth  # of P plans in flight, one ends P times as often as one takes
            ready = step.hidden(window - busy, ready)
            under_way = sum(cohort.sequences for cohort in load.cohorts)
            if under_way + ready < self.least_gain * step.decodes * (step.predictor.num_layers + 1):
                ready = 0
            begin = min(ready, max(1, step.hidden(window / _COHORTS, ready)))
        sizes = [cohort.sequences for cohort in load.cohorts] + [ready]
        # Each cohort is in the linear part of one layer a step.
        alone = step.linear_seconds(step.rows)
        seconds = step.seconds + sum(step.linear_seconds(step.rows + size) - alone for size in sizes)
        seconds *= step.predictor.slowdown("overlap")
        tokens = sum(sizes) / (step.predictor.num_layers + 1)
        if tokens == 0:
            return plan, seconds, tokens
        return replace(plan, strategy="overlap", host_decodes=(begin, 0)), seconds, tokens


def device_rate(ng: float, tlin: float, tgatt: float) -> float:
    """Right side of inequality (5): decodes per second and layer on the device alone."""
    return ng * tgatt / (tlin + tgatt)


def pipelined_rate(ng: float, nc: float, tlin: float, tgatt: float, window: float) -> float:
    """Left side of inequality (5), for the CPU's ``window`` 2 Tlin + Tgatt; of algorithm 1's, for its longer one."""
    return (ng * tgatt + nc * window) / (2 * tlin + tgatt)


def _device_alone(load: Load, token_budget: int) -> Decision:
    """ChunkedPrefill, and what is on the host comes back to all but a block for each decode."""
    decodes = min(load.ready_decodes, token_budget)
    spare = max(0, load.free_blocks - load.running_decodes)
    back = max(load.fitting_host, min(load.ready_host, spare // (load.host_sequence_blocks + 1)))
    plan = Decision(0, decodes, swap_in=back, preempt_to_host=True)
    return replace(plan, prefill_tokens=_fitting_tokens(load, token_budget, plan))


def _fitting_tokens(load: Load, token_budget: int, plan: Decision) -> int:
    """Prompt tokens beside the plan's decodes, behind host sequences that come back and a block for each decode.

    A prompt that does not fit is not begun. Were it asked for nevertheless, the step would seem as long as with it.
    """
    if load.first_waiting_tokens == 0:
        return 0
    room = max(0, load.free_blocks - plan.swap_in * load.host_sequence_blocks - load.running_decodes)
    if load.first_waiting_blocks > room and not load.ready_prefills:
        return 0
    most = (room + load.ready_prefills) * load.block_size  # a prompt that has begun may have room in its last block
    return min(token_budget - plan.decodes, load.waiting_tokens, most)


def _device_first(load: Load, token_budget: int) -> Decision:
    """Rule 1: the step on the device alone, and where new prompts and host sequences go.

    A parked prompt needs device blocks too while it is computed. So as long as the host could hold the next prompt,
    the device keeps a bay of its size free: neither prompts that stay nor host sequences that come back may take it.
    If decodes have outgrown what was expected and the rest of the next prompt does not fit beside a block for each of
    them, the newest move to host memory: a prompt that has to wait costs more than their tokens, and one that is partly
    computed holds blocks while it waits.

    The expected growth is kept free from host sequences only while prompts wait for the room. With none waiting, they
    come back to all but a block for each decode: if that was too many, the newest leave again, which costs a swap each
    way, while the growth may be overestimated until the last of the first answers, and they would stand still so long.
    """
    decodes = min(load.decode_share, token_budget)
    plan = Decision(prefill_tokens=token_budget - decodes, decodes=decodes)
    if load.host_blocks == 0:
        return plan
    plan = replace(plan, swap_in=load.fitting_host, preempt_to_host=True)
    if load.predictor is None:
        return plan
    prompt = load.first_waiting_blocks
    host_has_room = load.first_parked_blocks <= load.host_free_blocks
    bay = 0
    if load.running_decodes:
        bay = prompt if host_has_room else 0
        reserve = load.expected_growth if load.waiting_tokens else load.running_decodes
        spare = max(0, load.free_blocks - reserve - bay)
        plan = replace(plan, swap_in=min(load.ready_host, spare // (load.host_sequence_blocks + 1)))
    left = load.free_blocks - plan.swap_in * load.host_sequence_blocks
    room = left - load.expected_growth
    park = prompt + bay > room
    if park:
        room = max(0, left - load.running_decodes)
        may_park = host_has_room or load.ready_prefills > 0  # one that has begun has its place there
        if prompt > room or not may_park:
            leave = _leaving(load, prompt - room)
            return replace(plan, prefill_tokens=0, decodes=min(decodes, load.ready_decodes - leave), swap_out=leave)
    most = (room + load.ready_prefills) * load.block_size  # a prompt that has begun may have room in its last block
    tokens = min(plan.prefill_tokens, load.waiting_tokens, most)
    return replace(plan, prefill_tokens=tokens, park=park)


def _leaving(load: Load, blocks: int) -> int:
    """How many decodes, all but one at most, hold so many blocks; 0 if the host cannot hold the prompt, or while
    others are on their way already.
    """
    if load.moving or load.first_parked_blocks > load.host_free_blocks:
        return 0
    held = max(1, load.context_tokens // (load.block_size * max(1, load.running_decodes)))
    return max(0, min(-(-blocks // held), load.ready_decodes - 1))


def _overlapped(load: Load, plan: Decision, cohorts: int) -> Decision:
    """The plan with host tokens beside it: cohorts go on; if there are fewer than ``cohorts``, another begins."""
    begin = load.ready_host - plan.swap_in if len(load.cohorts) < cohorts else 0
    if begin == 0 and not load.cohorts:
        return plan
    return replace(plan, strategy="overlap", host_decodes=(begin, 0))


@dataclass(frozen=True)
class _Step:
    """The device-only step at hand, and the host sequences there are to add. Seconds of one layer where not said.

    What a decision asks for several times is predicted once: on small models deciding is no small part of a step.

    Attributes:
        predictor: tells the times.
        decodes, prefill: rows of the device.
        keys: that the decodes read.
        host: host sequences that are ready or under way.
        host_keys: that each of them reads, the mean.
    """

    predictor: Predictor
    decodes: int
    prefill: int
    keys: int
    host: int
    host_keys: int

    @classmethod
    def of(cls, load: Load, plan: Decision) -> "_Step | None":
        """None where nothing can be predicted or the host has no memory."""
        if load.predictor is None or load.host_blocks == 0:
            return None
        return cls(
            load.predictor,
            plan.decodes,
            min(plan.prefill_tokens, load.waiting_tokens) if load.first_waiting_tokens else 0,
            load.context_tokens * plan.decodes // max(1, load.running_decodes),
            load.ready_host - plan.swap_in + sum(cohort.sequences for cohort in load.cohorts),
            load.host_context_tokens // load.host_decodes if load.host_decodes else load.first_waiting_tokens,
        )

    @property
    def rows(self) -> int:
        return self.decodes + self.prefill

    @cached_property
    def tlin(self) -> float:
        """Tlin; of one row where nothing decodes."""
        return self.predictor.linear_seconds(max(1, self.decodes))

    @cached_property
    def tgatt(self) -> float:
        return self.predictor.attention_seconds(self.keys)

    @cached_property
    def tlin_pref(self) -> float:
        return self.linear_seconds(self.rows) if self.prefill or not self.decodes else self.tlin

    @cached_property
    def tgatt_pref(self) -> float:
        return self.tgatt + (self.predictor.prefill_attention_seconds(self.prefill) if self.prefill else 0.0)

    @property
    def ng(self) -> float:
        """NG: as fast as it computes these decodes."""
        return self.decodes / self.tgatt if self.decodes else 0.0

    @property
    def nc(self) -> float:
        """NC: as fast as it would compute as many as are there, each as long as the device's decodes are on average.

        Both rates are of equal sequences: the inequality compares two processors, not short sequences with long ones.
        """
        return self.host / self.predictor.host_attention_seconds(self.host, self.host * self.mean_keys)

    @property
    def mean_keys(self) -> int:
        """Of a decode of the device; of a host sequence where nothing decodes."""
        return self.keys // self.decodes if self.decodes else self.host_keys

    @property
    def worth(self) -> float:
        """Of a token on the host, in decodes of the device: by their keys."""
        return self.host_keys / max(1, self.mean_keys)

    @cached_property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.whole_seconds(self.tlin_pref + self.tgatt_pref)

    @cached_property
    def decode_only_seconds(self) -> float:
        """Of the whole step, had it no prompts."""
        return self.whole_seconds(self.tlin + self.tgatt)

    @cached_property
    def token_seconds(self) -> float:
        """What one decode of the step takes without prompts."""
        return self.decode_only_seconds / max(1, self.decodes)

    def whole_seconds(self, layer_seconds: float) -> float:
        """Of a step whose layers take so long each."""
        return self.predictor.num_layers * layer_seconds + self._overhead

    @cached_property
    def _overhead(self) -> float:
        return self.predictor.step_overhead_seconds()

    def linear_seconds(self, rows: int) -> float:
        """0 for no rows: the weights are not read."""
        return self.predictor.linear_seconds(rows) if rows else 0.0

    def cpu_seconds(self, sequences: int) -> float:
        """Decode attention of so many host sequences."""
        return self.predictor.host_attention_seconds(sequences, sequences * self.host_keys) if sequences else 0.0

    def hidden(self, window: float, most: int) -> int:
        """How many host sequences, at most ``most``, the CPU serves within the window."""
        return bisect_right(range(1, most + 1), window, key=self.cpu_seconds)

    def pipelined(self, host: int | None = None) -> tuple[tuple[int, int], float]:
        """NEO's greedy choice: host sequences of sub-batches 0 and 1, and the seconds of the whole step.

        Args:
            host: how many there are to choose from; None for all.
        """
        most = self.host if host is None else host
        second = self.hidden(self.tlin_pref + self.tgatt_pref, most) if self.rows else 0
        tlin_second = self.linear_seconds(second)
        first = self.hidden(tlin_second, most - second) if second else 0
        seconds = self.whole_seconds(self.linear_seconds(self.rows + first) + self.tgatt_pref + tlin_second)
        return (first, second), seconds * self.predictor.slowdown("asymmetric")
