"""Parts of the operating system for all rooms: processes, threads, signals, sockets, files and
sizes. No torch."""
