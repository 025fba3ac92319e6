"""What real S3 clients send, the in-memory server takes: three libraries, and boto3's corners."""

from __future__ import annotations

import importlib
import io
import os
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Protocol

import pytest

from .s3mem_process import ACCESS, SECRET, client_of, new_bucket, running

MiB = 1 << 20
NAMES: Final = ("a b+c", "dir/ünï", "k~(1)!*'", "p%41q", "plain")


class Library(Protocol):
    """The verbs that the libraries under test have in common."""

    def put(self, key: str, data: bytes) -> object: ...
    def put_in_parts(self, key: str, data: bytes) -> object: ...
    def get(self, key: str) -> bytes: ...
    def get_range(self, key: str, start: int, nbytes: int) -> bytes: ...
    def size(self, key: str) -> int: ...
    def names(self) -> list[str]: ...
    def delete(self, keys: list[str]) -> object: ...


def imported(name: str) -> Any:
    """Import a library, or skip and name it."""
    return pytest.importorskip(name, reason=f"{name} is not installed: it shows what it sends")


def boto3_client(url: str, **config: Any) -> Any:
    """Return a boto3 client of the server, path style."""
    boto3 = imported("boto3")
    make = importlib.import_module("botocore.config").Config
    return boto3.client(
        "s3", endpoint_url=url, aws_access_key_id=ACCESS, aws_secret_access_key=SECRET,
        region_name="us-east-1", config=make(s3={"addressing_style": "path"}, **config),
    )  # fmt: skip


class Boto3:
    def __init__(self, url: str, bucket: str) -> None:
        self._client, self._bucket = boto3_client(url), bucket

    def put(self, key: str, data: bytes) -> object:
        return self._client.put_object(Bucket=self._bucket, Key=key, Body=data)

    def put_in_parts(self, key: str, data: bytes) -> object:
        parts = importlib.import_module("boto3.s3.transfer").TransferConfig(
            multipart_threshold=5 * MiB, multipart_chunksize=5 * MiB, use_threads=False,
            preferred_transfer_client="classic",
        )  # fmt: skip
        return self._client.upload_fileobj(io.BytesIO(data), self._bucket, key, Config=parts)

    def get(self, key: str) -> bytes:
        return bytes(self._client.get_object(Bucket=self._bucket, Key=key)["Body"].read())

    def get_range(self, key: str, start: int, nbytes: int) -> bytes:
        extent = f"bytes={start}-{start + nbytes - 1}"
        answer = self._client.get_object(Bucket=self._bucket, Key=key, Range=extent)
        return bytes(answer["Body"].read())

    def size(self, key: str) -> int:
        return int(self._client.head_object(Bucket=self._bucket, Key=key)["ContentLength"])

    def names(self) -> list[str]:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, PaginationConfig={"PageSize": 2}
        )
        return [item["Key"] for page in pages for item in page.get("Contents", ())]

    def delete(self, keys: list[str]) -> object:
        objects = [{"Key": key} for key in keys]
        return self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": objects})


class Minio:
    def __init__(self, url: str, bucket: str) -> None:
        self._client = imported("minio").Minio(
            url.partition("//")[2], access_key=ACCESS, secret_key=SECRET, secure=False
        )
        self._bucket = bucket

    def put(self, key: str, data: bytes) -> object:
        return self._client.put_object(self._bucket, key, io.BytesIO(data), len(data))

    def put_in_parts(self, key: str, data: bytes) -> object:
        body = io.BytesIO(data)
        return self._client.put_object(self._bucket, key, body, len(data), part_size=5 * MiB)

    def get(self, key: str) -> bytes:
        return self.get_range(key, 0, 0)

    def get_range(self, key: str, start: int, nbytes: int) -> bytes:
        with self._client.get_object(self._bucket, key, offset=start, length=nbytes) as answer:
            return bytes(answer.read())

    def size(self, key: str) -> int:
        return int(self._client.stat_object(self._bucket, key).size)

    def names(self) -> list[str]:
        return [
            item.object_name for item in self._client.list_objects(self._bucket, recursive=True)
        ]

    def delete(self, keys: list[str]) -> object:
        named = importlib.import_module("minio.deleteobjects").DeleteObject
        return list(self._client.remove_objects(self._bucket, [named(key) for key in keys]))


class Obstore:
    def __init__(self, url: str, bucket: str) -> None:
        imported("obstore")
        self._store = importlib.import_module("obstore.store").S3Store(
            bucket, endpoint=url, access_key_id=ACCESS, secret_access_key=SECRET,
            region="us-east-1", virtual_hosted_style_request=False,
            client_options={"allow_http": True}, retry_config={"max_retries": 0},
        )  # fmt: skip

    def put(self, key: str, data: bytes) -> object:
        return self._store.put(key, data, use_multipart=False)

    def put_in_parts(self, key: str, data: bytes) -> object:
        return self._store.put(key, io.BytesIO(data), use_multipart=True, chunk_size=5 * MiB)

    def get(self, key: str) -> bytes:
        return bytes(self._store.get(key).bytes())

    def get_range(self, key: str, start: int, nbytes: int) -> bytes:
        return bytes(self._store.get_range(key, start=start, length=nbytes))

    def size(self, key: str) -> int:
        return int(self._store.head(key)["size"])

    def names(self) -> list[str]:
        return [item["path"] for page in self._store.list() for item in page]

    def delete(self, keys: list[str]) -> object:
        return self._store.delete(keys)


@pytest.fixture(scope="module", params=["md5", "cheap"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server, with either kind of entity tag."""
    with running("--etag", request.param) as (_, found):
        yield found


@pytest.fixture
def bucket(url: str) -> str:
    """A new bucket."""
    client = client_of(url)
    name = new_bucket(client)
    client.close()
    return name


@pytest.fixture(params=[Boto3, Minio, Obstore])
def library(request: pytest.FixtureRequest, url: str, bucket: str) -> Library:
    """One library's client of the bucket."""
    make: Callable[[str, str], Library] = request.param
    return make(url, bucket)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("nbytes", [0, 322_957])
def test_a_library_reads_what_it_wrote(library: Library, nbytes: int) -> None:
    """An object goes through a library and back, whole and in ranges."""
    data = os.urandom(nbytes)

    library.put("dir/key", data)

    assert library.size("dir/key") == nbytes
    assert library.get("dir/key") == data
    if nbytes:
        assert library.get_range("dir/key", 7, 1000) == data[7:1007]


@pytest.mark.filterwarnings("default")
def test_a_library_lists_and_deletes_odd_names(library: Library) -> None:
    """Names with blanks, signs and letters beyond ASCII are listed as put, and deleted at once."""
    for name in NAMES:
        library.put(name, name.encode())

    assert library.names() == sorted(NAMES, key=str.encode)
    assert [library.get(name) for name in NAMES] == [name.encode() for name in NAMES]
    library.delete(list(NAMES))
    assert library.names() == []


@pytest.mark.filterwarnings("default")
def test_a_library_writes_in_parts(library: Library) -> None:
    """A library's own multipart upload makes the object it was given."""
    data = os.urandom(11 * MiB)

    library.put_in_parts("key", data)

    assert library.get("key") == data


@pytest.mark.parametrize("algorithm", ["CRC32", "SHA1", "SHA256"])
def test_boto3_finds_its_checksum_again(url: str, bucket: str, algorithm: str) -> None:
    """boto3 verifies the checksum that it sent, of a whole read and not of a range."""
    client = boto3_client(url)
    client.put_object(Bucket=bucket, Key="key", Body=b"data" * 99, ChecksumAlgorithm=algorithm)

    answer = client.get_object(Bucket=bucket, Key="key", ChecksumMode="ENABLED")
    assert answer[f"Checksum{algorithm}"]
    assert answer["Body"].read() == b"data" * 99
    part = client.get_object(Bucket=bucket, Key="key", ChecksumMode="ENABLED", Range="bytes=0-3")
    assert part["Body"].read() == b"data"


@pytest.mark.parametrize(
    ("call", "code", "status"),
    [
        (lambda c, b: c.get_object(Bucket=b, Key="no"), "NoSuchKey", 404),
        (lambda c, b: c.head_object(Bucket=b, Key="no"), "404", 404),
        (lambda c, _: c.get_object(Bucket="no-such", Key="no"), "NoSuchBucket", 404),
        (lambda c, b: c.get_object(Bucket=b, Key="key", Range="bytes=9-"), "InvalidRange", 416),
        (
            lambda c, b: c.put_object(Bucket=b, Key="key", Body=b"x", IfNoneMatch="*"),
            "PreconditionFailed",
            412,
        ),
    ],
)
def test_boto3_reads_the_code_of_a_refusal(
    url: str, bucket: str, call: Callable[[Any, str], object], code: str, status: int
) -> None:
    """boto3 finds status and code of a refusal where S3 puts them, and goes on."""
    client = boto3_client(url)
    client.put_object(Bucket=bucket, Key="key", Body=b"x")

    with pytest.raises(importlib.import_module("botocore.exceptions").ClientError) as caught:
        call(client, bucket)
    found = caught.value.response
    assert found["Error"]["Code"] == code
    assert found["ResponseMetadata"]["HTTPStatusCode"] == status
    assert client.get_object(Bucket=bucket, Key="key")["Body"].read() == b"x"


def test_a_presigned_url_needs_no_header(url: str, bucket: str) -> None:
    """A URL that boto3 signed reads the object for whoever has it, and no other."""
    client = boto3_client(url, signature_version="s3v4")
    client.put_object(Bucket=bucket, Key="a b", Body=b"data")
    asked = {"Bucket": bucket, "Key": "a b"}
    signed = client.generate_presigned_url("get_object", Params=asked, ExpiresIn=60)

    with urllib.request.urlopen(signed) as answer:
        assert answer.read() == b"data"
    for refused in (signed.replace("a%20b", "a%20c"), signed[:-1] + "x"):
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(refused)
        assert caught.value.code == 403
        caught.value.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command is not installed: it makes the certificate")
    directory = tmp_path_factory.mktemp("tls")
    chain, key = directory / "chain.pem", directory / "key.pem"
    command = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
        "-keyout", str(key), "-out", str(chain), "-days", "2", "-subj", "/CN=127.0.0.1",
        "-addext", "subjectAltName=IP:127.0.0.1",
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    return chain, key


@pytest.mark.filterwarnings("default")
def test_a_trailer_over_tls_is_verified(certificate: tuple[Path, Path]) -> None:
    """Over https boto3 sends the checksum behind the body, in chunks within chunks: it holds."""
    chain, key = certificate
    boto3 = imported("boto3")
    data = os.urandom(3 * MiB)
    with running("--tls-cert", str(chain), "--tls-key", str(key)) as (_, url):
        client = boto3.client(
            "s3", endpoint_url=url, aws_access_key_id=ACCESS, aws_secret_access_key=SECRET,
            region_name="us-east-1", verify=str(chain),
        )  # fmt: skip
        sent: list[str] = []
        client.meta.events.register(
            "before-send.s3",
            lambda request, **_: sent.append(str(request.headers["X-Amz-Content-Sha256"])),
        )
        client.create_bucket(Bucket="bucket")
        client.put_object(Bucket="bucket", Key="key", Body=io.BytesIO(data))
        answer = client.get_object(Bucket="bucket", Key="key", ChecksumMode="ENABLED")

        assert answer["Body"].read() == data
        assert answer["ChecksumCRC32"]
        assert "STREAMING-UNSIGNED-PAYLOAD-TRAILER" in "".join(sent)
        client.close()
