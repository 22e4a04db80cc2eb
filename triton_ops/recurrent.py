"""Layers with a recurrent state: short causal convolutions, and the gated delta rule (Gated
DeltaNet, arXiv 2412.06464).

A step has T tokens in segments. A segment is some consecutive positions of one sequence, with the
slot that holds the state before them and the slot that takes the state after them. A prompt's scan
works on chunks of CHUNK positions that begin at multiples of CHUNK, wherever its segments are cut:
so a prompt whose segments end at such multiples is computed in the same way however it is cut.
"""

import torch
from torch import Tensor
from torch.nn import functional

from triton_ops.registration import OPERATORS

CHUNK = 64
"""Positions that are computed together in the scan of a prompt."""
SEGMENT_FIELDS = 5
"""Columns of a table of segments: where its tokens begin and end among the T of the step; the slots
that hold the state before and after them, where a first slot of -1 is a state of zeros; and the
position of its first token in the sequence."""
_NORM_EPS = 1e-6


@OPERATORS.define(writes=("out", "states"))
def causal_convolution(
    out: Tensor,
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    segments: Tensor,
    silu: bool,  # noqa: FBT001 - the type of an operator's schema
) -> None:
    """Convolve every channel over the last positions of its sequence.

    out, inputs: [T, channels]; weight: [channels, kernel_size], the last column for the newest
    position; bias: [channels]; states: [slots, channels, kernel_size - 1], the inputs before a
    segment, oldest first; segments: int32 [N, SEGMENT_FIELDS]. The segments of a row follow one
    another in order, and each reads the slot that the one before it wrote. No row reads a slot that
    another one writes. With `silu` the result passes through SiLU.
    """
    single, others = split_segments(segments)
    if len(single):
        first, _, source, target, _ = single.T.long()
        seen = torch.cat((states_before(states, source).mT, inputs[first, None]), dim=-2)
        out[first] = _convolve(seen, weight, bias, silu=silu)[:, 0].to(out.dtype)
        states[target] = seen[:, 1:].mT
    for begin, end, source, target, _ in others:
        before = states[source] if source >= 0 else states.new_zeros(states.shape[1:])
        seen = torch.cat((before.mT, inputs[begin:end]))
        out[begin:end] = _convolve(seen, weight, bias, silu=silu)
        states[target] = seen[end - begin :].mT


def _convolve(seen: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool) -> Tensor:
    """Inputs [..., kernel_size - 1 + L, channels] -> float32 [..., L, channels]"""
    length = seen.shape[-2] - weight.shape[1] + 1
    exact = seen.float()
    result = torch.zeros_like(exact[..., :length, :])
    if bias is not None:
        result += bias.float()
    for place in range(weight.shape[1]):
        result += weight[:, place].float() * exact[..., place : place + length, :]
    return functional.silu(result) if silu else result


@OPERATORS.define(writes=("out", "states"))
def gated_delta_rule(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    segments: Tensor,
) -> None:
    """The gated delta rule (arXiv 2412.06464, equation 10) over the segments of a step.

    out, value: [T, num_value_heads, value_head_dim]; query, key: [T, num_key_heads, key_head_dim],
    which are scaled to length 1 here, and the query by key_head_dim ** -0.5; decay: float32 [T,
    num_value_heads], the logarithm of the factor that the state is multiplied by; beta: float32,
    same shape; states: float32 [slots, num_value_heads, key_head_dim, value_head_dim]; segments:
    as of `causal_convolution`. Neighbouring value heads share a key head.
    """
    single, others = split_segments(segments)
    if len(single):
        first, _, source, target, _ = single.T.long()
        result, states[target] = delta_rule_step(
            query[first],
            key[first],
            value[first],
            decay[first],
            beta[first],
            states_before(states, source),
        )
        out[first] = result.to(out.dtype)
    for begin, end, source, target, position in others:
        state = states[source] if source >= 0 else states.new_zeros(states.shape[1:])
        first = begin
        while first < end:
            chunk_end = min(end, first + CHUNK - (position + first - begin) % CHUNK)
            tokens = slice(first, chunk_end)
            inputs = (query[tokens], key[tokens], value[tokens], decay[tokens], beta[tokens])
            if chunk_end - first == 1:
                out[tokens], states_after = delta_rule_step(*inputs, state[None])
                state = states_after[0]
            else:
                out[tokens], state = delta_rule_chunk(*inputs, state)
            first = chunk_end
        states[target] = state


def delta_rule_step(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """The gated delta rule over one position of each of N sequences: the arguments of
    `gated_delta_rule` for them, and the states before them, [N, num_value_heads, key_head_dim,
    value_head_dim]. Returns the outputs [N, num_value_heads, value_head_dim] and the states after
    them.
    """
    query, key = _normed_pair(query, key, value.shape[1])
    states = decay.exp()[..., None, None] * states
    known = (key[..., None, :] @ states)[..., 0, :]
    correction = beta[..., None] * (value.float() - known)
    states.addcmul_(key[..., None], correction[..., None, :])
    return (query[..., None, :] @ states)[..., 0, :], states


def delta_rule_chunk(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The gated delta rule over C positions at once: the arguments of `gated_delta_rule` for them,
    and the state before them, [num_value_heads, key_head_dim, value_head_dim]. Returns the outputs
    [C, num_value_heads, value_head_dim] and the state after them.

    With D_i the sum of the decays up to position i, the corrections u_i solve the triangular system
    u_i = beta_i (v_i - exp(D_i) k_i S) - sum over j < i of beta_i exp(D_i - D_j) (k_i . k_j) u_j,
    and the state after the chunk is exp(D_C) S + sum of exp(D_C - D_j) k_j u_j (arXiv 2412.06464,
    section 3.3).
    """
    query, key = _normed_pair(query, key, value.shape[1])
    query, key, exact = query.transpose(0, 1), key.transpose(0, 1), value.float().transpose(0, 1)
    rate = beta.T[..., None]
    factors, grown = decays_between(decay)
    system = (key @ key.mT) * factors * rate
    corrections = torch.linalg.solve_triangular(
        system, rate * (exact - grown * (key @ state)), upper=False, unitriangular=True
    )
    output = grown * (query @ state) + (query @ key.mT * factors) @ corrections
    left = factors[:, -1, :, None]
    state = grown[:, -1:] * state + (left * key).mT @ corrections
    return output.transpose(0, 1), state


def decays_between(decay: Tensor) -> tuple[Tensor, Tensor]:
    """The decay between positions, of the logarithms of C positions' decays [C, H]: what is left at
    position i of what position j adds, [H, C, C], 0 where j is later; and what is left there of the
    state before them, [H, C, 1]."""
    length = len(decay)
    is_seen = torch.ones(length, length, dtype=torch.bool, device=decay.device).tril()
    # Differences of running sums would be less exact, where one factor is all but 0.
    between = decay.T[..., None].expand(-1, -1, length).masked_fill(~is_seen.tril(-1), 0.0)
    factors = between.cumsum(-2).exp() * is_seen
    return factors, decay.T.cumsum(-1).exp()[..., None]


def _normed_pair(query: Tensor, key: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Queries and keys [T, H, D] scaled to length 1, the queries by D ** -0.5 too, in float32, each
    repeated for the heads that share it: [T, heads, D]."""
    shared = heads // key.shape[1]
    query = _normed(query) * query.shape[-1] ** -0.5
    return query.repeat_interleave(shared, dim=1), _normed(key).repeat_interleave(shared, dim=1)


def _normed(heads: Tensor) -> Tensor:
    """Heads [T, H, D] scaled to length 1, in float32."""
    exact = heads.float()
    return exact * torch.rsqrt(exact.square().sum(-1, keepdim=True) + _NORM_EPS)


def split_segments(segments: Tensor) -> tuple[Tensor, list[list[int]]]:
    """Split a table of segments into those of one token that are a row of their own, which can be
    computed together, and the others in order."""
    rows = list[list[list[int]]]()
    for segment in segments.tolist():
        if rows and segment[2] == rows[-1][-1][3]:
            rows[-1].append(segment)
        else:
            rows.append([segment])
    single, others = list[list[int]](), list[list[int]]()
    for row in rows:
        begin, end, *_ = row[0]
        (single if len(row) == 1 and end - begin == 1 else others).extend(row)
    return segments.new_tensor(single), others


def states_before(states: Tensor, source: Tensor) -> Tensor:
    """The states in these slots; zeros for slots of -1."""
    is_new = (source < 0).view(-1, *[1] * (states.dim() - 1))
    return states[source.clamp(min=0)].masked_fill(is_new, 0.0)
