"""S4D (arXiv 2206.11893): a state-space model, which is a convolution and a recurrence at once.

Each channel maps a signal u(t) to y(t) through a state x(t) of N numbers (the lecture, section
2.2.1):

    x'(t) = A x(t) + B u(t),    y(t) = Re(C x(t)) + D u(t).

Where u is held for a step of time, this is exactly x_k = A' x_(k-1) + B' u_k, with A' = exp(step A)
and B' = A^-1 (A' - 1) B: zero-order hold. Unrolled, y is a convolution of u with the kernel
K_j = Re(C A'^j B'). So a model can be trained as a convolution, over all positions at once, and run
as a recurrence, whose memory does not grow. Here A is diagonal, and begins as HiPPO-LegS.
"""

import math

import torch
from torch import Tensor, nn

SHORTEST_STEP, LONGEST_STEP = 1e-3, 1e-1
"""Steps of time of the channels, in units in which HiPPO-LegS forgets: one channel remembers about
1,000 positions, another 10."""


def hippo_legs(size: int) -> Tensor:
    """The matrix of HiPPO-LegS (arXiv 2008.07669, theorem 2), float64 [size, size]: it keeps the
    coefficients of the input's history in Legendre polynomials. It is lower triangular."""
    index = torch.arange(size, dtype=torch.float64)
    root = (2 * index + 1).sqrt()
    lower = torch.tril(root[:, None] * root[None, :], diagonal=-1)
    return -lower - torch.diag(index + 1)


def legs_eigenvalues(size: int) -> Tensor:
    """The eigenvalues of the normal part of HiPPO-LegS, complex128 [size / 2]: one of each
    conjugate pair, by growing frequency (arXiv 2206.11893, section 4.2, S4D-LegS).

    HiPPO-LegS is the sum of a normal matrix and one of rank 1. The normal matrix is -1/2 on its
    diagonal, and skew-symmetric beside it.
    """
    index = torch.arange(size, dtype=torch.float64)
    rank_one = (index + 0.5).sqrt()
    normal = hippo_legs(size) + rank_one[:, None] * rank_one[None, :]
    skew = normal + 0.5 * torch.eye(size, dtype=torch.float64)
    frequencies = torch.linalg.eigvalsh(-1j * skew.to(torch.complex128))
    return torch.complex(torch.full_like(frequencies, -0.5), frequencies)[size // 2 :]


class S4D(nn.Module):
    """`channels` independent state-space models with `state_size` numbers each, kept as half as
    many complex ones. Real parts of A stay negative, so no state grows."""

    def __init__(self, channels: int, state_size: int = 64) -> None:
        super().__init__()
        pairs = legs_eigenvalues(state_size).expand(channels, -1)
        self.log_decay = nn.Parameter((-pairs.real).log().float())
        self.frequency = nn.Parameter(pairs.imag.float())
        drawn = torch.rand(channels, 1) * math.log(LONGEST_STEP / SHORTEST_STEP)
        self.log_step = nn.Parameter(drawn + math.log(SHORTEST_STEP))
        self.output = nn.Parameter(torch.randn(channels, state_size // 2, 2) * 0.5**0.5)
        self.skip = nn.Parameter(torch.randn(channels))

    def discretized(self) -> tuple[Tensor, Tensor, Tensor]:
        """A', B' and C of every channel, complex64 [channels, state_size / 2]. B is 1; the pair of
        each number counts by a factor of 2 in C."""
        state_matrix = torch.complex(-self.log_decay.exp(), self.frequency)
        kept = (self.log_step.exp() * state_matrix).exp()
        return kept, (kept - 1) / state_matrix, 2 * torch.view_as_complex(self.output)

    def kernel(self, length: int) -> Tensor:
        """The kernel of the convolution, float32 [channels, length]."""
        kept, taken, output = self.discretized()
        powers = (kept.log()[..., None] * torch.arange(length)).exp()
        return torch.einsum("cn,cnl->cl", output * taken, powers).real

    def convolve(self, inputs: Tensor) -> Tensor:
        """inputs [batch, channels, length] -> outputs, same shape, all positions at once: by fast
        Fourier transform, padded so that the end does not reach the beginning."""
        length = inputs.shape[-1]
        spectrum = torch.fft.rfft(inputs, 2 * length) * torch.fft.rfft(
            self.kernel(length), 2 * length
        )
        convolved: Tensor = torch.fft.irfft(spectrum, 2 * length)[..., :length]
        return convolved + self.skip[:, None] * inputs

    def step(self, position: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs of one position [batch, channels] and the state before it, complex64 [batch,
        channels, state_size / 2] -> outputs of that position, and the state after it."""
        kept, taken, output = self.discretized()
        state = kept * state + taken * position[..., None]
        return (output * state).sum(-1).real + self.skip * position, state

    def first_state(self, batch: int) -> Tensor:
        """The state before the first position."""
        return torch.zeros(batch, *self.frequency.shape, dtype=torch.complex64)
