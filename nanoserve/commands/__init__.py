"""What the doors call: one module per sub-command, and what they share. Nothing here imports torch by itself."""
