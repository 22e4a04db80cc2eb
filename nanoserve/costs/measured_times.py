"""MeasuredTimes: how long steps take by a profile, for the simulator and whoever adds steps up. No torch.

What policies ask is another matter: see measured_predictor.py.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from nanoserve.costs.profile import Profile
from nanoserve.costs.work import Chunk, StepWork


class MeasuredTimes:
    """What the simulator asks (``TieredTimes``, of one stage); all in seconds."""

    def __init__(self, profile: Profile) -> None:
        model = profile.model
        self.profile, self.memory = profile, profile.memory  # of the KV cache that the engine had
        self.num_stages, self.num_layers = 1, model.num_layers  # one; a pipeline was not measured; of the model
        # How many layers have each sliding window; a window of 0 sees all.
        self._layers = dict(Counter(model.sliding_window(layer) for layer in range(model.num_layers)))
        self._windows = tuple(sorted(window for window in self._layers if window))
        self._host_attention = profile.host_attention.less(profile.host_exchange).over_keys()

    def work(
        self, decode_contexts: Sequence[int] = (), chunks: Iterable[Chunk] = (), sampled: int | None = None
    ) -> StepWork:
        """Sum a micro-batch up for this model."""
        return StepWork.of(decode_contexts, chunks, sampled, self._windows)

    def stage_seconds(self, work: StepWork, stage: int = 0) -> float:
        """Layers and head."""
        return self.layers_seconds(work.tokens) + self.attention_seconds(work) + self.ends_seconds(work)

    def layers_seconds(self, tokens: int, stage: int = 0) -> float:
        """All layers without their attention."""
        return self.profile.linear.at(tokens) * self.num_layers

    def attention_seconds(self, work: StepWork, stage: int = 0) -> float:
        """All layers' attention. A chunk's is what a prompt to its end takes longer than one to its beginning."""
        seconds = 0.0
        for window, layers in self._layers.items():
            seconds += layers * self._decode_seconds(work, window)
            for start, length in work.chunks:
                longer = self._prompt_seconds(start + length, window) - self._prompt_seconds(start, window)
                seconds += layers * max(0.0, longer)  # medians of a busy machine may fall from one size to the next
        return seconds

    def ends_seconds(self, work: StepWork, stage: int = 0) -> float:
        """The head."""
        return self.profile.head.at(work.sampled)

    def send_seconds(self, work: StepWork, stage: int) -> float:
        """There is no next stage."""
        return 0.0

    def host_seconds(self, work: StepWork) -> float:
        """The engine and the inputs: one device has nobody who prepares a step while another one computes."""
        return self.profile.inputs.at(work.rows) + self.profile.engine.at(work.rows)

    def swap_seconds(self, tokens: int, stage: int = 0) -> float:
        """The KV of so many tokens, all layers, one way."""
        model = self.profile.model
        numbers = 2 * model.num_layers * model.num_kv_heads * model.head_dim
        return self.profile.copy.at(tokens * numbers * self.profile.bits / 8)

    def reload_seconds(self, stage: int) -> float:
        """Infinite: there is no other layout than the one that was measured."""
        return float("inf")

    def host_attention_seconds(self, context: int) -> float:
        """Decode attention of a layer on the CPU over so many keys in all, beside what is exchanged for it."""
        return self._host_attention.at(context)

    def host_exchange_seconds(self, rows: int) -> float:
        """A layer's queries, keys, values and results of so many rows between device and host."""
        return self.profile.host_exchange.at(rows)

    def _decode_seconds(self, work: StepWork, window: int) -> float:
        if not work.decodes:
            return 0.0
        keys = work.windowed_decode_context[self._windows.index(window)] if window else work.decode_context
        return self.profile.decode_attention.at(work.decodes, keys / work.decodes)

    def _prompt_seconds(self, tokens: int, window: int) -> float:
        """A prompt of so many tokens; behind a window, each more takes what the last one within it does."""
        curve = self.profile.prefill_attention
        if not window or tokens <= window:
            return curve.at(tokens)
        return curve.at(window) + (tokens - window) * max(0.0, curve.at(window) - curve.at(window - 1))
