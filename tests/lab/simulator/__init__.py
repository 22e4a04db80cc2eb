"""The simulator, with step times that can be worked out by hand."""
