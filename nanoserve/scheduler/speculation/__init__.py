"""Speculative decoding: what guesses the next tokens, and how many guesses a step checks. No torch.

A decode row may carry guesses. The step samples every position with the normal sampler, whose noise is a function of
seed, sample, position and token, and keeps the guesses that were sampled so (sample and match with shared noise). So
the answers are those of plain decoding, whatever the drafter.
"""
