"""What the rooms need of the operating system: processes, threads, signals, sockets, files and sizes. No torch."""
