"""``nanoserve bench reshard``: two parallel layouts on the same workers, in turn, and each of them alone."""
