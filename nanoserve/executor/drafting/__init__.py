"""What drafts tokens on the device, once the answers of a step are known: speculative decoding's drafters."""
