"""Answers of each family of models: split into reasoning, text and tool calls while the answer
arrives."""
