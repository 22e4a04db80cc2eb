"""The models of a server."""

from collections.abc import Callable

import msgspec

from nanoserve.client.connection import ApiClient, ServerRefused
from nanoserve.client.events import printable
from nanoserve.errors import RuntimeFailure, UsageError

NO_SUCH_PATH = (404, 405)
"""Statuses of a server that does not have a path."""


class ModelCard(msgspec.Struct, frozen=True):
    """An entry of /v1/models. The length of the context is an extra of nanoserve and vLLM."""

    id: str
    max_model_len: int | None = None

    @property
    def name(self) -> str:
        """The id in a form that is safe to print."""
        return printable(self.id)


class _ModelList(msgspec.Struct, frozen=True):
    data: tuple[ModelCard, ...]


def served_model(client: ApiClient, wanted: str | None, notify: Callable[[str], None]) -> ModelCard:
    """The wanted model, or the first that the server lists; ``notify`` gets a line if there are several.

    A wanted model need not be listed: some servers have more models than they list.

    Raises:
        NanoserveError: if the server cannot be reached or refuses; if no model is wanted and none is listed.
    """
    try:
        path = f"{client.address.api}/models"
        found = msgspec.convert(client.get(path), _ModelList).data
    except msgspec.ValidationError as error:
        raise RuntimeFailure(f"{client.address}{path} is no list of models: {error}") from None
    except ServerRefused as error:
        if wanted is None or error.status not in NO_SUCH_PATH:
            raise
        found = ()
    if wanted is not None:
        return next((card for card in found if card.id == wanted), ModelCard(wanted))
    if not found:
        raise UsageError("the server lists no model: name one with --model")
    if len(found) > 1:
        names = ", ".join(card.id for card in found)
        notify(f"the server has {len(found)} models ({names}): this is {found[0].id}, --model takes another")
    return found[0]
