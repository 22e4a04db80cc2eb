"""Processes, signals, threads, sockets and files."""
