"""The papers' figures: the engine's own policies, simulated, beside what the papers report. No
torch, but in quantized_stories.py, which the lecture's figure imports when it is made.

Read framework.py (what a figure is), running.py (simulations side by side on the machine's cores),
cases.py (one simulation, and how many are compared), claims.py (the paper's number, ours, and
whether the relation holds), charts.py (pictures), then a paper: gllm/, seesaw/, apex/, lecture.py,
adaptive.py. ``nanoserve bench paper`` runs them; docs/papers.md has what came out.
"""
