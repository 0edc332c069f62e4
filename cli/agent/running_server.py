"""Request the name and context length of a model from a running server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import click

from .clients import Served

_TIMEOUT_S = 10.0
_LOADS_WITHIN_S = 3600.0  # a model may be compiled first


def ask_server(url: str, api_key: str | None, model: str | None = None) -> Served:
    """Return a model of the server at `url`, which may end in `/v1`. Prints the names of the server's other models.

    Args:
        model: the model's name; None: the server's first model that can chat. It is loaded if its context length is
            unknown.

    Raises:
        ValueError: the server does not respond, has no such model, refuses the key, or is not radixlm's; or the model
            has no chat template, without which it takes neither messages nor tools.
    """
    base = url.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise ValueError(f"--url is {url!r:.80}; it must begin with http:// or https://")
    try:
        listed = _response(f"{base}/v1/models", api_key)["data"]
        names = {each["id"]: each for each in listed}
        first = next((each for each in listed if _can_chat(each)), listed[0])
        chosen = names.get(first["id"] if model is None else model)
        if chosen is None:
            raise _UnusableModel(f"the server at {base} has no model {model!r:.80}; it has {', '.join(names)}")
        if len(names) > 1:
            others = [f"{name} ({each.get('state', 'loaded')})" for name, each in names.items() if each is not chosen]
            click.echo(
                f"using {chosen['id']}; this server also has {', '.join(others)}: name one before --url", err=True
            )
        if "max_model_len" not in chosen:
            chosen = _response(f"{base}/models/load", api_key, {"model": chosen["id"]})
        if not _can_chat(chosen):
            raise _UnusableModel(
                f"{chosen['id']} of the server at {base} has no chat template, so it takes neither messages nor tools; "
                "choose a model that can chat"
            )
        return Served(base, chosen["id"], chosen["max_model_len"], api_key)
    except HTTPError as error:
        if error.code == 401:
            raise ValueError(f"the server at {base} requires a key; add --api-key") from error
        raise ValueError(f"the server at {base} responded with status {error.code}; wait until it is ready") from error
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", None) or error or type(error).__name__
        raise ValueError(f"no server responds at {base} ({reason}); start one with radixlm serve") from error
    except _UnusableModel:
        raise
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{base} is not a radixlm server: it does not return its model's context length") from error


class _UnusableModel(ValueError):
    """The server does not have the named model, or the model cannot chat."""


def _can_chat(model: Mapping[str, Any]) -> bool:
    """Return whether a listed model has a chat template, as far as the server says so."""
    return model.get("has_chat_template") is not False


def _response(url: str, api_key: str | None, body: object = None) -> Any:
    """Send a GET, or a POST if there is a body, and return the decoded response."""
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    data = None if body is None else json.dumps(body).encode()
    timeout_s = _TIMEOUT_S if data is None else _LOADS_WITHIN_S
    with urlopen(Request(url, data, headers), timeout=timeout_s) as response:
        return json.load(response)
