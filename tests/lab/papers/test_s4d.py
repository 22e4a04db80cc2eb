"""S4D is one function in two forms, discretized as its differential equation says."""

import pytest
import torch

from nanoserve.lab.papers.s4d import S4D, hippo_legs, legs_eigenvalues


def test_the_convolution_is_the_recurrence() -> None:
    torch.manual_seed(0)
    model = S4D(channels=6, state_size=64)
    inputs = torch.randn(2, 6, 300)
    with torch.no_grad():
        at_once = model.convolve(inputs)
        state = model.first_state(2)
        one_by_one = []
        for position in range(300):
            output, state = model.step(inputs[..., position], state)
            one_by_one.append(output)
    torch.testing.assert_close(at_once, torch.stack(one_by_one, -1), rtol=1e-5, atol=1e-5)


def test_a_held_input_solves_the_differential_equation() -> None:
    """The solution of x' = A x + u over a step is a block of the exponential of a larger matrix."""
    model = S4D(channels=1, state_size=8)
    with torch.no_grad():
        kept, taken, _ = model.discretized()
        step = float(model.log_step.exp())
        decays, frequencies = model.log_decay[0].exp().tolist(), model.frequency[0].tolist()
    for pair in range(4):
        eigenvalue = complex(-decays[pair], frequencies[pair])
        system = torch.tensor([[eigenvalue, 1.0], [0.0, 0.0]], dtype=torch.complex128)
        solved = torch.linalg.matrix_exp(step * system)
        assert complex(kept[0, pair]) == pytest.approx(complex(solved[0, 0]), abs=1e-6)
        assert complex(taken[0, pair]) == pytest.approx(complex(solved[0, 1]), abs=1e-6)


def test_hippo_legs_is_a_normal_matrix_less_one_of_rank_one() -> None:
    """The numbers of size 3 are computed by hand from theorem 2 of HiPPO; the eigenvalues are those
    of the whole normal matrix."""
    expected = torch.tensor([[-1, 0, 0], [-(3**0.5), -2, 0], [-(5**0.5), -(15**0.5), -3]])
    torch.testing.assert_close(hippo_legs(3), expected.double())
    root = (torch.arange(16, dtype=torch.float64) + 0.5).sqrt()
    normal = hippo_legs(16) + torch.outer(root, root)
    torch.testing.assert_close(normal @ normal.T, normal.T @ normal)
    found = torch.linalg.eigvals(normal)
    upper = found[found.imag > 0]
    torch.testing.assert_close(legs_eigenvalues(16), upper[upper.imag.argsort()])


def test_no_state_grows() -> None:
    with torch.no_grad():
        kept, _, _ = S4D(channels=4).discretized()
    assert float(kept.abs().max()) < 1
