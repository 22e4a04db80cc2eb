"""Stand-ins that tests share. None of them imports torch."""
