"""How well steps were predicted: error of the predictor that the policies had, by strategy. No torch."""

from collections.abc import Sequence

import msgspec
import numpy as np

from nanoserve.costs.step_features import Strategy
from nanoserve.record.forecasts import Forecast


class ErrorFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Of steps of one strategy: errors are shares of what they took."""

    steps: int
    """How many."""
    median: float
    p90: float
    """Of the errors' sizes."""
    bias: float
    """The median with its sign; above 0, too much is predicted."""

    @classmethod
    def of(cls, forecasts: Sequence[Forecast]) -> "ErrorFigures | None":
        """None of no steps."""
        errors = np.array([one.predicted / one.measured - 1 for one in forecasts if one.measured])
        if not errors.size:
            return None
        median, p90 = np.percentile(np.abs(errors), (50, 90))
        return cls(steps=int(errors.size), median=float(median), p90=float(p90), bias=float(np.median(errors)))


class PredictionErrors(msgspec.Struct, frozen=True, kw_only=True):
    """By strategy, and of all steps; None where there are none."""

    all: ErrorFigures | None
    device: ErrorFigures | None
    asymmetric: ErrorFigures | None
    overlap: ErrorFigures | None

    @classmethod
    def of(cls, forecasts: Sequence[Forecast]) -> "PredictionErrors":
        """Of a run."""

        def figures(strategy: Strategy) -> ErrorFigures | None:
            return ErrorFigures.of([one for one in forecasts if one.work.strategy == strategy])

        return cls(
            all=ErrorFigures.of(forecasts),
            device=figures("device"),
            asymmetric=figures("asymmetric"),
            overlap=figures("overlap"),
        )
