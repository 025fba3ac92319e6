"""What each S3 server for tests is known to lack; a test says what it needs by `s3_property`."""

from __future__ import annotations

from collections.abc import Mapping

#: By server and property.
KNOWN_GAPS: Mapping[tuple[str, str], str] = {
    ("moto", "signature"): "moto is a mock: it checks no signatures",
    ("moto", "checksum"): "moto is a mock: it checks no checksums",
    ("moto", "aborted-upload"): "moto answers 500 to the end of an aborted upload",
    ("versitygw", "nested-keys"): "versitygw keeps keys as paths: n and n/x cannot both be there",
    (
        "versitygw",
        "nested-listing",
    ): "versitygw keeps keys as paths: n and n/x cannot both be there",
    ("minio", "nested-listing"): "MinIO keeps n/x beside n, but lists it only when n has gone",
    ("minio", "unclean-keys"): "MinIO refuses keys with an empty or dotted segment",
    ("versitygw", "unclean-keys"): "versitygw keeps keys as paths: x//y and a/../b are other keys",
    ("versitygw", "slash-at-end"): "versitygw takes a key ending in / as an empty directory",
    ("garage", "small-parts"): "Garage takes parts of any size",
    ("garage", "conditions"): "Garage ignores If-None-Match of a PUT",
    ("garage", "signature-code"): "Garage calls a wrong signature AccessDenied",
}


def known_gap(name: str, about: str) -> str | None:
    """Return why a server lacks a property, None if it should have it.

    Nobody knows what a given server is: it may lack what any real server lacks.
    """
    if name == "given":
        found = [KNOWN_GAPS.get((server, about)) for server in ("minio", "versitygw")]
        return found[0] or found[1]
    return KNOWN_GAPS.get((name, about))
