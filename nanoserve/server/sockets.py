"""Names of the sockets in the engine's private directory."""

COMMANDS = "commands"
"""The engine listens here."""
REPORTS = "reports"
"""The front end listens here."""
REFUSAL = b"!"
"""What the engine's first line begins with where it cannot begin, and says why."""
