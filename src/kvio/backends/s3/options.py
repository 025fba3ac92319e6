"""Define the options of the S3 backends, the same for every library."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final, Literal
from urllib.parse import urlsplit

from kvio.backends.s3 import profiles
from kvio.errors import ConfigError
from kvio.types import (
    MAX_KEY_CHARACTERS,
    Durability,
    GiB,
    Layout,
    MiB,
    Verify,
    check_namespace,
    is_key,
)
from kvio.url import Secret, StoreURL, typed_options

#: Limits of S3.
MIN_PART_BYTES: Final = 5 * MiB
MAX_PART_BYTES: Final = 5 * GiB
MAX_PARTS: Final = 10_000
MAX_NAME_BYTES: Final = 1024
#: Parts of one block that are sent at once; minio and s3dlio hold a copy of each.
PARTS_AT_ONCE: Final = 16

_STORAGE_CLASS = re.compile(r"[A-Z][A-Z0-9_-]{0,63}").fullmatch
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]").fullmatch


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Options:
    """Options of an S3 store.

    Attributes:
        bucket, prefix: where the blocks are; keys lie below ``prefix/``.
        endpoint_url: the server, ``https://host:port``; None: AWS.
        region: the region that requests are signed for.
        access_key, secret_key, session_token: credentials; None: the library's provider chain.
        addressing: the bucket in the ``path`` or in the host name (``virtual``); ``auto``: path
            if an endpoint is given.
        tls_verify: verify the server's certificate.
        ca_file: trust these certificates instead of the system's.
        part_bytes: larger blocks are written in parts and read in ranges of this size.
        connections: connections kept open for the next requests; use at least the number of
            threads.
        connect_timeout_s: timeout for connecting.
        read_timeout_s: timeout for the next bytes of a response, or of a body being sent.
        request_timeout_s: timeout for one whole request; ``inf``: none.
        retries: how often a request is retried after transient errors.
        retry_s: seconds for which it is retried beyond that while the server cannot be reached,
            is overloaded or breaks connections, as it does when it restarts; not while a store is
            opened, nor with ``retries=0``.
        checksum: ``crc32c`` in every trailer, and sent with the body if the library can.
        payload_signing: ``signed`` (SHA-256 of the body), ``unsigned``, or ``auto``: unsigned over
            TLS.
        conditional: ``probe`` the server's support of If-None-Match before using it, ``trust``
            the server, or never use the header (``off``).
        sse, sse_kms_key_id: encryption by the server: ``AES256``, or ``aws:kms`` with this key;
            None: as the bucket says.
        storage_class: of new objects, as ``STANDARD_IA``; None: as the bucket says.
        durability, layout, verify: as for every store.
        namespace: stored in every trailer; blocks of another namespace are refused.
    """

    bucket: str
    prefix: str = ""
    endpoint_url: str | None = None
    region: str = "us-east-1"
    access_key: Secret | None = None
    secret_key: Secret | None = None
    session_token: Secret | None = None
    addressing: Literal["auto", "path", "virtual"] = "auto"
    tls_verify: bool = True
    ca_file: str | None = None
    part_bytes: int = 8 * MiB
    connections: int = 64
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 30.0
    request_timeout_s: float = 300.0
    retries: int = 3
    retry_s: float = 10.0
    checksum: Literal["crc32c", "none"] = "crc32c"
    payload_signing: Literal["auto", "signed", "unsigned"] = "auto"
    conditional: Literal["probe", "trust", "off"] = "probe"
    sse: Literal["AES256", "aws:kms"] | None = None
    sse_kms_key_id: str | None = None
    storage_class: str | None = None
    durability: Durability = "visible"
    layout: Layout = "block"
    verify: Verify = "full"
    namespace: str = ""

    def __post_init__(self) -> None:
        _check_names(self)
        _check_endpoint(self)
        _check_numbers(self)

    @property
    def tls(self) -> bool:
        """Return whether connections use TLS."""
        return self.endpoint_url is None or self.endpoint_url.startswith("https:")

    @property
    def host(self) -> str | None:
        """Return ``host:port`` of the endpoint, or None for AWS."""
        return urlsplit(self.endpoint_url).netloc if self.endpoint_url else None

    @property
    def path_style(self) -> bool:
        """Return whether URLs have the bucket in the path."""
        if self.addressing == "auto":
            return self.endpoint_url is not None
        return self.addressing == "path"

    @property
    def signs_payload(self) -> bool:
        """Return whether signatures include a SHA-256 of the body."""
        return self.payload_signing == "signed" or (self.payload_signing == "auto" and not self.tls)

    def named(self, names: Mapping[str, str]) -> dict[str, str]:
        """Return the options that have a value, by a library's own names for them."""
        found = {own: getattr(self, option) for option, own in names.items()}
        return {own: value for own, value in found.items() if value is not None}

    @property
    def name_prefix(self) -> str:
        """Return the part of an object's name before the key."""
        return f"{self.prefix}/" if self.prefix else ""


def options_from_url(url: StoreURL, environ: Mapping[str, str] = os.environ) -> S3Options:
    """Parse ``scheme://bucket/prefix?option=value``.

    A missing endpoint or region is taken from AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, AWS_REGION
    and AWS_DEFAULT_REGION, and then from the AWS profile, as in every AWS tool.

    Raises:
        ConfigError: the URL or an option is invalid.
    """
    if not url.host:
        raise ConfigError(f"{url.scheme} needs a bucket: {url.scheme}://bucket/prefix")
    options = dict(url.options)
    if "bucket" in options or "prefix" in options:
        raise ConfigError(f"bucket and prefix go into the URL: {url.scheme}://bucket/prefix")
    for name, variables in _FROM_ENVIRONMENT.items():
        found = next((environ[v] for v in variables if environ.get(v)), None)
        if options.get(name) is None and found:
            options[name] = found
    if environ is os.environ and any(options.get(name) is None for name in _FROM_ENVIRONMENT):
        for name, value in _from_profile(explicit="access_key" in options).items():
            if options.get(name) is None:
                options[name] = value
    return typed_options(S3Options, {**options, "bucket": url.host, "prefix": url.path.strip("/")})


def _from_profile(*, explicit: bool) -> dict[str, str]:
    """Return what the profile says; with *explicit* credentials it does not have to be there."""
    try:
        return profiles.settings()
    except ConfigError:
        if not explicit:
            raise
    return {}


_FROM_ENVIRONMENT: Final = {
    "endpoint_url": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
}


def _check_names(options: S3Options) -> None:
    if not _BUCKET(options.bucket) or ".." in options.bucket:
        raise ConfigError(f"not a bucket name: {options.bucket!r:.80}")
    room = MAX_NAME_BYTES - MAX_KEY_CHARACTERS - 1
    segments = options.prefix.split("/") if options.prefix else []
    if len(options.prefix) > room or not all(map(is_key, segments)):
        raise ConfigError(
            f"not a prefix: {options.prefix!r:.80}: at most {room} characters, segments of "
            "[A-Za-z0-9_][A-Za-z0-9._=@+-]* joined by '/'"
        )
    check_namespace(options.namespace)
    if (options.access_key is None) != (options.secret_key is None):
        raise ConfigError("access_key and secret_key must be given together")
    if options.session_token is not None and options.secret_key is None:
        raise ConfigError("session_token needs access_key and secret_key")


def _check_endpoint(options: S3Options) -> None:
    url = options.endpoint_url
    if url is None:
        return
    if not url.startswith(("http://", "https://")):
        raise ConfigError("endpoint_url must start with http:// or https://")
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise ConfigError("endpoint_url must not hold credentials")
    shown = f"{parts.scheme}://{parts.netloc}"  # the rest may be a secret
    try:
        _ = parts.port
    except ValueError:
        raise ConfigError(f"endpoint_url has no such port: {shown!r:.80}") from None
    if not parts.hostname or parts.path.strip("/") or parts.query or parts.fragment:
        raise ConfigError(f"endpoint_url must be scheme://host:port alone: {shown!r:.80}")
    if not options.tls and (options.ca_file is not None or not options.tls_verify):
        raise ConfigError("ca_file and tls_verify need an https endpoint, but this one is http")
    in_the_clear = not options.tls and not is_loopback(parts.hostname)
    if in_the_clear and options.payload_signing == "unsigned":
        raise ConfigError(
            "payload_signing='unsigned' over plain http is allowed for loopback addresses only: "
            "the network could change the body unnoticed"
        )


def is_loopback(host: str) -> bool:
    """Return whether a host name always means this machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_numbers(options: S3Options) -> None:
    if not MIN_PART_BYTES <= options.part_bytes <= MAX_PART_BYTES:
        raise ConfigError("option 'part_bytes' must be 5 MiB to 5 GiB: S3 accepts no other parts")
    if options.connections < 1 or options.retries < 0 or not 0 <= options.retry_s < math.inf:
        raise ConfigError(
            "'connections' must be at least 1, 'retries' and 'retry_s' not negative, and 'retry_s' "
            "finite"
        )
    if options.sse_kms_key_id is not None and options.sse != "aws:kms":
        raise ConfigError("sse_kms_key_id needs sse='aws:kms'")
    if options.storage_class is not None and not _STORAGE_CLASS(options.storage_class):
        raise ConfigError(f"not a storage class: {options.storage_class!r:.80}")
    for name in ("connect_timeout_s", "read_timeout_s", "request_timeout_s"):
        if not getattr(options, name) > 0:
            raise ConfigError(f"option {name!r} must be above 0 seconds")
    if math.isinf(options.connect_timeout_s) or math.isinf(options.read_timeout_s):
        raise ConfigError("only 'request_timeout_s' may be infinite")
    if options.ca_file is not None and not os.path.isfile(options.ca_file):
        raise ConfigError(f"ca_file {options.ca_file!r:.200} is not a file")
