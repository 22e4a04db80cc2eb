"""One decoder for many families: its layers, its attention, and loading from Hugging Face
checkpoints."""
