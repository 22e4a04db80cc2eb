"""The papers' way to check draft tokens, beside nanoserve's, for teaching and figures. Nothing is
served with it.

Speculative sampling (Leviathan et al. 2023; Chen et al. 2023; CS336, lecture 10, algorithm 1)
accepts a draft token by a ratio of probabilities and draws what follows a rejection from a
residual. The distribution of answers is the model's, but another drafter gives other answers.
nanoserve samples as without draft tokens and keeps those that match, with the same noise for
drafter and model: a few less (arXiv 2408.07978), but the answer is a function of the seed alone.

Everywhere p is the drafter's and q the model's probabilities, float64 [..., V], as in the lecture.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Tokens = NDArray[np.int64]
_TINY = 1e-300


def acceptance_probability(p: Floats, q: Floats) -> Floats:
    """min(1, q/p) of draft tokens that have these probabilities."""
    return np.minimum(1.0, q / p)


def residual(p: Floats, q: Floats) -> Floats:
    """Distribution of the token after a rejected draft token: max(0, q - p), over its sum, which
    the lecture leaves out. Where p is q nothing is rejected, and this is q."""
    gap = np.maximum(0.0, q - p)
    total = gap.sum(-1, keepdims=True)
    return np.where(total > 0, gap / np.where(total > 0, total, 1.0), q)


def verify(
    draft_tokens: Tokens, p: Floats, q: Floats, random: np.random.Generator
) -> tuple[Tokens, Tokens]:
    """Algorithm 1 for N rows of K draft tokens, int64 [N, K], which were drawn from p [N, K, V]; q
    is [N, K + 1, V].

    Returns how many draft tokens of each row are accepted and the token that follows them, both
    int64 [N]. It is drawn from the residual, or behind the last draft token from q: this bonus
    token is why there are K + 1 sets of logits.
    """
    rows, most = np.arange(len(draft_tokens)), draft_tokens.shape[1]
    of_draft_tokens = [
        np.take_along_axis(one[:, :most], draft_tokens[:, :, None], -1)[:, :, 0] for one in (p, q)
    ]
    accepts = random.random(draft_tokens.shape) < acceptance_probability(*of_draft_tokens)
    accepted = accepts.cumprod(1).sum(1)
    behind = np.concatenate((residual(p, q[:, :most]), q[:, most:]), axis=1)[rows, accepted]
    return accepted, (behind / random.exponential(size=behind.shape)).argmax(-1)


def optimal_acceptance(p: Floats, q: Floats) -> Floats:
    """How often any scheme can accept a draft token at most, and the ratio test does: 1 - TV,
    [...]."""
    return np.asarray(np.minimum(p, q).sum(-1))


def shared_noise_acceptance(p: Floats, q: Floats) -> Floats:
    """How often both sample the same token with the same noise, [...].

    The sampler is a race: token x of probability p(x) arrives at time e(x) / p(x), with e
    exponential. So x wins both races if e(y) is at least e(x) max(p(y)/p(x), q(y)/q(x)) for all
    others, which has probability 1 over the sum of these maxima. At least (1 - TV) / (1 + TV)
    (2408.07978).
    """
    # p(y)/p(x) is the larger one where y comes after x
    order = np.argsort(p / np.maximum(q, _TINY), axis=-1)
    p, q = (np.take_along_axis(one, order, -1) for one in (p, q))
    after, before = np.flip(np.flip(p, -1).cumsum(-1), -1) - p, q.cumsum(-1)
    possible, safe_p, safe_q = np.minimum(p, q) > 0, np.maximum(p, _TINY), np.maximum(q, _TINY)
    return np.asarray(np.where(possible, 1.0 / (after / safe_p + before / safe_q), 0.0).sum(-1))
