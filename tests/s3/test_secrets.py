"""Credentials are in nothing that is shown, logged, raised or pickled.

What the libraries log themselves at DEBUG is theirs and is not looked at: botocore, for one, logs
headers with signatures. kvio's own loggers are.
"""

from __future__ import annotations

import copy
import logging
import pickle
import traceback
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import pytest

import kvio
from kvio.backends.s3.options import options_from_url
from tests.s3.failing import (
    BUCKET,
    HASTY,
    HEADED,
    PATIENT,
    SMALL,
    VERBS,
    honoured,
    key_of,
    prepare,
    registered,
)
from tests.s3.faulty import FaultyServer
from tests.s3.libraries import LIBRARIES, open_s3
from tests.s3.servers import Endpoint

ACCESS: Final = "ACCESScanary0000access"
SECRET: Final = "SECRETcanary0000secret"
TOKEN: Final = "TOKENcanary0000token"
CANARIES: Final = (ACCESS, SECRET, TOKEN)
#: One word for each family of failures that a library reports in its own way.
WORDS: Final = ("e403", "expired", "e500", "no-bucket", "redirect", "reset", "trunc", "flip")


def assert_clean(text: str, where: str) -> None:
    """Fail where a credential is in a text, without repeating it."""
    found = [canary[:6] for canary in CANARIES if canary in text]
    assert not found, f"{where} shows {found}"


def assert_error_is_clean(error: BaseException, where: str) -> None:
    """Look at all that a program would show, log or send of an error."""
    assert_clean("".join(traceback.format_exception(error)), f"the traceback of {where}")
    chain: BaseException | None = error
    while chain is not None:
        assert_clean(f"{chain} {chain!r} {chain.args!r}", where)
        chain = chain.__cause__ or chain.__context__
    if isinstance(error, kvio.KvioError):
        pickled = pickle.dumps(error)
        assert_clean(pickled.decode("latin-1"), f"the pickle of {where}")
        again = pickle.loads(pickled)
        assert (type(again), str(again)) == (type(error), str(error))


def opened(library: str, server: FaultyServer, bucket: str = BUCKET) -> kvio.Store:
    """Open a store whose credentials are canaries."""
    registered(library)
    limits = HASTY if bucket == "hang" else PATIENT
    return open_s3(
        library,
        replace(server.endpoint, access_key=ACCESS, secret_key=SECRET),
        bucket,
        prefix="p",
        options=honoured(
            library, {**limits, "retries": 0, "session_token": TOKEN, "conditional": "trust"}
        ),
    )


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Let kvio log all it has to say, and look at it when the test has ended."""
    with caplog.at_level(logging.DEBUG, logger="kvio"):
        yield
    own = [record for record in caplog.records if record.name.partition(".")[0] == "kvio"]
    for record in own:
        assert_clean(f"{record.getMessage()} {record.args!r} {record.exc_text}", "a log record")


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_store_shows_and_pickles_no_credentials(library: str, faulty: FaultyServer) -> None:
    """Neither the store, its URL, its options, its capabilities nor its pickle has any."""
    with opened(library, faulty) as store:
        store.write_block("key", SMALL)
        backend = store._backend
        shown = (store, store.url, store.url.options, store.capabilities, store.stats(), backend)
        for thing in shown:
            assert_clean(f"{thing!s} {thing!r}", type(thing).__name__)
        assert_clean(repr(options_from_url(store.url)), "the options")

        pickled = pickle.dumps(store)

        assert_clean(pickled.decode("latin-1"), "the pickle of a store")
        assert pickle.dumps(copy.copy(store.url.without_secrets()))
        with pytest.raises(TypeError):
            pickle.dumps(store.url)


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_no_error_of_a_call_has_credentials(library: str, word: str, faulty: FaultyServer) -> None:
    """Whatever verb fails however, its error and the errors it came from have none."""
    verbs = [verb for verb in VERBS if "par" not in verb]
    prepare(faulty, word, verbs)
    errors = []
    with opened(library, faulty) as store:
        for verb in verbs:
            try:
                VERBS[verb](store, key_of(word, verb))
            except kvio.KvioError as error:
                errors.append((verb, error))

    assert len(errors) >= (2 if word in HEADED else len(verbs) - 1)
    for verb, raised in errors:
        assert_error_is_clean(raised, f"{verb} after {word}")


@pytest.mark.parametrize("bucket", ["no-bucket", "e403", "expired", "hang", "reset"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_no_error_of_opening_has_credentials(
    library: str, bucket: str, faulty: FaultyServer
) -> None:
    """A store that could not be opened leaves none in what it raises."""
    registered(library)
    with pytest.raises(kvio.KvioError) as caught:
        opened(library, faulty, bucket)

    assert_error_is_clean(caught.value, f"opening {bucket}")


@pytest.mark.parametrize(
    "wrong",
    [{"access_key": 7}, {"secret_key": b"x"}, {"endpoint_url": "no"}, {"secrt_key": SECRET}],
    ids=["number", "bytes", "endpoint", "misspelt"],
)
@pytest.mark.parametrize("library", LIBRARIES)
def test_no_error_of_options_has_credentials(
    library: str, wrong: dict[str, str], faulty: FaultyServer
) -> None:
    """A wrong option is reported by its name, and no credential is reported with it."""
    registered(library)
    endpoint = replace(faulty.endpoint, access_key=ACCESS, secret_key=SECRET)
    with pytest.raises(kvio.ConfigError) as caught:
        open_s3(library, endpoint, BUCKET, options={"session_token": TOKEN, **wrong})

    assert_error_is_clean(caught.value, f"the option {next(iter(wrong))}")


@pytest.mark.s3_property("signature")
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_refused_signature_is_not_repeated(
    library: str, s3_endpoint: Endpoint, s3_bucket: str
) -> None:
    """What a real server says of a wrong key may name the key; the error of kvio has no secret."""
    registered(library)
    endpoint = replace(s3_endpoint, access_key=ACCESS, secret_key=SECRET)
    with pytest.raises(kvio.AccessDeniedError) as caught:
        open_s3(library, endpoint, s3_bucket)

    assert_error_is_clean(caught.value, "a refused signature")
