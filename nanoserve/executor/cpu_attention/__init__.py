"""Decode attention on the CPU beside the steps of the device."""
