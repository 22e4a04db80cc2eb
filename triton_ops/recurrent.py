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
    segment, oldest first; segments: int32 [N, SEGMENT_FIELDS], those of a row in order and the slot
    before a segment not written by another row. With `silu` the result passes through SiLU.
    """
    kept = states.shape[-1]
    for begin, end, source, target, _ in segments.tolist():
        if source < 0:
            before = states.new_zeros(states.shape[1:])
        else:
            before = states[source]
        seen = torch.cat((before.to(inputs.dtype), inputs[begin:end].T), dim=-1)
        result = functional.conv1d(
            seen[None].float(),
            weight[:, None].float(),
            None if bias is None else bias.float(),
            groups=seen.shape[0],
        )[0]
        if silu:
            result = functional.silu(result)
        out[begin:end] = result.T
        states[target] = seen[:, seen.shape[-1] - kept :]


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
    for begin, end, source, target, position in segments.tolist():
        if source < 0:
            state = states.new_zeros(states.shape[1:])
        else:
            state = states[source]
        first = begin
        while first < end:
            chunk_end = min(end, first + CHUNK - (position + first - begin) % CHUNK)
            tokens = slice(first, chunk_end)
            out[tokens], state = delta_rule_chunk(
                query[tokens], key[tokens], value[tokens], decay[tokens], beta[tokens], state
            )
            first = chunk_end
        states[target] = state


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
    shared = value.shape[1] // key.shape[1]
    query = _normed(query).repeat_interleave(shared, dim=1).transpose(0, 1)
    query = query * query.shape[-1] ** -0.5
    key = _normed(key).repeat_interleave(shared, dim=1).transpose(0, 1)
    exact = value.float().transpose(0, 1)
    total = decay.T.cumsum(-1)  # [heads, C]
    rate = beta.T[..., None]
    later = total[:, :, None] - total[:, None, :]
    length = total.shape[-1]
    is_seen = torch.ones(length, length, dtype=torch.bool, device=value.device).tril()
    factors = later.masked_fill(~is_seen, -torch.inf).exp()
    system = (key @ key.mT) * factors * rate
    read = total.exp()[..., None] * (key @ state)
    corrections = torch.linalg.solve_triangular(
        system, rate * (exact - read), upper=False, unitriangular=True
    )
    scores = (query @ key.mT) * factors
    output = total.exp()[..., None] * (query @ state) + scores @ corrections
    left = (total[:, -1:] - total).exp()[..., None]
    state = total[:, -1, None, None].exp() * state + (left * key).mT @ corrections
    return output.transpose(0, 1), state


def _normed(heads: Tensor) -> Tensor:
    """Heads [T, H, D] scaled to length 1, in float32."""
    exact = heads.float()
    return exact * torch.rsqrt(exact.square().sum(-1, keepdim=True) + _NORM_EPS)
