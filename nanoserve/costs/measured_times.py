"""Step times from a profile: MeasuredTimes for the simulator, MeasuredPredictor for policies. No torch."""

from collections import Counter
from collections.abc import Iterable, Sequence

from nanoserve.costs.profile import Profile
from nanoserve.costs.work import Chunk, StepWork, Strategy


class MeasuredTimes:
    """The simulator's ``TieredTimes`` for one stage, in seconds: there is no next one."""

    def __init__(self, profile: Profile) -> None:
        model = profile.model
        self.profile, self.memory = profile, profile.memory  # memory is that of the engine's KV cache
        self.num_stages, self.num_layers = 1, model.num_layers  # a pipeline is not measured; all layers of the model
        # How many layers have each sliding window; a window of 0 sees all.
        self._layers = dict(Counter(model.sliding_window(layer) for layer in range(model.num_layers)))
        self._windows = tuple(sorted(window for window in self._layers if window))
        self._host_attention = profile.host_attention.less(profile.host_exchange).over_keys()

    def work(
        self, decode_contexts: Sequence[int] = (), chunks: Iterable[Chunk] = (), sampled: int | None = None
    ) -> StepWork:
        return StepWork.of(decode_contexts, chunks, sampled, self._windows)

    def stage_seconds(self, work: StepWork, stage: int = 0) -> float:
        """Layers and head."""
        return self.layers_seconds(work.tokens) + self.attention_seconds(work) + self.ends_seconds(work)

    def layers_seconds(self, tokens: int, stage: int = 0) -> float:
        return self.profile.linear.at(tokens) * self.num_layers

    def attention_seconds(self, work: StepWork, stage: int = 0) -> float:
        """All layers' attention. A chunk takes the difference of a prompt to its end and one to its beginning."""
        seconds = 0.0
        for window, layers in self._layers.items():
            seconds += layers * self._decode_seconds(work, window)
            for start, length in work.chunks:
                longer = self._prompt_seconds(start + length, window) - self._prompt_seconds(start, window)
                seconds += layers * max(0.0, longer)  # medians of a busy machine may fall from one size to the next
        return seconds

    def ends_seconds(self, work: StepWork, stage: int = 0) -> float:
        return self.profile.head.at(work.sampled)

    def send_seconds(self, work: StepWork, stage: int) -> float:
        return 0.0

    def host_seconds(self, work: StepWork) -> float:
        """The engine and the inputs: with one device, no step is prepared while another one is computed."""
        return self.profile.inputs.at(work.rows) + self.profile.engine.at(work.rows)

    def swap_seconds(self, tokens: int, stage: int = 0) -> float:
        model = self.profile.model
        numbers = 2 * model.num_layers * model.num_kv_heads * model.head_dim
        return self.profile.copy.at(tokens * numbers * self.profile.bits / 8)

    def reload_seconds(self, stage: int) -> float:
        """Infinite: only one layout was measured."""
        return float("inf")

    def host_attention_seconds(self, context: int) -> float:
        """Decode attention of a layer on the CPU over `context` keys in total, without the exchange."""
        return self._host_attention.at(context)

    def host_exchange_seconds(self, rows: int) -> float:
        """A layer's queries, keys, values and results of `rows` rows between device and host."""
        return self.profile.host_exchange.at(rows)

    def _decode_seconds(self, work: StepWork, window: int) -> float:
        if not work.decodes:
            return 0.0
        keys = work.windowed_decode_context[self._windows.index(window)] if window else work.decode_context
        return self.profile.decode_attention.at(work.decodes, keys / work.decodes)

    def _prompt_seconds(self, tokens: int, window: int) -> float:
        """A prompt of this many tokens; beyond a window, each token takes as long as the last one within it."""
        curve = self.profile.prefill_attention
        if not window or tokens <= window:
            return curve.at(tokens)
        return curve.at(window) + (tokens - window) * max(0.0, curve.at(window) - curve.at(window - 1))


class MeasuredPredictor:
    """What policies predict by (APEX, section 3.4): a Predictor for one layout of one stage.

    Times are seconds of one layer unless a name says otherwise. They never fall with size, whatever the profile's
    noise: policies search by bisection for the number of sequences that fits a window.
    """

    def __init__(self, profile: Profile) -> None:
        self.num_layers, self.profile = profile.model.num_layers, profile  # the profile as it was measured
        self._profile = profile = profile.rising()
        self._times = MeasuredTimes(profile)
        self._attention = profile.decode_attention.over_keys().rising()
        self._ends = (profile.inputs, profile.head, profile.engine)

    def linear_seconds(self, tokens: int) -> float:
        """A layer without attention; the rest of a step is in ``step_overhead_seconds``."""
        return self._profile.linear.at(tokens)

    def attention_seconds(self, context_tokens: int) -> float:
        """Decode attention of a layer over `context_tokens` keys in total, for any number of sequences. With sliding
        windows this is an upper limit: the sequences' own lengths are not known."""
        return self._attention.at(context_tokens)

    def prefill_attention_seconds(self, tokens: int) -> float:
        return self._profile.prefill_attention.at(tokens)

    def host_attention_seconds(self, sequences: int, context_tokens: int) -> float:
        """Decode attention of a layer on the CPU, with moving queries, keys and values there and results back. With
        sliding windows this is an upper limit, too."""
        if sequences <= 0:
            return 0.0
        return self._profile.host_attention.at(sequences, context_tokens / sequences)

    def step_overhead_seconds(self, rows: int = 1) -> float:
        """Time of a step of `rows` rows, all of them sampled, outside its layers."""
        return sum([curve.at(rows) for curve in self._ends])

    def slowdown(self, strategy: Strategy) -> float:
        """The factor by which the device waits for memory that attention on the CPU reads meanwhile."""
        return 1.0 if strategy == "device" else self._profile.beside_host

    def swap_seconds(self, context_tokens: int) -> float:
        return self._times.swap_seconds(context_tokens)

    def transition_seconds(self, layout: int) -> float:
        """Infinite for any layout but the measured one."""
        return 0.0 if layout == 0 else float("inf")
