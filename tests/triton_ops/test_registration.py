"""A device takes its own implementation of an operator, and the plain one for as long as it is asked to."""

import torch

from triton_ops.registration import Operators


def test_a_device_with_an_implementation_in_python_runs_the_plain_one_for_a_while() -> None:
    """GPUs have their own in this way. The CPU stands in for one, in a namespace of this test."""
    operators = Operators("nanoserve_test")

    def answer(tensor: torch.Tensor) -> torch.Tensor:
        return tensor + 1

    operator = operators.define(fake=torch.empty_like)(answer)
    operators.implement("answer", "CPU", lambda tensor: tensor + 2)
    zero = torch.zeros(())
    assert operator(zero) == 2
    for _ in range(2):
        with operators.plain("CPU"):
            assert operator(zero) == 1
        assert operator(zero) == 2
    with operators.plain("CUDA"):  # of another device
        assert operator(zero) == 2
