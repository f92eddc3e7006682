"""Who may ask: the page answers only to the token in its URL, under its own name."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

HOST = "127.0.0.1"
TOKEN_HEADER = "x-trajstore-token"  # noqa: S105 - a name, not a secret


@dataclass(frozen=True, slots=True)
class Access:
    """What a request must have to be answered.

    A token in a header or in the URL, not in a cookie: browsers send the cookies of a host to all its ports, so
    other servers of this machine would see it.

    Attributes:
        port: The port that is served.
        token: Nobody without it gets an answer.
    """

    port: int
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{HOST}:{self.port}/?token={self.token}"

    def refusal(
        self, method: str, hosts: Sequence[str], origins: Sequence[str], token: str
    ) -> tuple[int, str] | None:
        """The status and the reason with which a request is refused; None if it is answered.

        Args:
            method: Its method.
            hosts: Its Host headers. Another name in them means that the name of a foreign page was made to point
                to this machine.
            origins: Its Origin headers.
            token: Its token; empty if it has none.
        """
        if method != "GET":
            return 405, "only GET is answered"
        names = {f"{HOST}:{self.port}", f"localhost:{self.port}"}
        if len(hosts) != 1 or hosts[0] not in names:
            return 421, "this server answers only under its own address"
        if any(origin != f"http://{hosts[0]}" for origin in origins):
            return 403, "another site asked"
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            return 401, "the token is missing or wrong; open the address that the command printed"
        return None


def security_headers(page_policy: str) -> Mapping[str, str]:
    """Headers of every answer.

    Args:
        page_policy: The Content-Security-Policy.
    """
    return {
        "content-security-policy": page_policy,
        "cache-control": "no-store",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
    }
