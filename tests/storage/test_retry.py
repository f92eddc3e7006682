"""The retry policy: what is repeated, for how long, and how that is said."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from trajstore.storage import retry
from trajstore.storage.retry import Fault, GaveUp, Retries, RetryPolicy, fault_of


class Clock:
    """Time that passes only while somebody sleeps, or when a request takes some."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        patch.setattr(retry.time, "monotonic", lambda: self.now)
        patch.setattr(retry.time, "sleep", self.pass_time)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def failing(clock: Clock, seconds: float) -> Callable[[float], None]:
    def request(timeout_s: float) -> None:
        clock.pass_time(seconds)
        raise TimeoutError("late")

    return request


@pytest.mark.parametrize("request_s", [0.0, 1.0, 15.0])
def test_a_server_that_fails_for_good_is_given_up_within_the_total_and_a_request(
    clock: Clock, request_s: float
) -> None:
    with pytest.raises(GaveUp) as caught:
        Retries(RetryPolicy()).call(failing(clock, request_s), fault_of)
    assert 60 <= clock.now - 1000 <= 60 + request_s + 1e-6
    assert caught.value.story == f"gave up after {clock.now - 1000:.0f} s and {caught.value.n_tries} tries"


def test_an_outage_counts_once_for_all_calls(clock: Clock) -> None:
    retries = Retries(RetryPolicy())
    for _ in range(5):
        with pytest.raises(GaveUp) as caught:
            retries.call(failing(clock, 0.1), fault_of)
    assert clock.now - 1000 < 62
    assert caught.value.n_tries == 1
    assert "nothing has succeeded for 6" in caught.value.story


def test_a_success_or_a_long_pause_ends_an_outage(clock: Clock) -> None:
    retries = Retries(RetryPolicy())
    for end in (lambda: retries.call(lambda timeout_s: None, fault_of), lambda: clock.pass_time(1000)):
        with pytest.raises(GaveUp):
            retries.call(failing(clock, 1), fault_of)
        end()
        with pytest.raises(GaveUp) as caught:
            retries.call(failing(clock, 1), fault_of)
        assert caught.value.n_tries > 5
        clock.pass_time(1000)


def test_an_outage_begins_with_a_single_try_that_failed(clock: Clock) -> None:
    retries = Retries(RetryPolicy())
    with pytest.raises(TimeoutError):
        retries.once(failing(clock, 15), fault_of)
    with pytest.raises(GaveUp) as caught:
        retries.call(failing(clock, 1), fault_of)
    assert 60 <= clock.now - 1000 <= 61
    assert "nothing has succeeded for 6" in caught.value.story
    assert retries.once(lambda timeout_s: timeout_s, fault_of) == 15
    with pytest.raises(GaveUp) as caught:
        retries.call(failing(clock, 1), fault_of)
    assert caught.value.n_tries > 5


def test_a_single_try_that_fails_for_good_begins_no_outage(clock: Clock) -> None:
    def missing(timeout_s: float) -> None:
        raise FileNotFoundError

    retries = Retries(RetryPolicy())
    with pytest.raises(FileNotFoundError):
        retries.once(missing, fault_of)
    clock.pass_time(59)
    with pytest.raises(GaveUp) as caught:
        retries.call(failing(clock, 1), fault_of)
    assert "nothing has succeeded" not in caught.value.story


def test_credentials_are_renewed_once(clock: Clock) -> None:
    renewed = []

    def request(timeout_s: float) -> None:
        raise ConnectionError("status: 401 Unauthorized")

    def renew() -> bool:
        renewed.append(1)
        return True

    with pytest.raises(ConnectionError):
        Retries(RetryPolicy()).call(request, fault_of, renew)
    assert len(renewed) == 1


def test_pauses_grow_and_differ() -> None:
    policy = RetryPolicy()
    pauses = [policy.pause_s(n) for n in range(1, 40)]
    assert all(0.05 <= pause <= 5 for pause in pauses)
    assert max(pauses[:2]) < min(pauses[6:])
    assert len({policy.pause_s(9) for _ in range(20)}) > 1


class Answered(Exception):  # noqa: N818
    def __init__(self, status: int, code: str = "X") -> None:
        super().__init__("answered")
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


class Coded(Exception):  # noqa: N818
    def __init__(self, status: int) -> None:
        super().__init__("coded")
        self.status_code = status


def obstore_text(status: int, code: str = "X") -> Exception:
    return OSError(f"Server returned non-2xx status code: {status} X: <Error><Code>{code}</Code></Error>")


@pytest.mark.parametrize("make", [Answered, Coded, obstore_text])
def test_faults_are_told_by_status(make: Callable[[int], Exception]) -> None:
    for status in (408, 409, 429, 500, 502, 503, 504):
        assert fault_of(make(status)) is Fault.TEMPORARY, status
    for status in (400, 403, 404, 405, 412, 416, 501):
        assert fault_of(make(status)) is Fault.FINAL, status
    assert fault_of(make(401)) is Fault.EXPIRED


@pytest.mark.parametrize("make", [Answered, obstore_text])
def test_faults_are_told_by_code(make: Callable[[int, str], Exception]) -> None:
    assert fault_of(make(400, "RequestTimeout")) is Fault.TEMPORARY
    assert fault_of(make(400, "ExpiredToken")) is Fault.EXPIRED
    assert fault_of(make(403, "AuthenticationFailed")) is Fault.EXPIRED
    assert fault_of(make(403, "AccessDenied")) is Fault.FINAL


def test_faults_are_told_by_type_and_cause() -> None:
    for final in (PermissionError(), FileNotFoundError(), TypeError(), ValueError(), OSError("Forbidden: b/k")):
        assert fault_of(final) is Fault.FINAL
    for temporary in (ConnectionResetError(), TimeoutError(), EOFError(), json.JSONDecodeError("cut", "{", 1)):
        assert fault_of(temporary) is Fault.TEMPORARY
    missing = FileNotFoundError("no size")
    for cause, fault in ((ConnectionResetError(), Fault.TEMPORARY), (KeyError("k"), Fault.FINAL)):
        missing.__cause__ = cause
        assert fault_of(missing) is fault
    caused = OSError("translated")
    caused.__cause__ = Answered(429)
    assert fault_of(caused) is Fault.TEMPORARY
