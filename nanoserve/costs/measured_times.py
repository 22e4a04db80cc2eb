"""MeasuredTimes: how long steps take, by a profile, for whoever would otherwise ask the cost model. No torch."""

from collections import Counter
from collections.abc import Iterable, Sequence

from nanoserve.costs.profile import Profile
from nanoserve.costs.work import Chunk, StepWork


class MeasuredTimes:
    """What the simulator (``StepTimes``, of one stage) and policies (``Predictor``) ask; all in seconds.

    Attributes:
        num_stages: one; a pipeline was not measured.
        num_layers: of the model.
        memory: of the KV cache that the engine had.
    """

    def __init__(self, profile: Profile) -> None:
        model = profile.model
        self.profile, self.memory = profile, profile.memory
        self.num_stages, self.num_layers = 1, model.num_layers
        self._number_bytes = profile.bits / 8
        # How many layers have each sliding window; a window of 0 sees all.
        self._layers = dict(Counter(model.sliding_window(layer) for layer in range(model.num_layers)))
        self._windows = tuple(sorted(window for window in self._layers if window))

    # ----------------------------------------------------------------------------------------- StepTimes

    def work(
        self, decode_contexts: Sequence[int] = (), chunks: Iterable[Chunk] = (), sampled: int | None = None
    ) -> StepWork:
        """Sum a micro-batch up for this model."""
        return StepWork.of(decode_contexts, chunks, sampled, self._windows)

    def stage_seconds(self, work: StepWork, stage: int = 0) -> float:
        """Layers and head. A chunk's attention is what a prompt to its end takes longer than one to its beginning."""
        profile = self.profile
        seconds = profile.linear.at(work.tokens) * self.num_layers + profile.head.at(work.sampled)
        for window, layers in self._layers.items():
            seconds += layers * self._decode_seconds(work, window)
            for start, length in work.chunks:
                longer = self._prompt_seconds(start + length, window) - self._prompt_seconds(start, window)
                seconds += layers * max(0.0, longer)  # medians of a busy machine may fall from one size to the next
        return seconds

    def send_seconds(self, work: StepWork, stage: int) -> float:
        """There is no next stage."""
        return 0.0

    def host_seconds(self, work: StepWork) -> float:
        """The engine and the inputs: one device has nobody who prepares a step while another one computes."""
        return self.profile.inputs.at(work.rows) + self.profile.engine.at(work.rows)

    # ----------------------------------------------------------------------------------------- Predictor

    def linear_seconds(self, tokens: int) -> float:
        """A layer without attention."""
        return self.profile.linear.at(tokens)

    def attention_seconds(self, context_tokens: int) -> float:
        """Decode attention of a layer over so many keys in all, however many sequences read them."""
        return self.profile.decode_attention.by_keys(context_tokens)

    def prefill_attention_seconds(self, tokens: int) -> float:
        """Attention of a layer over one prompt from its beginning."""
        return self.profile.prefill_attention.at(tokens)

    def host_attention_seconds(self, sequences: int, context_tokens: int) -> float:
        """Decode attention of a layer on the CPU, with moving queries, keys and values there and results back."""
        if not sequences:
            return 0.0
        model, copy = self.profile.model, self.profile.copy
        head = sequences * model.head_dim * self._number_bytes
        moving = copy.at(head * (model.num_heads + 2 * model.num_kv_heads)) + copy.at(head * model.num_heads)
        return self.profile.host_attention.at(sequences, context_tokens / sequences) + moving

    def step_overhead_seconds(self) -> float:
        """What a step of one sequence takes beside its layers."""
        return self.profile.inputs.at(1) + self.profile.head.at(1) + self.profile.engine.at(1)

    def swap_seconds(self, context_tokens: int) -> float:
        """The KV of so many tokens, all layers, one way."""
        model = self.profile.model
        numbers = 2 * model.num_layers * model.num_kv_heads * model.head_dim
        return self.profile.copy.at(context_tokens * numbers * self._number_bytes)

    def transition_seconds(self, layout: int) -> float:
        """Infinite, for another layout than the one that was measured."""
        return 0.0 if layout == 0 else float("inf")

    # -------------------------------------------------------------------------------------------- inside

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
