"""Everything that measures speed where an engine runs: speeds of the machine, parts of a step,
whole layouts."""
