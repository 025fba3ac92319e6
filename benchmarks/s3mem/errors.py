"""What S3 answers when it refuses: a code, its HTTP status and a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

#: Code -> (HTTP status, message), as Amazon documents them.
REFUSALS: Final = {
    "AccessDenied": (403, "Access Denied"),
    "AuthorizationHeaderMalformed": (
        400,
        "The authorization header that you provided is not valid.",
    ),
    "AuthorizationQueryParametersError": (400, "The query's authorization is not valid."),
    "BadDigest": (400, "The Content-MD5 or checksum you specified did not match what we received."),
    "BucketAlreadyOwnedByYou": (409, "The bucket exists already and is yours."),
    "BucketNotEmpty": (409, "The bucket you tried to delete is not empty."),
    "EntityTooLarge": (400, "Your proposed upload exceeds the maximum allowed object size."),
    "EntityTooSmall": (400, "Your proposed upload is smaller than the minimum allowed size."),
    "IncompleteBody": (400, "The number of bytes differs from what the headers said."),
    "InvalidAccessKeyId": (403, "The access key ID you provided does not exist in our records."),
    "InvalidArgument": (400, "Invalid argument."),
    "InvalidBucketName": (400, "The specified bucket is not valid."),
    "InvalidDigest": (400, "The Content-MD5 or checksum that you specified is not valid."),
    "InvalidPart": (400, "A part is missing, or its entity tag differs from the one given."),
    "InvalidPartNumber": (416, "The requested partnumber is not satisfiable."),
    "InvalidPartOrder": (400, "The list of parts was not in ascending order."),
    "InvalidRange": (416, "The requested range is not satisfiable."),
    "InvalidRequest": (400, "Invalid request."),
    "InvalidURI": (400, "Couldn't parse the specified URI."),
    "KeyTooLongError": (400, "Your key is too long."),
    "MalformedXML": (400, "The XML that you provided was not well formed."),
    "MethodNotAllowed": (405, "The specified method is not allowed against this resource."),
    "MissingContentLength": (411, "You must provide the Content-Length HTTP header."),
    "NoSuchBucket": (404, "The specified bucket does not exist."),
    "NoSuchKey": (404, "The specified key does not exist."),
    "NoSuchUpload": (404, "The specified multipart upload does not exist."),
    "NotImplemented": (501, "A header or query you provided asks for what is not implemented."),
    "PreconditionFailed": (412, "At least one of the preconditions you specified did not hold."),
    "RequestTimeTooSkewed": (403, "The request's time and the server's time differ too much."),
    "SignatureDoesNotMatch": (403, "The signature we calculated does not match yours."),
    "XAmzContentSHA256Mismatch": (400, "The provided 'x-amz-content-sha256' is not the body's."),
}


class S3Error(Exception):
    """A request was refused.

    Args:
        code: a name out of `REFUSALS`.
        detail: a sentence instead of the usual one.
        headers: response headers beyond the usual ones, each line ending in CR LF.
        fields: elements of the document beyond the usual ones.
    """

    def __init__(
        self,
        code: str,
        detail: str = "",
        *,
        headers: str = "",
        fields: Mapping[str, str] | None = None,
    ) -> None:
        self.code = code
        self.status, usual = REFUSALS[code]
        self.detail = detail or usual
        self.headers = headers
        self.fields = fields or {}
        super().__init__(f"{code}: {self.detail}")
