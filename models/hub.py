"""A config.json from the Hugging Face hub: the local cache first, then the network.  Weights are never fetched."""

from __future__ import annotations

import http.client
import json
import logging
import urllib.error
import urllib.request
from email.message import Message
from pathlib import Path
from typing import Any

from ..errors import UserError, did_you_mean
from . import catalogue

TIMEOUT_S = 10.0  # for the answer to one small request; a hub that is slow or gone must not look like a hang


def fetch_config(repo_id: str) -> Path:
    """The local path of `repo_id`'s config.json.  Raises UserError: unknown name, gated, no config.json, or no network."""
    from huggingface_hub import constants, errors, hf_hub_download
    from huggingface_hub.utils._validators import validate_repo_id

    near = did_you_mean(repo_id, catalogue.names())
    try:
        validate_repo_id(repo_id)
    except errors.HFValidationError:
        raise UserError(f"model: {repo_id!r} is neither a file nor a name of a model", near) from None
    cached = _cached(repo_id, "config.json")
    if cached is not None:
        return cached
    if constants.is_offline_mode():
        raise _not_found_here(repo_id, "offline mode is on", near)
    _ask_once(repo_id, near)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        return Path(hf_hub_download(repo_id, "config.json", etag_timeout=TIMEOUT_S))
    except (OSError, errors.HfHubHTTPError) as error:  # it answered a moment ago
        raise UserError(
            f"model: fetching {repo_id}'s config.json failed: {error}", "Try again, or give a config.json"
        ) from None


def num_params(repo_id: str) -> int | None:
    """The count that a cached safetensors index states, or None.  Asks the network nothing."""
    index = _cached(repo_id, "model.safetensors.index.json")
    if index is None:
        return None
    try:
        total = json.loads(index.read_text(encoding="utf-8")).get("metadata", {}).get("total_parameters")
    except (json.JSONDecodeError, AttributeError):
        return None
    return total if isinstance(total, int) else None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:  # the token must not travel to another host
        return None


def _ask_once(repo_id: str, near: str) -> None:
    """One HEAD request that tells at once what huggingface_hub tells after half a minute of retries; returns if it is there."""
    from huggingface_hub import get_token, hf_hub_url
    from huggingface_hub.constants import ENDPOINT

    token = get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(hf_hub_url(repo_id, "config.json", endpoint=ENDPOINT), method="HEAD", headers=headers)
    try:
        urllib.request.build_opener(_NoRedirect).open(request, timeout=TIMEOUT_S).close()
    except urllib.error.HTTPError as error:
        if error.code >= 400:  # a 3xx names where the file lies
            raise _refusal(repo_id, error.code, error.headers, near) from None
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        reason = getattr(error, "reason", error)
        raise _not_found_here(repo_id, f"{ENDPOINT} cannot be reached ({reason})", near) from None


def _refusal(repo_id: str, status: int, headers: Message, near: str) -> UserError:
    code = headers.get("X-Error-Code", "")
    login = "log in with `hf auth login`"
    if code == "GatedRepo" or (status == 403 and not code):
        return UserError(f"model: {repo_id} is gated on the hub (HTTP {status}): your account needs its owner's leave",
                         f"Accept its terms on its page and {login}, or give a config.json. {near}")  # fmt: skip
    if code == "EntryNotFound":
        return UserError(f"model: {repo_id} on the hub has no config.json", "Give a factory FILE.py:FUNCTION for it")
    if status in (401, 404) or code == "RepoNotFound":
        # the hub answers 401 for a private repository and for one that does not exist, on purpose
        return UserError(f"model: {repo_id} is not in the catalogue, and the hub has no such model or keeps it private "
                         f"(HTTP {status})", near or f"Check the spelling, or {login}")  # fmt: skip
    return UserError(f"model: the hub answered HTTP {status} for {repo_id}", f"Try again later, or give a config.json. {near}")


def _not_found_here(repo_id: str, why: str, near: str) -> UserError:
    return UserError(f"model: {repo_id} is not in the catalogue, not in the hub's cache, and {why}",
                     near or "Give a folder or config.json, or see: memplan models list")  # fmt: skip


def _cached(repo_id: str, filename: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo_id, filename)
    return Path(found) if isinstance(found, str) else None
