"""The command line from a checkout: ``python cli.py chat`` is the installed command ``nanoserve chat``."""

from nanoserve.commands.main import run

if __name__ == "__main__":
    run()
