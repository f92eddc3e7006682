"""How long failing requests are repeated: the one retry policy of all object stores."""

from __future__ import annotations

import enum
import random
import re
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from json import JSONDecodeError
from typing import Any, TypeVar

T = TypeVar("T")

_random = random.SystemRandom()  # not the generator that a program seeds


class Fault(enum.Enum):
    """What a failed request says about a repetition."""

    TEMPORARY = "may succeed if it is repeated"
    EXPIRED = "may succeed with new credentials"
    FINAL = "will fail again"


@dataclass(frozen=True)
class RetryPolicy:
    """Bounds of all repetitions.

    Attributes:
        total_s: Seconds after which a call gives up; a request that is under way then ends first. While no request
            to the place succeeds, the time counts from the first failure, also for calls that begin later.
        request_s: Seconds after which a request that makes no progress counts as failed.
        first_pause_s: Pause before the first repetition. It doubles with each further one.
        longest_pause_s: The longest pause.
    """

    total_s: float = 60.0
    request_s: float = 15.0
    first_pause_s: float = 0.1
    longest_pause_s: float = 5.0

    def pause_s(self, n_tries: int) -> float:
        """A random pause after this many tries, so that many clients do not come back at the same time."""
        longest = min(self.longest_pause_s, self.first_pause_s * 2.0 ** min(n_tries - 1, 30))
        return longest * _random.uniform(0.5, 1.0)


class GaveUp(Exception):  # noqa: N818 - says what happened; callers make an error of it
    """The policy allows no further try. The cause is the last failure."""

    def __init__(self, error: Exception, n_tries: int, seconds: float, outage_s: float) -> None:
        super().__init__(error, n_tries, seconds)
        self.error, self.n_tries, self.seconds, self.outage_s = error, n_tries, seconds, outage_s

    @property
    def story(self) -> str:
        """How long was tried, in words."""
        tries = "1 try" if self.n_tries == 1 else f"{self.n_tries} tries"
        text = f"gave up after {self.seconds:.0f} s and {tries}"
        return (
            f"{text} (nothing has succeeded for {self.outage_s:.0f} s)"
            if self.outage_s > self.seconds + 1
            else text
        )


class Retries:
    """Repeats calls to one place within one policy. Thread-safe.

    An outage is counted once: it begins with the first failure after a success, so a wave of many requests to a
    server that answers none gives up after ``total_s``, not after that for each of them. Threads may overwrite
    each other's times, which are then a moment off; a lock would not survive a fork.
    """

    def __init__(self, policy: RetryPolicy) -> None:
        self.policy = policy
        self._failing_since: float | None = None
        self._last_failure = 0.0

    def call(
        self,
        function: Callable[[float], T],
        fault_of: Callable[[Exception], Fault],
        renew: Callable[[], bool] = lambda: False,
        on_retry: Callable[[Exception], None] = lambda error: None,
    ) -> T:
        """Call ``function(timeout_s)`` until it succeeds, or fails for good.

        Args:
            function: Makes one request that may take ``timeout_s`` without progress.
            fault_of: What an error says about a repetition.
            renew: Gets new credentials, and returns whether it could; called once.
            on_retry: Hears of each error that is followed by another try.

        Raises:
            GaveUp: The last failure, if it is temporary.
            Exception: A failure that is final, as it came.
        """
        start, n_tries, may_renew = time.monotonic(), 0, True
        while True:
            n_tries += 1
            try:
                result = function(self.policy.request_s)
            except Exception as error:
                fault = fault_of(error)
                if fault is Fault.EXPIRED and may_renew and renew():
                    may_renew = False
                    on_retry(error)
                    continue
                if fault is not Fault.TEMPORARY:
                    raise
                pause_s = self._pause_s(start, n_tries, error)
                on_retry(error)
            else:
                self._failing_since = None
                return result
            time.sleep(pause_s)

    def once(self, function: Callable[[float], T], fault_of: Callable[[Exception], Fault]) -> T:
        """Call ``function(timeout_s)``; an outage that it meets has begun for later calls, too.

        Raises:
            Exception: Its failure.
        """
        start = time.monotonic()
        try:
            result = function(self.policy.request_s)
        except Exception as error:
            if fault_of(error) is Fault.TEMPORARY:
                self._note_failure(start)
            raise
        self._failing_since = None
        return result

    def _pause_s(self, start: float, n_tries: int, error: Exception) -> float:
        """Seconds until the next try.

        Raises:
            GaveUp: There is none.
        """
        now, since = self._note_failure(start)
        outage_s = now - min(since, start)
        pause_s = self.policy.pause_s(n_tries)
        left_s = self.policy.total_s - outage_s
        if left_s <= 0:
            raise GaveUp(error, n_tries, now - start, outage_s) from error
        return min(pause_s, left_s)

    def _note_failure(self, start: float) -> tuple[float, float]:
        """Note that a call failed which began at ``start``; returns the time, and since when nothing succeeds."""
        now = time.monotonic()
        since = self._failing_since
        if since is None or now - self._last_failure > self.policy.total_s:
            since = start  # failures long ago say nothing about now
        self._failing_since, self._last_failure = since, now
        return now, since


_TEMPORARY_STATUS = frozenset({408, 409, 425, 429})
_NEVER_STATUS = frozenset({501, 505})
_TEMPORARY_CODES = frozenset(
    {"RequestTimeout", "SlowDown", "Throttling", "ThrottlingException", "ServerBusy", "OperationTimedOut"}
    | {"InternalError", "ServiceUnavailable", "OperationAborted", "RequestTimeTooSkewed"}
)
_EXPIRED_CODES = frozenset(
    {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired", "InvalidToken"}
    | {"AuthenticationFailed"}  # of Azure, for a signature whose time is over
)
_PROGRAM_ERRORS = (
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    AssertionError,
    MemoryError,
    NotImplementedError,
)
_FINAL_FILE_ERRORS = (PermissionError, FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError)
_DAMAGES = (zipfile.BadZipFile, zlib.error)
# Errors of the program or of its configuration, by name: a client's own ones can't be imported here.
_FINAL_NAMES = frozenset({"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "NotSupportedError"})
_STATUS_TEXT = re.compile(r"status code: (\d{3})|status: (\d{3})\b|\bHTTP (\d{3})\b")
_CODE_TEXT = re.compile(r"<(?:Code|code)>([A-Za-z]+)</")


def fault_of(error: BaseException) -> Fault:
    """What a client's error says about a repetition, by type, HTTP status and the server's code."""
    code, status = server_answer(error)
    if code in _EXPIRED_CODES or status == 401:
        return Fault.EXPIRED
    if code in _TEMPORARY_CODES:
        return Fault.TEMPORARY
    if isinstance(error, FileNotFoundError) and _hides_a_fault(error, status):
        return Fault.TEMPORARY
    if isinstance(error, (*_FINAL_FILE_ERRORS, *_DAMAGES)):
        return Fault.FINAL
    if isinstance(error, _PROGRAM_ERRORS) and not isinstance(error, JSONDecodeError):  # that is a truncated answer
        return Fault.FINAL
    if _is_final_by_name_or_words(error):
        return Fault.FINAL
    if status is not None:
        is_temporary = status in _TEMPORARY_STATUS or (status >= 500 and status not in _NEVER_STATUS)
        return Fault.TEMPORARY if is_temporary else Fault.FINAL
    return Fault.TEMPORARY


def _is_final_by_name_or_words(error: BaseException) -> bool:
    is_forbidden = str(error).startswith("Forbidden: ")  # gcsfs
    return type(error).__name__ in _FINAL_NAMES or is_forbidden or ignores_ranges(error)


def ignores_ranges(error: BaseException) -> bool:
    """Whether a server did not answer a range as one; obstore says so in words alone."""
    return "non-partial response" in str(error)


def _hides_a_fault(error: FileNotFoundError, status: int | None) -> bool:
    """Whether a failure to find out a size was taken for a missing file, as fsspec does at web servers."""
    if status is not None:
        return status >= 500
    return error.__cause__ is not None and fault_of(error.__cause__) is Fault.TEMPORARY


def server_answer(error: BaseException) -> tuple[str | None, int | None]:
    """The server's error code and the HTTP status that an error, or what it came from, reports."""
    code: str | None = None
    status: int | None = None
    for one in _chain(error):
        found_code, found_status = _answer_of(one)
        code, status = code or found_code, status or found_status
    return code, status


def _answer_of(error: BaseException) -> tuple[str | None, int | None]:
    if type(error).__module__.startswith("aiohttp.http_exceptions"):  # a broken answer; the code is aiohttp's
        return None, None
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):  # botocore
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return response.get("Error", {}).get("Code"), status if isinstance(status, int) else None
    for holder, name in ((error, "status_code"), (error, "status"), (error, "code"), (response, "status_code")):
        value: Any = getattr(holder, name, None)  # azure-core, aiohttp, gcsfs, huggingface_hub
        if isinstance(value, int) and 100 <= value < 600:
            code = getattr(error, "error_code", None)
            return None if code is None else str(getattr(code, "value", code)), value
    text = str(error)
    found_code, found_status = _CODE_TEXT.search(text), _STATUS_TEXT.search(text)
    number = next((int(g) for g in found_status.groups() if g), None) if found_status else None
    return found_code.group(1) if found_code else None, number


def _chain(error: BaseException) -> Iterator[BaseException]:
    one: BaseException | None = error
    for _ in range(10):
        if one is None:
            return
        yield one
        one = one.__cause__
