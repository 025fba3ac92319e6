"""What comes of every verb, found out in a process of its own and printed as JSON.

For a library that knows one server in a process: ``python -m tests.s3.alone LIBRARY brisk WORD…``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import kvio
from tests.s3.failing import (
    BRISK,
    BUCKET,
    LARGE,
    PATIENT,
    READING,
    SMALL,
    VERBS,
    HealingServer,
    asked_too_often,
    attempt,
    attempt_all,
    described,
    key_of,
    look,
    open_faulty,
    prepare,
    retries_made,
    stored,
)
from tests.s3.faulty import FaultyServer
from tests.s3.test_failures_of_writes import STEPS


def outcomes(library: str, options: Mapping[str, Any], *words: str) -> Mapping[str, Any]:
    """Return the outcomes by word and verb, and what was requested again, by kvio or not."""
    with FaultyServer() as server:
        store = open_faulty(library, server, options)
        found = {}
        for word in words:
            verbs = [verb for verb in VERBS if (word, verb) != ("slowdrip", "list")]
            prepare(server, word, verbs)
            found[word] = attempt_all(store, word, verbs)
            server.release()
        store.close(timeout=20)
        again = asked_too_often(server, library, "")
    return {"outcomes": found, "retries": retries_made(store), "again": again}


def uploads(library: str, *words: str) -> Mapping[str, Any]:
    """Return the outcomes of uploads of which one step fails, and what they left."""
    reported: dict[str, str] = {}
    with FaultyServer() as server, open_faulty(library, server) as store:
        for word in words:
            try:
                store.write_block(f"{word}/block", LARGE, if_exists="replace")
                reported[word] = "good"
            except kvio.KvioError as error:
                reported[word] = described(error)
        left = [word for word in words if look(server, f"{word}/block") is not None]
        return {"outcomes": reported, "left": left, "unfinished": server.uploads(BUCKET)}


def healing(library: str, *words: str) -> Mapping[str, Any]:
    """Return which verbs succeeded after each failure had passed, and how often kvio retried."""
    reported: dict[str, dict[str, tuple[str, int]]] = {}
    broken = []
    with HealingServer(library) as server, open_faulty(library, server, {"retries": 2}) as store:
        for word in words:
            # A batch of deletes has no key by which it could heal.
            verbs = ["write in parts"] if word in STEPS else ["write", *READING, "list"]
            prepare(server, word)
            reported[word] = {}
            for verb in verbs:
                before = retries_made(store)
                outcome = attempt(store, word, verb)
                reported[word][verb] = outcome, retries_made(store) - before
                data = LARGE if word in STEPS or verb == "read in parallel" else SMALL
                if look(server, key_of(word, verb)) != stored(key_of(word, verb), data):
                    broken.append((word, verb))
        return {"outcomes": reported, "broken": broken, "unfinished": server.uploads(BUCKET)}


def main(library: str, what: str, *words: str) -> None:
    """Print what was found out."""
    match what:
        case "brisk" | "patient":
            reported = outcomes(library, BRISK if what == "brisk" else PATIENT, *words)
        case "uploads":
            reported = uploads(library, *words)
        case _:
            reported = healing(library, *words)
    print(json.dumps(reported))


if __name__ == "__main__":
    main(*sys.argv[1:])
