"""What must not be shown: credentials in URLs, in options and in the messages of clients."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

_SECRET_OPTION = re.compile(r"key|secret|token|pass|credential|connection|sas|auth|cookie", re.IGNORECASE)
_PLAIN_VALUES = frozenset({"anon", "cloud", "browser", "cache", "google_default"})  # of gcsfs's option ``token``
_IN_QUERY = re.compile(
    r"(?i)\b(sig|x-amz-[a-z-]+|x-goog-[a-z-]+|awsaccesskeyid|signature|access_token)=[^&\s\"'>]+"
)
_IN_HEADER = re.compile(
    r"(?i)(\bauthorization\b[\"']?\s*[:=]\s*|\bbearer\s+|\bsharedkey\s+)[\"']?[^\s\"',}]+( [^\s\"',}]+)?"
)
_SIGNED_QUERY = re.compile(
    r"(?i)://[^\s\"]*[?&](sig|x-amz-signature|x-goog-signature|signature|access_token|token)="
)
_PASSWORD = re.compile(r"://[^/@\s\"]*:[^/@\s\"]*@")
_NEXT_LINK = re.compile(r"::(?=[a-z0-9+]+(?:::|://))")  # of a chain of URLs
_USER = re.compile(r"//([^/@]*)@")
_HIDDEN = "***"
_MIN_SECRET = 6  # characters of a value in a query: shorter ones occur by chance, and hiding them hides the message


def without_credentials(url: str) -> str:
    """The URL, or chain of URLs, as it may be shown: without users and passwords, and without queries."""
    return "::".join(_USER.sub("//", link.partition("?")[0]) for link in _NEXT_LINK.split(url))


def credential_in(text: str) -> str | None:
    """Which credential URLs in a text hold, in words that do not repeat it; None if they hold none."""
    if "://" not in text:
        return None
    if _PASSWORD.search(text):
        return "a user and a password"
    if _SIGNED_QUERY.search(text):
        return "a signature or a token"
    return None


def secrets_of(url: str, options: Mapping[str, Any]) -> Iterator[str]:
    """All texts in a URL and in storage options that may be credentials, also as they look in a URL."""
    for secret in _secrets_of(url, options):
        yield secret
        if (quoted := quote(secret, safe="")) != secret:
            yield quoted


def _secrets_of(url: str, options: Mapping[str, Any]) -> Iterator[str]:
    for link in _NEXT_LINK.split(url):
        if found := _USER.search(link):
            yield from (part for part in found.group(1).split(":") if part)
        if query := link.partition("?")[2]:
            yield query
            values = (part.partition("=")[2] for part in query.split("&"))
            yield from (value for value in values if len(value) >= _MIN_SECRET)
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _secrets_of("", value)
        elif _SECRET_OPTION.search(str(name)):
            yield from _secrets_in(str(name), value)


def _secrets_in(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, (list, tuple)):  # a user and a password
        yield from (part for part in value if isinstance(part, str) and len(part) >= _MIN_SECRET)
    elif isinstance(value, str) and value and value not in _PLAIN_VALUES:
        yield value
        if "connection" in name.lower():  # AccountName=...;AccountKey=...
            yield from (part.partition("=")[2] for part in value.split(";") if _SECRET_OPTION.search(part[:20]))


def redacted(text: str, secrets: Iterable[str]) -> str:
    """The text without these secrets, and without anything that looks like a signature or a token."""
    for secret in sorted({s for s in secrets if s}, key=len, reverse=True):
        text = text.replace(secret, _HIDDEN)
    text = _IN_QUERY.sub(lambda found: f"{found.group(1)}={_HIDDEN}", text)
    return _IN_HEADER.sub(lambda found: f"{found.group(1)}{_HIDDEN}", text)


def shows_secrets(error: BaseException | None, secrets: Iterable[str]) -> bool:
    """Whether printing an error, or any error that it came from, could show a secret."""
    known, seen, pending = tuple(secrets), set[int](), [error]
    while pending:
        one = pending.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        shown = "\n".join([str(one), repr(one), repr(one.args), *getattr(one, "__notes__", [])])
        if redacted(shown, known) != shown:
            return True
        pending += [one.__cause__, one.__context__]
    return False
