"""Text diffusion: denoising steps, which settle tokens of canvases."""
