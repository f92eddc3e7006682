"""Storage options of fsspec, said in obstore's words. What can't be said is never left out: fsspec is used then."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

_SERVICES = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}
# Paths that both transports spell the same way in a request.
_PLAIN_PATH = re.compile(r"[A-Za-z0-9_.=+@,: -]+(/[A-Za-z0-9_.=+@,: -]+)*")
# Options of fsspec's caches and of uploads in parts, which no request of this library depends on.
_WITHOUT_EFFECT = frozenset(
    {"use_listings_cache", "listings_expiry_time", "max_paths", "skip_instance_cache", "default_block_size"}
    | {"default_fill_cache", "default_cache_type", "cache_regions", "block_size", "blocksize", "project"}
    | {"max_concurrency", "fixed_upload_size", "default_location", "consistency", "check_connection", "access"}
)


class UnmappedError(ValueError):
    """What obstore can't be told; the message names options, and never shows their values."""


@dataclass(frozen=True)
class ObstoreClient:
    """How obstore reaches a bucket.

    Attributes:
        service: ``"s3"``, ``"gcs"`` or ``"azure"``.
        bucket: Bucket or container.
        root: Path of the storage in it, without slashes around it.
        config: obstore's configuration.
        keys: Access key, secret key and session token, for S3.
        profile: The profile that botocore finds credentials in, for S3 without keys.
        uses_botocore: Whether botocore finds the credentials.
    """

    service: str
    bucket: str
    root: str
    config: dict[str, Any] = field(repr=False)
    keys: tuple[str, str, str | None] | None = field(default=None, repr=False)
    profile: str | None = None
    uses_botocore: bool = False

    def connect(self, request_s: float, total_s: float) -> Any:
        """Obstore's store: one try a request, and timeouts that notice hung connections.

        Args:
            request_s: Seconds without progress after which a request fails.
            total_s: Seconds for a whole request.
        """
        from obstore import store  # optional, and only loaded when it is used

        config: Any = self.config
        options: dict[str, Any] = {
            "client_options": {
                "allow_http": str(self.config.get("endpoint") or self.config.get("base_url") or "http:")[:5]
                == "http:",
                "connect_timeout": timedelta(seconds=request_s),
                "read_timeout": timedelta(seconds=request_s),
                "timeout": timedelta(seconds=total_s),
                "pool_idle_timeout": timedelta(seconds=50),  # servers close idle connections after a minute or more
            },
            "retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=total_s)},
        }
        if self.service == "gcs":
            if self.config.get("skip_signature"):
                # Its puts ask for a token all the same, and would find the one of the machine.
                options["credential_provider"] = lambda: {"token": "", "expires_at": None}
            return store.GCSStore(self.bucket, config=config, **options)
        if self.service == "azure":
            return store.AzureStore(self.bucket, config=config, **options)
        if (provider := self._credential_provider()) is not None:
            options["credential_provider"] = provider
        return store.S3Store(self.bucket, config=config, **options)

    def _credential_provider(self) -> Callable[[], Any] | None:
        if self.keys is not None:
            # Not as configuration: the environment would add its own session token to it.
            access_key, secret_key, token = self.keys
            fixed = {
                "access_key_id": access_key,
                "secret_access_key": secret_key,
                "token": token,
                "expires_at": None,
            }
            return lambda: fixed
        return _botocore_credentials(self.profile) if self.uses_botocore else None


def obstore_client(url: str, options: Mapping[str, Any]) -> ObstoreClient:
    """How obstore reaches a URL with these options of fsspec. Makes no request.

    Raises:
        UnmappedError: obstore can't, or it is not certain that it would reach the same place in the same way.
    """
    protocol, _, rest = url.partition("://")
    bucket, _, path = rest.partition("/")
    root = path.rstrip("/")
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", bucket):
        raise UnmappedError("the URL holds more than a bucket and a path")
    if (root and not _PLAIN_PATH.fullmatch(root)) or {".", ".."} & set(root.split("/")):
        raise UnmappedError("the path has characters that transports may spell differently")
    left = {name: value for name, value in options.items() if name not in _WITHOUT_EFFECT and value is not None}
    service = _SERVICES[protocol]
    client = {"s3": _s3, "gcs": _gcs, "azure": _azure}[service](bucket, root, left)
    if left:
        raise UnmappedError(f"obstore has no options for {', '.join(sorted(left))}")
    return client


def _s3(bucket: str, root: str, left: dict[str, Any]) -> ObstoreClient:
    client = _take_group(left, "client_kwargs", {"endpoint_url", "region_name", "use_ssl"})
    _take_group(left, "config_kwargs", {"max_pool_connections", "retries", "connect_timeout", "read_timeout"})
    more = _take_group(left, "s3_additional_kwargs", {"ServerSideEncryption", "SSEKMSKeyId"})
    key, secret = _take(left, "key", "username"), _take(left, "secret", "password")
    token, profile = left.pop("token", None), left.pop("profile", None)
    is_anonymous, pays = bool(left.pop("anon", False)), bool(left.pop("requester_pays", False))
    endpoint = left.pop("endpoint_url", None) or client.get("endpoint_url")
    if not (left.pop("use_ssl", True) and client.get("use_ssl", True)):
        raise UnmappedError("obstore has no options for use_ssl")
    if (key is None) != (secret is None):
        raise UnmappedError("only one of key and secret is given")
    known = _botocore_config(profile)
    endpoint = endpoint or known.get("endpoint_url")
    region = client.get("region_name") or known.get("region") or ("us-east-1" if endpoint else None)
    if region is None:
        raise UnmappedError("no region is given or configured, and only s3fs finds it out")
    config: dict[str, Any] = {"region": region}
    config |= {"endpoint": endpoint} if endpoint else {}
    config |= {"skip_signature": True} if is_anonymous else {}
    config |= {"request_payer": True} if pays else {}
    if "ServerSideEncryption" in more:
        config["server_side_encryption"] = more["ServerSideEncryption"]
    if "SSEKMSKeyId" in more:
        config["sse_kms_key_id"] = more["SSEKMSKeyId"]
    keys = None if key is None or secret is None or is_anonymous else (key, secret, token)
    uses_botocore = keys is None and not is_anonymous and importlib.util.find_spec("botocore") is not None
    if profile is not None and not (uses_botocore or is_anonymous or keys):
        raise UnmappedError("botocore, which reads profiles, is not installed")
    return ObstoreClient("s3", bucket, root, config, keys, profile, uses_botocore)


def _gcs(bucket: str, root: str, left: dict[str, Any]) -> ObstoreClient:
    config: dict[str, Any] = {}
    if (endpoint := left.pop("endpoint_url", None)) is not None:
        config["base_url"] = str(endpoint).rstrip("/")
    token = left.pop("token", None)
    if token == "anon":  # noqa: S105 - gcsfs's word for no credentials
        config["skip_signature"] = True
    elif isinstance(token, Mapping) and token.get("type") == "service_account":
        config["service_account_key"] = json.dumps(dict(token))
    elif isinstance(token, str) and token.endswith(".json"):
        config["application_credentials"] = token
    elif token not in (None, "google_default"):
        raise UnmappedError("obstore has no option for this kind of token")
    return ObstoreClient("gcs", bucket, root, config)


def _azure(bucket: str, root: str, left: dict[str, Any]) -> ObstoreClient:
    names = {
        "account_name": "account_name",
        "account_key": "account_key",
        "sas_token": "sas_key",
        "client_id": "client_id",
        "client_secret": "client_secret",
        "tenant_id": "tenant_id",
    }
    config: dict[str, Any] = {theirs: left.pop(ours) for ours, theirs in names.items() if ours in left}
    if "account_host" in left:
        config["endpoint"] = f"https://{left.pop('account_host')}"
    is_anonymous = left.pop("anon", None)
    if (text := left.pop("connection_string", None)) is not None:
        config |= _connection_string(str(text))
    credentials = {"account_key", "sas_key", "client_secret"} & set(config)
    if is_anonymous and not credentials:
        config["skip_signature"] = True
    elif not credentials:
        raise UnmappedError("no credentials are given, and adlfs may find others than obstore")
    if "account_name" not in config:
        raise UnmappedError("no account_name is given")
    return ObstoreClient("azure", bucket, root, config)


def _connection_string(text: str) -> dict[str, Any]:
    parts = dict(part.partition("=")[::2] for part in text.split(";") if part)
    names = {"AccountName": "account_name", "AccountKey": "account_key", "SharedAccessSignature": "sas_key"}
    config = {theirs: parts.pop(ours) for ours, theirs in names.items() if ours in parts}
    scheme, suffix = parts.pop("DefaultEndpointsProtocol", "https"), parts.pop("EndpointSuffix", "core.windows.net")
    if "BlobEndpoint" in parts:
        config["endpoint"] = parts.pop("BlobEndpoint").rstrip("/")
    elif scheme != "https" or suffix != "core.windows.net":
        config["endpoint"] = f"{scheme}://{config.get('account_name')}.blob.{suffix}"
    for name in ("QueueEndpoint", "TableEndpoint", "FileEndpoint"):
        parts.pop(name, None)
    if parts:
        raise UnmappedError("obstore has no options for some parts of connection_string")
    return config


def _take(left: dict[str, Any], *names: str) -> Any:
    found = [left.pop(name) for name in names if name in left]
    return found[0] if found else None


def _take_group(left: dict[str, Any], name: str, known: set[str]) -> dict[str, Any]:
    """Take a group of options all of which are known."""
    group = dict(left.get(name) or {})
    if unknown := sorted(set(group) - known):
        raise UnmappedError(f"obstore has no options for {', '.join(f'{name}.{option}' for option in unknown)}")
    left.pop(name, None)
    return group


def _botocore_config(profile: str | None) -> dict[str, Any]:
    """Region and endpoint that botocore is configured with, if it is installed."""
    if importlib.util.find_spec("botocore") is None:
        return {} if profile is not None else {"region": None}
    import botocore.session

    session = botocore.session.Session(profile=profile)
    return {
        "region": session.get_config_variable("region"),
        "endpoint_url": session.get_scoped_config().get("endpoint_url"),
    }


def _botocore_credentials(profile: str | None) -> Callable[[], Any]:
    import botocore.exceptions
    import botocore.session

    found = botocore.session.Session(profile=profile).get_credentials()
    if found is None:
        raise botocore.exceptions.NoCredentialsError

    def current() -> dict[str, Any]:
        frozen = found.get_frozen_credentials()  # botocore renews them
        expiry = getattr(found, "_expiry_time", None)
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": expiry,
        }

    return current
