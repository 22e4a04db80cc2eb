"""Speculative decoding: what drafts the next tokens, and how many draft tokens a step checks. No
torch.

A decode row may carry draft tokens. The step samples every position with the normal sampler, whose
noise is a function of seed, sample, position and token, and keeps the draft tokens that were
sampled so (sample and match with shared noise). So the answers are those of plain decoding,
whatever the drafter.
"""
