"""Policies side by side: the same requests under variants of engine and policy, in interleaved
rounds."""
