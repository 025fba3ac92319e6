"""A store that cannot be opened raises one typed error at once, with every library."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

import kvio
from kvio import MiB
from tests.s3.failing import BUCKET, PATIENT, SMALL, honoured, registered
from tests.s3.faulty import FaultyServer
from tests.s3.libraries import LIBRARIES, open_s3
from tests.s3.rawsig import RawS3
from tests.s3.servers import Endpoint

#: Enough for what answers at all, and the end of what does not.
LIMITS: Final = {
    "connect_timeout_s": 5.0,
    "read_timeout_s": 2.0,
    "request_timeout_s": 4.0,
    "retries": 0,
}
_NOTHING: Final[Mapping[str, Any]] = {}


def refused(
    library: str, endpoint: Endpoint, bucket: str, options: Mapping[str, Any] = _NOTHING
) -> kvio.KvioError:
    """Return the error of opening a store."""
    registered(library)
    with pytest.raises(kvio.KvioError) as caught:
        open_s3(library, endpoint, bucket, options={**honoured(library, LIMITS), **options})
    return caught.value


#: By the word in the bucket's name.
BUCKETS: Final[Mapping[str, type[kvio.KvioError]]] = {
    "no-bucket": kvio.ConfigError,
    "redirect": kvio.ConfigError,
    "e403": kvio.AccessDeniedError,
    "badsig": kvio.AccessDeniedError,
    "expired": kvio.AccessDeniedError,
    "e500": kvio.TransientStorageError,
    "e503": kvio.TransientStorageError,
    "reset": kvio.TransientStorageError,
    "hang": kvio.StorageTimeoutError,
}


@pytest.mark.parametrize("word", BUCKETS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_bucket_that_fails_is_noticed_when_it_is_opened(
    library: str, word: str, faulty: FaultyServer
) -> None:
    """Opening makes a request for the bucket, and its failure is the error of its kind."""
    limits = {} if word == "hang" else honoured(library, PATIENT)
    error = refused(library, faulty.endpoint, f"bucket-{word}", limits)

    assert type(error) is BUCKETS[word]
    assert f"bucket-{word}" in str(error)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_missing_bucket_is_no_configuration(library: str, s3_endpoint: Endpoint) -> None:
    """A real server's error for a missing bucket is a ConfigError that names it."""
    error = refused(library, s3_endpoint, "kvio-no-such-bucket")

    assert type(error) is kvio.ConfigError
    assert "kvio-no-such-bucket" in str(error)


@pytest.mark.s3_property("signature")
@pytest.mark.parametrize("wrong", ["secret_key", "access_key"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_wrong_credentials_are_denied(
    library: str, wrong: str, s3_endpoint: Endpoint, s3_bucket: str
) -> None:
    """A signature with a wrong key is an AccessDeniedError that does not contain the key."""
    canary = "canary0canary0canary"
    error = refused(library, s3_endpoint, s3_bucket, {wrong: canary})

    assert type(error) is kvio.AccessDeniedError
    assert canary not in str(error)


@pytest.mark.parametrize(
    "url", ["https://no-such-host.invalid:1", "http://127.0.0.1:1"], ids=["dns", "refused"]
)
@pytest.mark.parametrize("library", LIBRARIES)
def test_an_unreachable_server_is_a_transient_error(
    library: str, url: str, faulty: FaultyServer
) -> None:
    """An unknown host name and a closed port are transient errors."""
    error = refused(library, replace(faulty.endpoint, url=url), BUCKET)

    kinds: list[type[kvio.KvioError]] = [kvio.TransientStorageError]
    if "no-such-host" in url:  # a resolver may take longer than the limits
        kinds.append(kvio.StorageTimeoutError)
    assert type(error) in kinds
    assert f"bucket {BUCKET!r}" in str(error)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_server_with_a_trusted_certificate_is_used(
    library: str, tls_endpoint: Endpoint, tls_bucket: str
) -> None:
    """An https server whose authority is in ca_file is used."""
    registered(library)
    options = {**honoured(library, PATIENT), "ca_file": str(tls_endpoint.ca_file)}
    with open_s3(library, tls_endpoint, tls_bucket, options=options) as store:
        store.write_block("key", SMALL)

        assert store.read_block("key") == SMALL


@pytest.mark.parametrize("trusts", ["foreign", "system"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_server_with_an_untrusted_certificate_is_refused(
    library: str, trusts: str, tls_endpoint: Endpoint, tls_bucket: str, foreign_ca: Path
) -> None:
    """A certificate of another authority is an error before any request is sent."""
    options = {"ca_file": str(foreign_ca)} if trusts == "foreign" else {}
    error = refused(library, tls_endpoint, tls_bucket, options)

    assert type(error) is kvio.ConfigError
    assert "TLS" in str(error)


@pytest.mark.parametrize("library", LIBRARIES)
def test_https_to_a_server_of_http_is_refused(library: str, s3_endpoint: Endpoint) -> None:
    """A server without TLS is an error."""
    plain = replace(s3_endpoint, url=s3_endpoint.url.replace("http:", "https:"))
    error = refused(library, plain, BUCKET)

    assert type(error) is kvio.ConfigError
    assert "TLS" in str(error)


@pytest.mark.parametrize("library", LIBRARIES)
def test_http_to_a_server_of_https_is_refused(
    library: str, tls_endpoint: Endpoint, tls_bucket: str
) -> None:
    """The server sends 400 or closes the connection; no library can report more."""
    plain = replace(tls_endpoint, url=tls_endpoint.url.replace("https:", "http:"))
    error = refused(library, plain, tls_bucket)

    assert type(error) in (kvio.ConfigError, kvio.TransientStorageError)


@pytest.mark.parametrize("library", LIBRARIES)
def test_missing_credentials_are_reported(
    library: str, faulty: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without credentials in options, environment and home, no request is made."""
    registered(library)
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    # Whatever goes beyond loopback all the same meets a closed port.
    for proxy in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(proxy, "http://127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    with pytest.raises(kvio.AccessDeniedError) as caught:
        kvio.open_store(f"{library}://{BUCKET}", options={"endpoint_url": faulty.url})

    assert "credentials" in str(caught.value)
    assert faulty.requests == []


@pytest.mark.parametrize("library", LIBRARIES)
def test_credentials_of_the_environment_are_used(
    library: str, s3_endpoint: Endpoint, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without credentials in the options, the library's provider chain finds them."""
    registered(library)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_endpoint.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_endpoint.secret_key)
    monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
    options = {"endpoint_url": s3_endpoint.url, "region": s3_endpoint.region}
    with kvio.open_store(f"{library}://{s3_bucket}/p", options=options) as store:
        store.write_block("key", SMALL)

        assert store.read_block("key") == SMALL


@pytest.mark.parametrize("library", LIBRARIES)
def test_options_take_precedence_over_the_environment(
    library: str, s3_endpoint: Endpoint, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No endpoint, token or setting of the environment is mixed with those of the options."""
    registered(library)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "stranger")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "stranger")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "stranger")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    with open_s3(library, s3_endpoint, s3_bucket) as store:
        store.write_block("key", SMALL)

        assert store.read_block("key") == SMALL


#: Options that cannot be, with what the error must name.
IMPOSSIBLE: Final[Mapping[str, tuple[Mapping[str, Any], str]]] = {
    "part": ({"part_bytes": 5 * MiB - 1}, "part_bytes"),
    "no scheme": ({"endpoint_url": "127.0.0.1:9000"}, "endpoint_url"),
    "no host": ({"endpoint_url": "http://"}, "endpoint_url"),
    "port": ({"endpoint_url": "http://127.0.0.1:99999"}, "port"),
    "path": ({"endpoint_url": "http://127.0.0.1:9000/s3"}, "endpoint_url"),
    "user": ({"endpoint_url": "http://canary:canary@127.0.0.1"}, "credentials"),
    "ca over http": ({"endpoint_url": "http://127.0.0.1", "ca_file": __file__}, "ca_file"),
    "verify over http": ({"endpoint_url": "http://127.0.0.1", "tls_verify": False}, "tls_verify"),
    "unsigned": (
        {"endpoint_url": "http://192.0.2.1", "payload_signing": "unsigned"},
        "payload_signing",
    ),
    "no ca": ({"endpoint_url": "https://127.0.0.1", "ca_file": "/no/such.pem"}, "ca_file"),
    "half": ({"secret_key": None}, "secret_key"),
    "retries": ({"retries": -1}, "retries"),
    "timeout": ({"read_timeout_s": 0}, "read_timeout_s"),
    "unknown": ({"endpont_url": "http://127.0.0.1"}, "endpoint_url"),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
@pytest.mark.parametrize("library", LIBRARIES)
def test_invalid_options_are_refused_before_any_request(
    library: str, case: str, faulty: FaultyServer
) -> None:
    """A wrong option is a ConfigError that names it, before any request."""
    options, named = IMPOSSIBLE[case]
    error = refused(library, faulty.endpoint, BUCKET, options)

    assert type(error) is kvio.ConfigError
    assert named in str(error)
    assert "canary" not in str(error)
    assert faulty.requests == []


@pytest.mark.parametrize(
    "url", ["{}://canary:canary@bucket/x", "{}://bucket/x?secret_key=canary&access_key=canary"]
)
@pytest.mark.parametrize("library", LIBRARIES)
def test_credentials_in_a_url_are_refused(library: str, url: str) -> None:
    """URLs are logged and pickled, so credentials in them are refused and not repeated."""
    registered(library)
    with pytest.raises(kvio.ConfigError) as caught:
        kvio.open_store(url.format(library))

    assert "canary" not in str(caught.value)


@pytest.mark.parametrize("layout", ["block", "plain"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_names_of_the_maximum_length_are_accepted(
    library: str, layout: Any, faulty: FaultyServer
) -> None:
    """The longest prefix and the longest key make a name of 1024 bytes, and one more is refused."""
    registered(library)
    prefix = "/".join(["a" * 136] * 6) + "zz"
    key = "k" * 200
    with open_s3(library, faulty.endpoint, BUCKET, prefix=prefix, layout=layout) as store:
        store.write_block(key, SMALL, if_exists="replace")

        assert store.read_block(key) == SMALL
        assert list(store.list_keys()) == [key]
        assert faulty.count(f"{prefix}/{key}", "PutObject") + faulty.count(
            f"{prefix}/{key}", "CompleteMultipartUpload"
        )
        assert len(f"{prefix}/{key}") == 1024
        with pytest.raises(kvio.InvalidKeyError):
            store.write_block(f"{key}k", SMALL)
        assert store.delete_block(key)
    error = refused_prefix(library, faulty, f"{prefix}z")
    assert "prefix" in str(error)


def refused_prefix(library: str, faulty: FaultyServer, prefix: str) -> kvio.KvioError:
    """Return the error of opening a store with a prefix."""
    with pytest.raises(kvio.ConfigError) as caught:
        open_s3(library, faulty.endpoint, BUCKET, prefix=prefix)
    return caught.value


def test_a_server_of_tests_refuses_what_is_not_signed_by_its_key(raw_s3: RawS3) -> None:
    """The fixture's server is one at which credentials can be wrong, or is known as a mock."""
    stranger = RawS3(replace(raw_s3.endpoint, secret_key="stranger"))

    assert raw_s3.endpoint.is_mock or stranger.request("GET", "/").status == 403
