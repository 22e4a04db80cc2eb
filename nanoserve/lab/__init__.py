"""The laboratory: benchmarks, papers, simulator and charts. The engine knows nothing of it but the two doors."""
