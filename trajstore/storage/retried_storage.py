"""What all places reached by requests share: one retry policy, and errors that show no credentials."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from trajstore.credentials import secrets_of, without_credentials
from trajstore.errors import MissingExtraError, StorageError
from trajstore.storage.interface import Data, Place, Storage, check_key, storage_error
from trajstore.storage.request_options import ServiceOptions
from trajstore.storage.retry import Fault, GaveUp, Retries, fault_of, ignores_ranges

T = TypeVar("T")
_log = logging.getLogger(__name__)


class RetriedStorage(Storage):
    """Base class of storages that make requests.

    Args:
        url: Where the objects are.
        options: The client's options.
        service: How requests are made.
    """

    def __init__(self, url: str, options: dict[str, Any], service: ServiceOptions) -> None:
        super().__init__()
        self._url = url
        self._options = options
        self._service = service
        self.display = without_credentials(url)
        self._secrets = tuple(secrets_of(url, options))
        self._retries = Retries(service.retries)

    def add_secrets(self, secrets: Iterable[str]) -> None:
        """Further texts that are never shown."""
        self._secrets += tuple(secrets)

    def stats(self) -> dict[str, Any]:
        """What makes the requests, and why that is not obstore; nothing in memory."""
        return {"transport": self.transport, "transport_reason": self.transport_reason} if self.is_remote else {}

    def renew(self) -> bool:
        """Get new credentials; returns whether that may help."""
        return False

    def retried(self, action: str, key: str, request: Callable[[float], T]) -> T:
        """Make a request within the retry policy; failures become errors of this library.

        Args:
            action: What it does, in a word.
            key: Which object, or prefix.
            request: Called with a timeout in seconds.
        """
        check_key(key)
        story = ""
        try:
            return self._retries.call(
                request, _fault_of, self.renew, lambda error: self._log_retry(action, key, error)
            )
        except (FileExistsError, StorageError, MissingExtraError):
            raise
        except GaveUp as given_up:
            error, story = given_up.error, f"{given_up.story}: "
        except Exception as caught:
            if isinstance(caught, FileNotFoundError) and action in ("read", "copy"):
                raise FileNotFoundError(f"{self.display}/{key}") from None
            error, story = caught, self._advice(caught)
        # Outside the handlers: the original error may quote credentials, also as the context of ours.
        raise storage_error(action, f"{self.display}/{key}", error, self._secrets, story)

    def tried(self, request: Callable[[float], T]) -> T | None:
        """Make a request once; None if it fails. What asks again, with `retried`, counts this try.

        Args:
            request: Called with a timeout in seconds.
        """
        try:
            return self._retries.once(request, _fault_of)
        except Exception:  # comes again, if it is more than bad luck
            return None

    def completed(self, places: Sequence[Place], found: Sequence[Any] | None) -> list[Data]:
        """The bytes of places, of which some, or all, were tried to read at once.

        What failed is read again, one by one: each with all the tries that the policy allows, and a proper error.

        Args:
            places: Objects and the bytes of them.
            found: For each its bytes, or anything else; None if nothing was read.
        """
        read = list(found or [None] * len(places))
        failed = [i for i, data in enumerate(read) if not _is_part(data, places[i])]
        for i, data in zip(failed, self.map(self._get_place, [places[i] for i in failed]), strict=True):
            read[i] = data
        return read

    def _advice(self, error: Exception) -> str:
        if _fault_of(error) is Fault.EXPIRED:
            return "the credentials have expired or are not accepted; pass new ones in storage_options: "
        if ignores_ranges(error):
            return "the server does not answer requests for ranges as HTTP defines; use another one: "
        return ""

    def _log_retry(self, action: str, key: str, error: Exception) -> None:
        _log.warning("%s %s/%s failed, will be retried: %s", action, self.display, key, type(error).__name__)


def _is_part(data: Any, place: Place) -> bool:
    """Whether a client's answer is the bytes of a place; it may be an error, or the whole object."""
    _, start, stop = place
    return isinstance(data, Data) and (stop is None or len(data) <= stop - start)


def _fault_of(error: Exception) -> Fault:
    if isinstance(error, (StorageError, MissingExtraError)):
        return Fault.FINAL
    return fault_of(error)
