"""The lecture's accounting of one device (CS336, lecture 10): what a model's operators and batches amount to."""

from nanoserve.costs import load_machine
from nanoserve.papers.claims import Claim, Spread
from nanoserve.papers.framework import Finding, Paper, PaperFigure, Run, Scale


def _roofline(scale: Scale, run: Run) -> Finding:
    device = load_machine("h100").device
    claim = Claim(
        figure="1.1",
        says="FLOP per byte at which an H100 is balanced",
        paper="295",
        ours=Spread.of([device.intensity]),
        form="{:.0f}",
        at_least=295,
        at_most=296,
        assumption="989 TFLOPS and 3.35 TB/s, from the data sheet",
    )
    return Finding([claim])


PAPER = Paper(
    title="CS336, lecture 10",
    setting=("nothing is simulated: counts", "nothing is simulated: counts"),
    figures=[PaperFigure(number="roofline", title="roofline of an H100", make=_roofline)],
)
