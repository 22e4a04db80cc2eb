"""State-space layers: the selective scan of Mamba (arXiv 2312.00752), and the state-space duality
of Mamba-2 (arXiv 2405.21060).

Tokens, segments and slots are those of `triton_ops.recurrent`. In Mamba-2 all numbers of a head
decay alike, so a chunk of a prompt is a few matrix products. In Mamba each number of the state has
a decay of its own, so a prompt is computed position by position.
"""

from torch import Tensor

from triton_ops.recurrent import CHUNK, decays_between, split_segments, states_before
from triton_ops.registration import OPERATORS


@OPERATORS.define(writes=("out", "states"))
def state_space_dual(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    time_step: Tensor,
    states: Tensor,
    segments: Tensor,
) -> None:
    """The recurrence of Mamba-2 (arXiv 2405.21060, section 2) over the segments of a step: a state
    is multiplied by exp(decay), time_step * key value^T is added, and the query reads it.

    The paper calls the query C, the key B, and the value X. out, value: [T, num_heads, head_dim];
    query, key: [T, num_groups, state_size], where neighbouring heads share a group; decay: float32
    [T, num_heads], at most 0, the logarithm of the factor; time_step: float32, same shape; states:
    float32 [slots, num_heads, state_size, head_dim]; segments: as of `causal_convolution`.
    """
    single, others = split_segments(segments)
    if len(single):
        first, _, source, target, _ = single.T.long()
        result, states[target] = dual_step(
            query[first],
            key[first],
            value[first],
            decay[first],
            time_step[first],
            states_before(states, source),
        )
        out[first] = result.to(out.dtype)
    for begin, end, source, target, position in others:
        state = states[source] if source >= 0 else states.new_zeros(states.shape[1:])
        first = begin
        while first < end:
            chunk_end = min(end, first + CHUNK - (position + first - begin) % CHUNK)
            tokens = slice(first, chunk_end)
            out[tokens], state = dual_chunk(
                query[tokens],
                key[tokens],
                value[tokens],
                decay[tokens],
                time_step[tokens],
                state,
            )
            first = chunk_end
        states[target] = state


def dual_step(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, time_step: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence of Mamba-2 over one position of each of N sequences: the arguments of
    `state_space_dual` for them, and the states before them, [N, num_heads, state_size, head_dim].
    Returns the outputs [N, num_heads, head_dim] and the states after them.
    """
    query, key = _of_heads(query, value), _of_heads(key, value)
    added = time_step[..., None] * value.float()
    states = decay.exp()[..., None, None] * states
    states.addcmul_(key[..., None], added[..., None, :])
    return (query[..., None, :] @ states)[..., 0, :], states


def dual_chunk(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, time_step: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence of Mamba-2 over C positions at once: the arguments of `state_space_dual` for
    them, and the state before them, [num_heads, state_size, head_dim]. Returns the outputs [C,
    num_heads, head_dim] and the state after them.

    With D_i the sum of the decays up to position i, the output is exp(D_i) q_i S + sum over j <= i
    of exp(D_i - D_j) (q_i . k_j) dt_j v_j (arXiv 2405.21060, section 6).
    """
    query = _of_heads(query, value).transpose(0, 1)
    key = _of_heads(key, value).transpose(0, 1)
    added = (time_step[..., None] * value.float()).transpose(0, 1)
    factors, grown = decays_between(decay)
    output = grown * (query @ state) + (query @ key.mT * factors) @ added
    left = factors[:, -1, :, None]
    state = grown[:, -1:] * state + (left * key).mT @ added
    return output.transpose(0, 1), state


def _of_heads(shared: Tensor, value: Tensor) -> Tensor:
    """Queries or keys [T, num_groups, state_size] in float32, each repeated for the heads that
    share it: [T, num_heads, state_size]."""
    return shared.float().repeat_interleave(value.shape[1] // shared.shape[1], dim=1)


@OPERATORS.define(writes=("out", "states"))
def selective_scan(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    time_step: Tensor,
    rates: Tensor,
    states: Tensor,
    segments: Tensor,
) -> None:
    """The selective scan of Mamba (arXiv 2312.00752, section 3.2 and algorithm 2) over the segments
    of a step: number n of channel c is multiplied by exp(time_step_c * rates_cn), time_step_c *
    key_n * value_c is added, and the output of c is the sum of its numbers times the query.

    The paper calls the query C, the key B, the value x, and the rates A. out, value: [T, channels];
    query, key: [T, state_size]; time_step: float32 [T, channels]; rates: float32 [channels,
    state_size], below 0; states: float32 [slots, channels, state_size]; segments: as of
    `causal_convolution`.
    """
    single, others = split_segments(segments)
    if len(single):
        first, _, source, target, _ = single.T.long()
        result, states[target] = selective_step(
            query[first],
            key[first],
            value[first],
            time_step[first],
            rates,
            states_before(states, source),
        )
        out[first] = result.to(out.dtype)
    for begin, end, source, target, _ in others:
        state = states[source, None] if source >= 0 else states.new_zeros(1, *states.shape[1:])
        for token in range(begin, end):
            here = slice(token, token + 1)
            out[here], state = selective_step(
                query[here], key[here], value[here], time_step[here], rates, state
            )
        states[target] = state[0]


def selective_step(
    query: Tensor, key: Tensor, value: Tensor, time_step: Tensor, rates: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """The selective scan over one position of each of N sequences: the arguments of
    `selective_scan` for them, and the states before them, [N, channels, state_size]. Returns the
    outputs [N, channels] and the states after them."""
    added = time_step * value.float()
    states = (time_step[..., None] * rates).exp() * states
    states.addcmul_(added[..., None], key.float()[:, None, :])
    return (states @ query.float()[..., None])[..., 0], states
