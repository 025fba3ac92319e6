"""AWS Signature Version 4 as a server checks it: in the headers, in the query, in the chunks."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final
from urllib.parse import quote

from benchmarks.s3mem.errors import S3Error
from benchmarks.s3mem.wire import Request, is_number

UNSIGNED: Final = "UNSIGNED-PAYLOAD"
STREAMING_UNSIGNED: Final = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
STREAMING_SIGNED: Final = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"
STREAMING_SIGNED_TRAILER: Final = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER"
STREAMING: Final = (STREAMING_UNSIGNED, STREAMING_SIGNED, STREAMING_SIGNED_TRAILER)
EMPTY_SHA256: Final = hashlib.sha256(b"").hexdigest()

_ALGORITHM: Final = "AWS4-HMAC-SHA256"
_SKEW_S: Final = 15 * 60
_LONGEST_QUERY_S: Final = 7 * 24 * 3600
_HEX: Final = frozenset("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class Signed:
    """A request whose signature holds: what it says of its body, and the seed of its chunks."""

    payload: str
    key: bytes
    scope: str
    timestamp: str
    signature: str


@dataclass(frozen=True, slots=True)
class _Claim:
    """What a request says of its own signature."""

    access: str
    scope: str
    signed_headers: str
    signature: str
    timestamp: str
    payload: str
    query: list[tuple[str, str]]


class Verifier:
    """Checks the signatures of one account.

    Args:
        access: the access key.
        secret: the secret key.
    """

    def __init__(self, access: str, secret: str) -> None:
        self._access = access
        self._secret = secret

    def verify(self, request: Request, now: float) -> Signed:
        """Return what was signed.

        Raises:
            S3Error: the signature does not hold, or the request's time is not near *now*.
        """
        if request.argument("X-Amz-Algorithm") is not None:
            claim = _from_query(request, now)
        else:
            claim = _from_headers(request, now)
        if claim.access != self._access:
            raise S3Error("InvalidAccessKeyId")
        key = _signing_key(self._secret, claim.scope)
        expected = _signature(key, claim, request)
        if not hmac.compare_digest(expected, claim.signature.encode()):
            raise S3Error("SignatureDoesNotMatch")
        return Signed(claim.payload, key, claim.scope, claim.timestamp, claim.signature)


def chunk_signature(signed: Signed, previous: str, data: bytes | memoryview) -> str:
    """Return the signature of a chunk that follows *previous*."""
    text = (
        f"{_ALGORITHM}-PAYLOAD\n{signed.timestamp}\n{signed.scope}\n{previous}\n{EMPTY_SHA256}\n"
        f"{hashlib.sha256(data).hexdigest()}"
    )
    return hmac.digest(signed.key, text.encode(), "sha256").hex()


def trailer_signature(signed: Signed, previous: str, trailer: bytes) -> str:
    """Return the signature of a trailer, given as lines ending in LF."""
    text = (
        f"{_ALGORITHM}-TRAILER\n{signed.timestamp}\n{signed.scope}\n{previous}\n"
        f"{hashlib.sha256(trailer).hexdigest()}"
    )
    return hmac.digest(signed.key, text.encode(), "sha256").hex()


def _from_headers(request: Request, now: float) -> _Claim:
    headers = request.headers
    authorization = headers.get("authorization", "")
    if not authorization:
        raise S3Error("AccessDenied", "Anonymous requests are not served.")
    algorithm, _, rest = authorization.partition(" ")
    fields = dict(_field(field) for field in rest.split(","))
    if algorithm != _ALGORITHM or not fields.keys() >= {"Credential", "SignedHeaders", "Signature"}:
        raise S3Error("AuthorizationHeaderMalformed")
    timestamp = headers.get("x-amz-date", "")
    access, scope = _credential(fields["Credential"], timestamp, "AuthorizationHeaderMalformed")
    if abs(now - _epoch(timestamp)) > _SKEW_S:
        raise S3Error("RequestTimeTooSkewed")
    payload = headers.get("x-amz-content-sha256")
    if payload is None:
        raise S3Error("InvalidRequest", "Missing required header: x-amz-content-sha256")
    _check_payload(payload)
    _check_signed(headers, fields["SignedHeaders"])
    return _Claim(
        access, scope, fields["SignedHeaders"], fields["Signature"], timestamp, payload,
        request.query,
    )  # fmt: skip


def _from_query(request: Request, now: float) -> _Claim:
    query = dict(request.query)
    names = ("Algorithm", "Credential", "Date", "Expires", "SignedHeaders", "Signature")
    fields = {name: query.get(f"X-Amz-{name}", "") for name in names}
    if fields["Algorithm"] != _ALGORITHM or not all(fields.values()):
        raise S3Error("AuthorizationQueryParametersError")
    expires = fields["Expires"]
    if not is_number(expires) or int(expires) > _LONGEST_QUERY_S:
        raise S3Error("AuthorizationQueryParametersError", "X-Amz-Expires is out of range.")
    access, scope = _credential(
        fields["Credential"], fields["Date"], "AuthorizationQueryParametersError"
    )
    made = _epoch(fields["Date"])
    if made > now + _SKEW_S:
        raise S3Error("AccessDenied", "Request is not yet valid")
    if now > made + int(expires):
        raise S3Error("AccessDenied", "Request has expired")
    payload = request.headers.get("x-amz-content-sha256", UNSIGNED)
    _check_payload(payload)
    _check_signed(request.headers, fields["SignedHeaders"])
    unsigned = [pair for pair in request.query if pair[0] != "X-Amz-Signature"]
    return _Claim(
        access, scope, fields["SignedHeaders"], fields["Signature"], fields["Date"], payload,
        unsigned,
    )  # fmt: skip


def _field(field: str) -> tuple[str, str]:
    name, _, value = field.strip().partition("=")
    return name, value


def _credential(credential: str, timestamp: str, refusal: str) -> tuple[str, str]:
    access, _, scope = credential.partition("/")
    parts = scope.split("/")
    if len(parts) != 4 or parts[2:] != ["s3", "aws4_request"]:
        raise S3Error(refusal, "The credential's scope is not DATE/REGION/s3/aws4_request.")
    if parts[0] != timestamp[:8]:
        raise S3Error(refusal, "The credential's date is not the request's.")
    return access, scope


@lru_cache(maxsize=256)
def _epoch(timestamp: str) -> float:
    try:
        moment = datetime.strptime(timestamp, "%Y%m%dT%H%M%SZ")
    except ValueError:
        raise S3Error("AccessDenied", "x-amz-date is missing or is no ISO 8601 time.") from None
    return moment.replace(tzinfo=UTC).timestamp()


def _check_payload(payload: str) -> None:
    if payload == UNSIGNED or payload in STREAMING:
        return
    if len(payload) != 64 or not _HEX.issuperset(payload):
        raise S3Error("InvalidArgument", "x-amz-content-sha256 is no hash and no known name.")


def _check_signed(headers: Mapping[str, str], signed_headers: str) -> None:
    signed = signed_headers.split(";")
    if "host" not in signed:
        raise S3Error("SignatureDoesNotMatch", "The host header was not signed.")
    for name in headers:
        if name.startswith("x-amz-") and name not in signed:
            raise S3Error("AccessDenied", f"The header {name} was not signed.")


@lru_cache(maxsize=64)
def _signing_key(secret: str, scope: str) -> bytes:
    key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key


def _signature(key: bytes, claim: _Claim, request: Request) -> bytes:
    headers = request.headers
    lines = []
    for name in claim.signed_headers.split(";"):
        value = headers.get(name, "")
        lines.append(f"{name}:{' '.join(value.split()) if '  ' in value else value}\n")
    pairs = sorted((quote(name, safe="~"), quote(value, safe="~")) for name, value in claim.query)
    query = "&".join(f"{name}={value}" for name, value in pairs)
    canonical = (
        f"{request.method}\n{quote(request.path, safe='/~')}\n{query}\n{''.join(lines)}\n"
        f"{claim.signed_headers}\n{claim.payload}"
    )
    digest = hashlib.sha256(canonical.encode("latin-1", "replace")).hexdigest()
    text = f"{_ALGORITHM}\n{claim.timestamp}\n{claim.scope}\n{digest}"
    return hmac.digest(key, text.encode(), "sha256").hex().encode()
