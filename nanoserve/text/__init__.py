"""Text and tokens: tokenizers, chat templates, answer formats, and grammars of JSON schemas. Never
imports torch."""
