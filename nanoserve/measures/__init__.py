"""What runs are given to do and what is said of them: workloads, metrics and charts of measured and simulated runs."""
