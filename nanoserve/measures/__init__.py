"""What runs are given to do and what is said of them, in the same words for measured and for simulated ones. No torch.

workloads.py (lengths, grids, traces), metrics.py (TTFT, TPOT, distributions), slo.py (objectives), figures.py (PNG
files). Measuring is benchmarks' business, simulating that of simulator; neither is known here.
"""
