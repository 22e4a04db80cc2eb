"""``nanoserve bench gpu``: is it right on the GPU, how fast are the kernels, how fast is the engine.

Every part runs in a process of its own (`worker`), which `running` watches: a kernel that hangs or takes the device
down costs its own row and nothing that was measured before.
"""
