"""The engines that are compared, behind one Protocol; each runs in a process of its own."""
