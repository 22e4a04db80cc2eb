"""Decodes whose KV is in host memory and whose attention runs on the CPU."""
