"""``nanoserve bench hybrid``: attention on the CPU beside the device (APEX), against the device alone."""
