"""Start of an executor: devices, memory, loading, measuring, and how workers find each other."""
