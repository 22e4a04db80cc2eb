"""Layers made faster: ahead-of-time Inductor on the CPU, torch.compile on a GPU, and their pieces for hybrid steps."""
