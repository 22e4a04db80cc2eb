"""A model, read from its files: configuration and families, quantization, names in checkpoints. No
torch here."""
