"""The parent's side of `template_process`."""

import json
from collections.abc import Mapping
from typing import Any

from nanoserve.errors import ModelError, UsageError
from nanoserve.text.limited_process import LimitedProcess

# A rendering of a long conversation takes a few milliseconds; bombs are the only ones to meet these.
SECONDS = 0.5
FUEL = 500_000
FUEL_PER_CHARACTER = 20
MAX_CHARACTERS = 1 << 20
MAX_GROWTH = 4


class TemplateSandbox(LimitedProcess):
    """Renders one template in a process with bounded memory and time, which starts at once."""

    def __init__(self, template: str, origin: str) -> None:
        super().__init__("nanoserve.text.template_process", "the process of the chat template", {"template": template})
        self._origin = origin
        self.start()

    def render(self, context: Mapping[str, Any]) -> str:
        """The rendered text.

        Raises UsageError with the template's own words when it refuses the conversation, ModelError when it is broken
        or wants more time, memory or output than any conversation needs.
        """
        request = json.dumps({"context": context})
        limits = {
            "fuel": FUEL + FUEL_PER_CHARACTER * len(request),
            "max_characters": MAX_CHARACTERS + MAX_GROWTH * len(request),
            "seconds": SECONDS,
        }
        answer = self.ask(request[:-1] + ", " + json.dumps(limits)[1:])
        if answer is None:
            answer = {"error": "it needs more memory or time than a template may have"}
        if "refusal" in answer:
            raise UsageError(f"the model's chat template refuses these messages: {answer['refusal']}")
        if "error" in answer:
            raise ModelError(f"the chat template in {self._origin} fails: {answer['error']}")
        text: str = answer["text"]
        return text
