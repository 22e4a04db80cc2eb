"""What happened in a run, recorded once; metrics, phases, traces, replay and learning are functions of it. No torch."""
