"""Why a request brought no answer, in the words of an operator."""

from __future__ import annotations

from typing import Literal

import msgspec

from console.checks.smoke.answer import error_words
from console.model.text import clean

Kind = Literal[
    "refused", "unauthorised", "busy", "slow", "hung", "died", "endless", "malformed", "rejected", "not-asked"
]

#: Not the model's fault, and gone in a moment: no verdict on the model.
NO_VERDICT: frozenset[Kind] = frozenset({"busy", "slow", "not-asked"})

_REMEDIES: dict[Kind, str] = {
    "refused": "nothing listens there: look at the service's state and its journal, and at service.url",
    "unauthorised": "put the API key in a file and name it in service.api_key_file",
    "busy": "try again when fewer requests wait, or raise --max-queued-requests",
    "slow": "try again when the engine has less to do, or look at its tokens a second",
    "hung": "look at the journal; a scheduler that stands still needs a restart",
    "died": "look at the journal for the crash: the engine ended while it answered",
    "endless": "look at the stop tokens of the model and at its generation_config.json",
    "malformed": "check that service.url is SGLang itself, and no proxy or other server",
}

_WORDS_LIMIT = 300


class Trouble(msgspec.Struct, frozen=True):
    """One failed request: its kind, and what happened in words that name no secret."""

    kind: Kind
    words: str

    @property
    def remedy(self) -> str | None:
        return _REMEDIES.get(self.kind)


def refusal(status: int, body: bytes, has_key: bool, key_note: str | None = None) -> Trouble:
    """What an HTTP status other than 200 means, with the engine's own words where it has some."""
    found = error_words(body)
    page = body.lstrip()[:1] == b"<"
    said = clean(found[0])[:_WORDS_LIMIT] if found else "an HTML page" if page else ""
    told = f"HTTP {status}" + (f": {said}" if said else "")
    if status in (401, 403):
        why = key_note or (
            "the key in service.api_key_file is not accepted" if has_key else "the service wants an API key"
        )
        return Trouble("unauthorised", f"unauthorised ({told}): {why}")
    if status == 429 or "queue is full" in said or "higher priority" in said:
        return Trouble("busy", f"busy ({told})")
    if page:
        return Trouble("malformed", f"not an engine's answer ({told})")
    if status in (502, 504):
        return Trouble("refused", f"a proxy answered that the engine does not ({told})")
    if status == 503:
        return Trouble("rejected", f"not ready ({told})")
    return Trouble("rejected", f"refused the request ({told})")


_NETWORK: dict[str, tuple[Kind, str]] = {
    "refused": ("refused", "refused the connection"),
    "unreachable": ("refused", "cannot be reached"),
    "reset": ("died", "died while answering"),
    "malformed": ("malformed", "answered with something that is not HTTP"),
}


def network(error: str, detail: str) -> Trouble:
    """From the error and detail that ``console.sources.engine.client.explain`` gives."""
    kind, words = _NETWORK.get(error, ("malformed", "failed"))
    return Trouble(kind, f"{words}: {clean(detail)[:_WORDS_LIMIT]}")
