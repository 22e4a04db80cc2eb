"""Runs a StepPlan with torch: inputs, forward pass, sampling, answers."""
