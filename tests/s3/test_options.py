"""The options of S3 stores: their sources, and errors for invalid ones."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import kvio
from kvio import ConfigError, KiB, MiB
from kvio.backends.s3.options import S3Options, is_loopback, options_from_url
from kvio.url import Secret, StoreURL, parse_url, typed_options

#: A prefix of 823 characters.
LONGEST = "/".join(["p" * 199] * 4 + ["p" * 23])


def read(text: str, environ: Mapping[str, str] | None = None, **options: Any) -> S3Options:
    """Read a URL with further options in an environment that is the test's own."""
    url = parse_url(text)
    full = StoreURL(url.scheme, url.host, url.path, {**url.options, **options})
    return options_from_url(full, environ or {})


def test_bucket_and_prefix_come_from_the_url() -> None:
    """The host is the bucket; what follows is a prefix, with or without slashes at its ends."""
    for text, prefix, names in (
        ("s3://some-bucket", "", ""),
        ("s3://some-bucket/", "", ""),
        ("s3://some-bucket/a", "a", "a/"),
        ("s3://some-bucket/a/b=1/", "a/b=1", "a/b=1/"),
    ):
        options = read(text)
        assert (options.bucket, options.prefix, options.name_prefix) == (
            "some-bucket",
            prefix,
            names,
        )


@pytest.mark.parametrize(
    "text",
    [
        "s3://",
        "s3:///prefix",
        "s3://B/x",
        "s3://ab",
        "s3://under_score",
        "s3://-bucket",
        "s3://a..bucket",
        f"s3://{'b' * 64}",
        "s3://bucket/../other",
        "s3://bucket/a//b",
        "s3://bucket/.hidden",
        "s3://bucket/sp%20ace",
        f"s3://bucket/{LONGEST}p",
        "s3://bucket?bucket=other",
        "s3://bucket?part_bytes=4MiB",
        "s3://bucket?part_bytes=6GiB",
        "s3://bucket?connections=0",
        "s3://bucket?retries=-1",
        "s3://bucket?read_timeout_s=0",
        "s3://bucket?request_timeout_s=nan",
        "s3://bucket?read_timeout_s=inf",
        "s3://bucket?connect_timeout_s=inf",
        "s3://bucket?payload_signing=maybe",
        "s3://bucket?endpoint_url=127.0.0.1:9000",
        "s3://bucket?endpoint_url=ftp://host",
        "s3://bucket?endpoint_url=http://host/path",
        "s3://bucket?endpoint_url=http://host:99999",
        "s3://bucket?endpoint_url=http://",
        "s3://bucket?endpoint_url=http://me:secret@host",
        "s3://bucket?endpoint_url=http://host&tls_verify=false",
        "s3://bucket?endpoint_url=http://host&ca_file=/etc/hosts",
        "s3://bucket?endpoint_url=http://10.1.2.3&payload_signing=unsigned",
        "s3://bucket?ca_file=/no/such/file",
        "s3://bucket?access_key=A",
        "s3://bucket?secret_key=S",
        "s3://bucket?session_token=T",
        "s3://bucket?multipart_threshold=8MiB",
    ],
)
def test_invalid_options_are_refused_before_any_request(text: str) -> None:
    """An invalid option is a `ConfigError`, and no message contains a credential."""
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert "secret@" not in str(caught.value)


def test_the_longest_prefix_leaves_room_for_the_longest_key() -> None:
    """Prefix, slash and key fit the 1,024 bytes of an object's name."""
    options = read(f"s3://bucket/{LONGEST}")

    assert len(options.name_prefix) + 200 == 1024


def test_endpoint_and_region_come_from_the_environment_of_aws_tools() -> None:
    """What is given wins, then the variable for S3, then the general one."""
    environ = {
        "AWS_ENDPOINT_URL": "http://general:1",
        "AWS_ENDPOINT_URL_S3": "http://special:2",
        "AWS_DEFAULT_REGION": "eu-central-1",
    }

    assert read("s3://bucket", environ).endpoint_url == "http://special:2"
    assert read("s3://bucket", environ).region == "eu-central-1"
    assert read("s3://bucket?endpoint_url=http://mine:3", environ).endpoint_url == "http://mine:3"
    assert read("s3://bucket?region=x", environ | {"AWS_REGION": "y"}).region == "x"
    assert read("s3://bucket", environ | {"AWS_REGION": "y"}).region == "y"
    assert read("s3://bucket").endpoint_url is None
    assert read("s3://bucket").region == "us-east-1"


def test_bodies_are_hashed_where_nothing_else_protects_them() -> None:
    """Unsigned over TLS, signed over plain http, and unsigned there for loopback if asked to."""
    for text, signed in (
        ("s3://bucket", False),
        ("s3://bucket?endpoint_url=https://host", False),
        ("s3://bucket?endpoint_url=http://host", True),
        ("s3://bucket?endpoint_url=http://127.0.0.1:1&payload_signing=unsigned", False),
        ("s3://bucket?endpoint_url=http://[::1]:1&payload_signing=unsigned", False),
        ("s3://bucket?endpoint_url=https://host&payload_signing=signed", True),
    ):
        assert read(text).signs_payload == signed, text


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("localhost.example.org", False),
        ("127.0.0.1.example.org", False),
        ("10.0.0.1", False),
        ("0.0.0.0", False),
    ],
)
def test_only_this_machine_is_loopback(host: str, expected: bool) -> None:  # noqa: FBT001
    """Names that look like loopback are not."""
    assert is_loopback(host) == expected


def test_the_default_addressing_follows_the_endpoint() -> None:
    """Requests to an endpoint have the bucket in the path, requests to AWS in the host name."""
    assert not read("s3://bucket").path_style
    assert read("s3://bucket?endpoint_url=http://host").path_style
    assert not read("s3://bucket?endpoint_url=http://host&addressing=virtual").path_style
    assert read("s3://bucket?addressing=path").path_style


def test_credentials_are_given_together_and_never_in_a_url() -> None:
    """One without the other is refused, and a URL with either is."""
    options = read("s3://bucket", access_key="A", secret_key="S", session_token="T")
    assert options.secret_key is not None
    assert options.secret_key.reveal() == "S"
    for name in ("access_key", "secret_key", "session_token"):
        alone: dict[str, Any] = {name: "x"}
        with pytest.raises(ConfigError):
            read("s3://bucket", **alone)
    with pytest.raises(ConfigError, match="must not hold credentials"):
        kvio.open_store("s3+boto3://bucket?secret_key=canary")


def test_a_secret_is_never_shown() -> None:
    """Neither repr, str, pickle nor an error contains its value."""
    secret = Secret("canary")
    url = StoreURL("s3", "bucket", "", {"secret_key": secret, "part_bytes": 5 * MiB})

    for shown in (repr(secret), str(secret), f"{secret}", repr(url), repr([secret])):
        assert "canary" not in shown
    with pytest.raises(TypeError):
        pickle.dumps(secret)
    assert url.without_secrets().options == {"part_bytes": 5 * MiB}
    assert secret == Secret("canary") != Secret("other")
    assert len({secret, Secret("canary")}) == 1
    with pytest.raises(ConfigError) as caught:
        typed_options(S3Options, {"bucket": "bucket", "secret_key": 5})
    assert "5" not in str(caught.value)


def test_a_missing_library_is_named_with_its_extra(tmp_path: Path) -> None:
    """`s3://` without any library says what to install; so does a library's own name."""
    code = (
        "import sys, kvio\n"
        "for name in ('boto3', 'minio', 'obstore', 's3dlio', 's3torchconnectorclient'):\n"
        "    sys.modules[name] = None\n"
        "for url in ('s3://bucket', 's3+boto3://bucket'):\n"
        "    try: kvio.open_store(url)\n"
        "    except kvio.MissingDependencyError as exc: print(exc)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )

    assert "pip install 'kvio[s3-obstore]'" in done.stdout
    assert "pip install 'kvio[s3-boto3]'" in done.stdout


def test_a_size_is_text_or_a_number() -> None:
    """Options from a URL are text, those given beside it are numbers."""
    assert read("s3://bucket?part_bytes=16MiB").part_bytes == 16 * MiB
    assert read("s3://bucket", part_bytes=16 * KiB * KiB).part_bytes == 16 * MiB
