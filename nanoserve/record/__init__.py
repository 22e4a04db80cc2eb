"""Records of runs: events, and the metrics, phases, traces, replay and learning that are made of
them. No torch."""
