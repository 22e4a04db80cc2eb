"""Programs for the GPU. A module here imports nothing but Triton."""
