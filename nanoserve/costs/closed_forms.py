"""The closed forms of APEX's inequality and of the CS336 lecture on inference. The exact model is
held against them.

They leave out embedding, head, activations, latencies and overheads, unless ``beside`` gives these,
divided over the layers. Tlin and Tgatt are the device's seconds for a layer's linear part and
decode attention, NC / NG is the CPU's decode attention over that of the device.
"""


def pipelining_break_even(linear: float, attention: float) -> float:
    """APEX, inequality (6): asymmetric pipelining pays without prompts while NG / NC is below this.

    2 Tlin / Tgatt + 3 + Tgatt / Tlin. It leaves out how many host sequences there are.
    """
    return 2 * linear / attention + 3 + attention / linear


def pipelining_speedup_bound(
    linear: float,
    attention: float,
    *,
    speed_ratio: float,
    decodes: float,
    host_sequences: float,
    beside: float = 0.0,
) -> float:
    """Most that asymmetric pipelining makes of the device's tokens per second, without prompts.

    (1 + min(NC / NG (1 + 2 Tlin / Tgatt), C / B)) (Tlin + Tgatt) / (2 Tlin + Tgatt): APEX,
    inequality (5), divided by its right side, and no more tokens than the C host sequences have
    beside B decodes on the device. What is beside the layers is added above and below: it runs
    once, and the CPU waits meanwhile.
    """
    added = min(speed_ratio * (1 + 2 * linear / attention), host_sequences / decodes)
    return (1 + added) * (linear + attention + beside) / (2 * linear + attention + beside)


def overlap_gain_bound(
    linear: float,
    attention: float,
    *,
    speed_ratio: float,
    decodes: float,
    host_sequences: float,
    layers: int,
    beside: float = 0.0,
) -> float:
    """Most that asynchronous overlap adds, as a share of the device's tokens per second, without
    prompts.

    min(NC / NG (1 + Tlin / Tgatt), C / (B (L + 1))): what the CPU computes in the time of a layer,
    and one token of each host sequence in L + 1 steps. The paper's own estimate (section 5.2), S =
    b / a, is no ratio of throughputs. The CPU goes on while the device computes what is beside the
    layers: that counts as Tlin.
    """
    return min(
        speed_ratio * (1 + (linear + beside) / attention), host_sequences / (decodes * (layers + 1))
    )


def mlp_intensity(tokens: float, hidden_size: float, inner_size: float) -> float:
    """The lecture, equation (10): 6BTDF / (4BTD + 4BTF + 6DF) for B T = ``tokens``; it tends to
    ``tokens``.

    It counts that gate and up are written, but not that their product is read again; the exact
    model does.
    """
    products = tokens * hidden_size * inner_size
    moved = 4 * tokens * hidden_size + 4 * tokens * inner_size + 6 * hidden_size * inner_size
    return 6 * products / moved


def attention_intensity(context: float, tokens: float) -> float:
    """The lecture, equations (12) and (13): S T / (S + T) for T queries over S keys, all heads with
    keys of their own.

    It counts all pairs; in a causal prompt, S = T, half of them are computed.
    """
    return context * tokens / (context + tokens)


def decode_seconds(batch: float, weight_bytes: float, kv_bytes: float, bandwidth: float) -> float:
    """The lecture, section 1.7: L(B) = (M_params + B M_KV) / bandwidth, M_KV being one sequence's
    keys and values."""
    return (weight_bytes + batch * kv_bytes) / bandwidth
