"""The commands: one module for each, and modules that they share. Nothing here imports torch by
itself."""
