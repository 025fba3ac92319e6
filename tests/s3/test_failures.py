"""Every failure between a store and its server is one typed error, with every library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import pytest

import kvio
from kvio.backends.s3.errors import AMBIGUOUS, ERRORS, RETRYABLE, ErrorKind
from tests.s3.failing import (
    BRISK,
    ONE_REQUEST,
    READING,
    REQUESTS_PER_WRITE,
    TELLS_LESS,
    VERBS,
    HealingServer,
    asked_too_often,
    attempt,
    attempt_all,
    error_of,
    key_of,
    open_faulty,
    prepare,
    requests_per_attempt,
    retries_made,
)
from tests.s3.faults import WORDS
from tests.s3.faulty import FaultyServer
from tests.s3.libraries import LIBRARIES

Outcomes = Mapping[str, ErrorKind | None]
_GOOD: Final[Outcomes] = dict.fromkeys(VERBS)
_BY_TRAILER: Final = dict.fromkeys(("read a range", "stat"))
_FETCHING: Final = (*READING, "list", "write in parts")  # the last looks at what it wrote
_SENDING: Final = ("write", "write in parts")


def _all(kind: ErrorKind) -> Outcomes:
    return dict.fromkeys(VERBS, kind)


def _some(kind: ErrorKind, *verbs: str) -> Outcomes:
    return {**_GOOD, **dict.fromkeys(verbs, kind)}


#: An answer to HEAD has no body, and only that says which 400 or 404 it is.
_HEADLESS: Final = ("delete", "read in parallel")
_CORRUPT: Final = {
    **_some(ErrorKind.CORRUPT, *READING),
    "write in parts": ErrorKind.MANGLED,  # the look at what was written
}
#: What every verb comes to, by the word that is in the key.
TABLE: Final[Mapping[str, Outcomes]] = {
    "e500": _all(ErrorKind.BUSY),
    "e503": _all(ErrorKind.BUSY),
    "e403": _all(ErrorKind.DENIED),
    "badsig": _all(ErrorKind.DENIED),
    "expired": {**_all(ErrorKind.DENIED), **dict.fromkeys(_HEADLESS, ErrorKind.OTHER)},
    "e412": _all(ErrorKind.EXISTS),
    # The end of an object that has no such range is the end of an empty one.
    "e416": {**_all(ErrorKind.RANGE), **dict.fromkeys(_BY_TRAILER, ErrorKind.CORRUPT)},
    "no-bucket": {**_all(ErrorKind.NO_BUCKET), **dict.fromkeys(_HEADLESS, ErrorKind.MISSING)},
    "redirect": _all(ErrorKind.ELSEWHERE),
    "reset": _all(ErrorKind.LOST),
    "hang": _all(ErrorKind.TIMEOUT),
    "hangbody": _some(ErrorKind.TIMEOUT, *_FETCHING),
    "stall": _some(ErrorKind.TIMEOUT, *_FETCHING),
    "slowdrip": _some(ErrorKind.TIMEOUT, *READING, "write in parts"),
    "resetmid": _some(ErrorKind.LOST, *_FETCHING),
    "trunc": _some(ErrorKind.LOST, *_FETCHING),
    "cuthead": _all(ErrorKind.LOST),
    "flip": _CORRUPT,
    "badcrc": _CORRUPT,
    "shortlen": {**_CORRUPT, "read in parallel": ErrorKind.LOST},
    "wrongrange": _some(
        ErrorKind.UNSUPPORTED, "read a range", "read in parallel", "stat", "write in parts"
    ),
    "completeerror": _some(ErrorKind.BUSY, "write in parts"),
    "lostpart": _some(ErrorKind.MANGLED, "write in parts"),
    # Of one request that is answered with a lie nothing shows it.
    "lieput": _some(ErrorKind.MANGLED, "write in parts"),
    "ignores-conditions": _GOOD,
    "deaf": _some(ErrorKind.TIMEOUT, *_SENDING),
    "resetsend": _some(ErrorKind.LOST, *_SENDING),
    "slowtake": _GOOD,
}
#: These refuse the first request alone.
PASSING_WORDS: Final = ("e500once", "e503once")
HANGING: Final = ("hang", "hangbody", "stall", "slowdrip", "deaf")


def expected(library: str, word: str, verbs: Mapping[str, object] = VERBS) -> dict[str, str]:
    """Return the expected outcome of each verb."""
    found = {verb: TELLS_LESS.get((library, word, verb), TABLE[word][verb]) for verb in verbs}
    # To delete what is not there is no failure, and gives False.
    reported = {verb: error_of(kind) for verb, kind in found.items()}
    return reported | ({"delete": "bad"} if word == "no-bucket" else {})


def test_every_error_kind_has_one_error() -> None:
    """The table of errors is complete, and only transient errors are retried."""
    assert set(ERRORS) == set(ErrorKind)
    made = {kind: make("text", "key", "s3+x") for kind, make in ERRORS.items()}
    assert all(isinstance(error, kvio.KvioError) for error in made.values())
    assert {type(made[kind]) for kind in RETRYABLE} == {kvio.TransientStorageError}
    assert RETRYABLE | {ErrorKind.TIMEOUT} >= AMBIGUOUS
    storage = [error for error in made.values() if isinstance(error, kvio.StorageError)]
    assert len({(type(error), error.errno) for error in storage}) == len(storage)
    assert all((error.key, error.backend) == ("key", "s3+x") for error in storage)


def test_every_fault_is_in_the_table() -> None:
    """Every fault of the server is tested, and every verb has an expected outcome."""
    assert {*TABLE, *PASSING_WORDS} == WORDS
    assert all(set(outcomes) == set(VERBS) for outcomes in TABLE.values())


@pytest.fixture
def patient(library: str, faulty: FaultyServer) -> Iterator[kvio.Store]:
    """Return a store without retries and with long timeouts."""
    with open_faulty(library, faulty) as store:
        yield store


@pytest.mark.parametrize("word", [word for word in TABLE if word not in HANGING])
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_fault_is_the_same_error_by_any_library(
    library: str, word: str, patient: kvio.Store, faulty: FaultyServer
) -> None:
    """Each verb has the outcome in the table, and each request is made once."""
    prepare(faulty, word)

    assert attempt_all(patient, word) == expected(library, word)

    assert asked_too_often(faulty, library, word) == []
    assert retries_made(patient) == 0


@pytest.mark.parametrize("word", HANGING)
@pytest.mark.parametrize("library", LIBRARIES)
def test_hanging_requests_time_out(library: str, word: str, faulty: FaultyServer) -> None:
    """The timeouts end every verb, and nothing is retried."""
    reported = expected(library, word)
    if word == "slowdrip":
        del reported["list"]
    hanging = [verb for verb, outcome in reported.items() if outcome != "good"]
    prepare(faulty, word)
    store = open_faulty(library, faulty, BRISK)

    found = attempt_all(store, word, hanging)

    assert asked_too_often(faulty, library, word) == []
    assert retries_made(store) == 0
    faulty.release()
    store.close()
    with open_faulty(library, faulty) as patient:
        found |= attempt_all(patient, word, reported.keys() - found.keys())
    assert found == reported


@pytest.mark.parametrize("word", PASSING_WORDS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_one_retry_recovers_from_a_transient_error(library: str, word: str) -> None:
    """One retry per request is enough, each is counted, and the library retries nothing."""
    verbs = ("write", "read", "read a range", "stat", "list")
    each = requests_per_attempt(library, word)
    retries = REQUESTS_PER_WRITE.get(library, 1)
    with (
        HealingServer(library) as server,
        open_faulty(library, server, {"retries": retries}) as store,
    ):
        prepare(server, word, verbs)
        for verb in verbs:
            before, asked = retries_made(store), len(server.requests)

            assert attempt(store, word, verb) == "good"

            failed = [
                seen
                for seen in server.requests[asked:]
                if (seen.status or 0) >= 500 and seen.operation != "AbortMultipartUpload"
            ]
            assert len(failed) == (retries_made(store) - before) * each > 0


@pytest.mark.parametrize("word", ["e500", "e503", "reset"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_lasting_error_uses_all_retries(library: str, word: str, faulty: FaultyServer) -> None:
    """With two retries there are three attempts, and then the error."""
    prepare(faulty, word, ONE_REQUEST)
    with open_faulty(library, faulty, {"retries": 2}) as store:
        for verb in ONE_REQUEST:
            before, asked = retries_made(store), len(faulty.requests)

            assert attempt(store, word, verb) == error_of(TABLE[word][verb])

            assert len(faulty.requests) - asked == 3 * requests_per_attempt(library, word)
            assert retries_made(store) - before == 2


@pytest.mark.parametrize("word", ["e403", "expired", "badsig", "redirect", "no-bucket"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_other_errors_are_not_retried(library: str, word: str, faulty: FaultyServer) -> None:
    """An error that is not transient costs one request, whatever the limit of retries."""
    prepare(faulty, word, ONE_REQUEST)
    with open_faulty(library, faulty, {"retries": 3}) as store:
        attempt_all(store, word, ONE_REQUEST)

        assert retries_made(store) == 0
        assert asked_too_often(faulty, library, word) == []


@pytest.mark.parametrize("word", ["flip", "badcrc"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_bytes_that_changed_on_the_way_are_read_again(library: str, word: str) -> None:
    """A bit that flipped once costs one more read, which is counted."""
    verbs = ("read", "read in parallel", "stat")
    with HealingServer(library) as server, open_faulty(library, server, {"retries": 1}) as store:
        prepare(server, word, verbs)
        for verb in verbs:
            before = retries_made(store)

            assert attempt(store, word, verb) == "good"

            assert retries_made(store) == before + 1


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_corrupt_block_is_read_twice(library: str, faulty: FaultyServer) -> None:
    """Wrong bytes again are what is stored: an error, however many retries there are."""
    verbs = ("read", "stat")
    prepare(faulty, "flip", verbs)
    with open_faulty(library, faulty, {"retries": 3}) as store:
        found = {verb: attempt(store, "flip", verb) for verb in verbs}

        assert found == dict.fromkeys(verbs, error_of(ErrorKind.CORRUPT))
        assert [faulty.count(f"p/{key_of('flip', verb)}", "GetObject") for verb in verbs] == [2, 2]


@pytest.mark.parametrize("word", ["resetmid", "trunc"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_truncated_body_is_read_again(library: str, word: str) -> None:
    """The second read returns the whole body; nothing of the truncated one is returned."""
    with HealingServer(library) as server, open_faulty(library, server, {"retries": 1}) as store:
        prepare(server, word, READING)
        for verb in READING:
            before = retries_made(store)

            assert attempt(store, word, verb) == "good"

            assert retries_made(store) > before
