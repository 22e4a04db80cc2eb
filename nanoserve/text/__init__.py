"""Text in, text out: tokenizers, chat templates, detokenizing, stop strings, reasoning blocks. Never imports torch."""
