"""One step on a device: a plan's rows as one batch, the forward pass, what comes back."""
