"""Names of the sockets in the engine's private directory."""

COMMANDS = "commands"
"""The engine listens here."""
REPORTS = "reports"
"""The front end listens here."""
NO_DIRECTORY = b"!"
"""What the engine's first line begins with where it is no directory's name, but why there is no place for sockets."""
