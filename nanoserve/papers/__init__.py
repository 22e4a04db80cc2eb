"""The papers' figures, made anew: the engine's own policies, simulated, beside what the papers report. No torch.

Read framework.py (what a figure is), running.py (simulations side by side on the machine's cores), cases.py (one
simulation, described), claims.py (the paper's number, ours, and whether the relation holds), charts.py (pictures), then
one file for each paper: gllm.py, lecture.py. ``nanoserve bench paper`` runs them; docs/papers.md has what came out.
"""
