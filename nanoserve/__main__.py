"""``python -m nanoserve`` is the installed command ``nanoserve``."""

from nanoserve.commands.entry import run

if __name__ == "__main__":
    run()
