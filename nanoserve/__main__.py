"""``python -m nanoserve`` is the installed command ``nanoserve``."""

from nanoserve.entry import run

if __name__ == "__main__":
    run()
