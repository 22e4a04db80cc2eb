"""The command line from a checkout: ``python cli.py chat`` is the installed command ``nanoserve
chat``."""

from nanoserve.commands.entry import run

if __name__ == "__main__":
    run()
