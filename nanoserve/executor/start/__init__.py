"""What happens before the first step: devices, memory, loading, measuring, and how workers find each other."""
