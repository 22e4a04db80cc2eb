"""``nanoserve bench gpu``: is it right on the GPU, how fast are the kernels, how fast is the
engine."""
