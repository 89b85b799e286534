"""Asking a server again: what is worth another try, how long to wait before it, and when to give up."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import TypeVar

# HTTPError is the base class of the hub client's HTTP library, whichever that is: network errors, timeouts, cut bodies.
from huggingface_hub.errors import HfHubHTTPError, HTTPError

T = TypeVar("T")
TRIES = 5
LONGEST_WAIT = 900.0  # seconds; a server that asks for more is left alone, and the user told so
AGAIN = (408, 425, 429, 500, 502, 503, 504)  # status codes that may pass by themselves
ABSENT = (401, 403, 404, 410, 451)  # the file is not there, or not for us

REASONS = {
    401: "401, no access: log in (`hf auth login`) or set HF_TOKEN",
    403: "403, refused: it needs a login (HF_TOKEN) and its terms accepted, or is blocked here (HF_ENDPOINT: a mirror)",
    404: "404, not there",
    429: "429, too many requests: start again later, or set HF_TOKEN for more of them",
}

sleep = time.sleep


class GaveUp(Exception):
    """A file that will not come, in words; `status` is the server's last answer, 0 where there was none."""

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(reason)
        self.status = status


class Damaged(Exception):
    """What arrived is not what was announced; worth another try."""


def words(error: Exception) -> str:
    """An error in one short line."""
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        return REASONS.get(status, f"{status}, {error.response.reason_phrase.lower() or 'an error of the server'}")
    text = " ".join(str(error).split())
    return text if isinstance(error, Damaged) else f"{type(error).__name__}{f': {text}' if text else ''}"


def told_to_wait(headers: dict[str, str]) -> float | None:
    """Seconds that an answer asks to wait, by Retry-After (seconds or a date) or the hub's RateLimit; None: unsaid."""
    after = headers.get("Retry-After", "").strip()
    if after.isdigit():
        return float(after)
    if after:
        try:
            return max(0.0, parsedate_to_datetime(after).timestamp() - time.time())
        except ValueError:
            return None
    fields = dict(field.strip().partition("=")[::2] for field in headers.get("RateLimit", "").split(";"))
    if fields.get("r") == "0" and fields.get("t", "").isdigit():  # '"api";r=0;t=55': none left, new ones in 55 s
        return float(fields["t"])
    return None


def patiently(action: Callable[[], T], say: Callable[[str], None]) -> T:
    """`action()`, up to TRIES times, with growing pauses or the one that the server asks for.

    `say` is told of a pause before it. Raises GaveUp; what is no trouble of the network (a full disk, offline mode, a
    mistake) is raised at once.
    """
    for attempt in itertools.count(1):
        status, wait = 0, 2.0**attempt
        try:
            return action()
        except HfHubHTTPError as error:
            status, reason = error.response.status_code, words(error)
            if status not in AGAIN:
                raise GaveUp(reason, status) from error
            asked = told_to_wait(error.response.headers)
            wait = wait if asked is None else asked
        except (HTTPError, Damaged) as error:
            reason = words(error)
        if attempt == TRIES:
            raise GaveUp(f"{reason} ({TRIES} tries)", status)
        if wait > LONGEST_WAIT:
            raise GaveUp(f"{reason}; the server asks to wait {wait:,.0f} s", status)
        say(f"{reason}; again in {wait:.0f} s")
        sleep(wait)
