"""MeasuredPredictor: what policies are told of the times to come, by a profile (APEX, section 3.4). No torch."""

from nanoserve.costs.measured_times import MeasuredTimes
from nanoserve.costs.profile import Profile
from nanoserve.costs.step_features import Strategy


class MeasuredPredictor:
    """The scheduler's Predictor for one layout of one stage: seconds of one layer unless it says otherwise.

    More never takes less, whatever noise there is in the profile: policies search by bisection for
    how many sequences fit a window.
    """

    def __init__(self, profile: Profile) -> None:
        self.num_layers, self.profile = profile.model.num_layers, profile  # of the model; as it was measured
        self._profile = profile = profile.rising()
        self._times = MeasuredTimes(profile)
        self._attention = profile.decode_attention.over_keys().rising()
        self._ends = (profile.inputs, profile.head, profile.engine)

    def linear_seconds(self, tokens: int) -> float:
        """A layer without attention; what runs beside it is in ``step_overhead_seconds``."""
        return self._profile.linear.at(tokens)

    def attention_seconds(self, context_tokens: int) -> float:
        """Decode attention of a layer over so many keys in all, however many sequences read them. With sliding windows
        this is an upper limit: whose keys they are is not known."""
        return self._attention.at(context_tokens)

    def prefill_attention_seconds(self, tokens: int) -> float:
        """Attention of a layer over one prompt from its beginning."""
        return self._profile.prefill_attention.at(tokens)

    def host_attention_seconds(self, sequences: int, context_tokens: int) -> float:
        """Decode attention of a layer on the CPU, with moving queries, keys and values there and results back. With
        sliding windows an upper limit, too."""
        if sequences <= 0:
            return 0.0
        return self._profile.host_attention.at(sequences, context_tokens / sequences)

    def step_overhead_seconds(self, rows: int = 1) -> float:
        """What a step of so many rows, all of them sampled, takes beside its layers."""
        return sum([curve.at(rows) for curve in self._ends])

    def slowdown(self, strategy: Strategy) -> float:
        """As far as the device waits for memory that attention on the CPU reads meanwhile."""
        return 1.0 if strategy == "device" else self._profile.beside_host

    def swap_seconds(self, context_tokens: int) -> float:
        """The KV of so many tokens, all layers, one way."""
        return self._times.swap_seconds(context_tokens)

    def transition_seconds(self, layout: int) -> float:
        """Infinite, for another layout than the one that was measured."""
        return 0.0 if layout == 0 else float("inf")
