"""Text diffusion: canvases, which are rewritten until all of their tokens are settled, and the
block tables of sequences that write them."""
