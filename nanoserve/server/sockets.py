"""Names of the sockets in the engine's private directory."""

COMMANDS = "commands"
"""The engine listens here."""
REPORTS = "reports"
"""The front end listens here."""
