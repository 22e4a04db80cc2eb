"""An Explanation as one page of HTML, which loads nothing from the network."""

from pathlib import Path

import msgspec

from nanoserve.record.explanation import Explanation


def explanation_page(explanation: Explanation) -> str:
    """The page with the explanation in it as JSON. No text of a prompt can end the script that holds it."""
    page = Path(__file__).with_name("explanation.html").read_text(encoding="utf-8")
    content = msgspec.json.encode(explanation).decode()
    return page.replace("EXPLANATION_JSON", content.replace("<", "\\u003c"), 1)
