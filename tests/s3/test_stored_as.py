"""Encryption and storage class: what the server is asked for, with one request and with parts."""

from __future__ import annotations

from typing import Any, Final

import pytest

import kvio
from tests.s3.failing import BUCKET, LARGE, PART_BYTES, SMALL, registered
from tests.s3.faults import Request, Response
from tests.s3.faulty import FaultyServer
from tests.s3.libraries import open_s3

ENCRYPTING: Final = ("s3+boto3", "s3+minio", "s3+obstore")
#: What each option is in a request.
HEADERS: Final = {
    "sse": "x-amz-server-side-encryption",
    "sse_kms_key_id": "x-amz-server-side-encryption-aws-kms-key-id",
    "storage_class": "x-amz-storage-class",
}
BEGINNING: Final = ("PutObject", "CreateMultipartUpload")


class ListeningServer(FaultyServer):
    """Keeps the headers of what begins an object."""

    def __init__(self) -> None:
        super().__init__()
        self.headers: list[dict[str, str]] = []

    def _respond(self, request: Request, fault: str) -> Response:
        if request.operation in BEGINNING:
            self.headers.append(
                {
                    option: request.headers[h]
                    for option, h in HEADERS.items()
                    if h in request.headers
                }
            )
        return super()._respond(request, fault)


@pytest.mark.parametrize(
    "wanted",
    [
        {},
        {"sse": "AES256"},
        {"sse": "aws:kms"},
        {"sse": "aws:kms", "sse_kms_key_id": "alias/mine", "storage_class": "STANDARD_IA"},
    ],
)
@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("library", ENCRYPTING)
def test_the_server_is_asked_for_it(library: str, data: bytes, wanted: dict[str, Any]) -> None:
    """Exactly what the options say, for every object."""
    registered(library)
    options = {"part_bytes": PART_BYTES, "conditional": "off", **wanted}
    with ListeningServer() as server:
        with open_s3(library, server.endpoint, BUCKET, options=options) as store:
            store.write_block("key", data, if_exists="replace")

            assert store.read_block("key") == data
        assert server.headers == [wanted]


@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "large"])
def test_torch_names_a_storage_class(data: bytes) -> None:
    """Of the two it knows this."""
    registered("s3+torch")
    options = {"part_bytes": PART_BYTES, "storage_class": "ONEZONE_IA"}
    with ListeningServer() as server:
        with open_s3("s3+torch", server.endpoint, BUCKET, options=options) as store:
            store.write_block("key", data, if_exists="replace")
        assert server.headers == [{"storage_class": "ONEZONE_IA"}]


@pytest.mark.parametrize(
    ("library", "options", "named"),
    [
        ("s3+boto3", {"sse": "rot13"}, "sse"),
        ("s3+boto3", {"sse_kms_key_id": "alias/mine"}, "sse_kms_key_id"),
        ("s3+boto3", {"sse": "AES256", "sse_kms_key_id": "alias/mine"}, "sse_kms_key_id"),
        ("s3+boto3", {"storage_class": "cold\r\nx-amz-acl: public-read"}, "storage class"),
        ("s3+torch", {"sse": "AES256"}, "sse"),
        ("s3+s3dlio", {"sse": "AES256"}, "sse"),
        ("s3+s3dlio", {"storage_class": "STANDARD_IA"}, "storage_class"),
    ],
)
def test_what_cannot_be_is_refused(
    library: str, options: dict[str, Any], named: str, faulty: FaultyServer
) -> None:
    """Before any request, and by name: data that was to be encrypted is not stored otherwise."""
    with pytest.raises(kvio.ConfigError, match=named):
        open_s3(library, faulty.endpoint, BUCKET, options=options)
    assert faulty.requests == []
