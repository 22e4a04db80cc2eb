"""The commands of the laboratory: bench, simulate, plan, analyze, profile and explain."""
