"""A handler raises at any moment of a call: nothing stays locked, and nothing is waited for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.signals import programs

#: Seeds of moments; each program is interrupted about a thousand times.
SEEDS = range(3)

INTERRUPTED = """
import gc, random, time

rng = random.Random({seed})
armed = False
{use}


def interrupt(*_):
    global armed
    if armed:
        armed = False
        raise Stop


def try_once(call):
    "Call once; a timer's signal comes at any moment of it, or after it."
    global armed
    after = rng.expovariate(1 / rng.choice([50e-6, 300e-6, 3e-3])) + 1e-6
    try:
        armed = True
        signal.setitimer(signal.ITIMER_REAL, after)
        call()
    except Stop:
        return 1
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
    return 0


def is_exported(one):
    "Whether it is a view that a cffi object exports: clearing it crashes CPython before 3.12.7."
    try:
        memoryview.release(one)
    except TypeError:  # no view
        return False
    except BufferError:
        return True
    return False


gc.set_debug(gc.DEBUG_SAVEALL)  # which keeps what the collector finds
signal.signal(signal.SIGALRM, interrupt)
BLOCK = bytes(4096)
ITEMS = [(f"k{{n}}", BLOCK) for n in range(300)]
interrupted = rounds = 0
while interrupted < 1000:
    rounds += 1
    with open_it() as target:
        calls = calls_of(target)
        for _ in range(rng.randrange(1, 12)):
            interrupted += try_once(rng.choice(calls))
        begun = time.monotonic()
        {then}
    assert time.monotonic() - begun < 60, "closing it waited for something"
gc.collect()
exported = sum(map(is_exported, gc.garbage))
assert not exported, f"{{exported}} exported views were left to the garbage collector"
report(rounds=rounds, interrupted=interrupted)
"""

STORE = """
def open_it():
    store = kvio.open_store(
        "posix-tmpfile", root=root, layout="plain", io_threads=rng.choice([1, 2, 3])
    )
    store.write_blocks(ITEMS)
    return store


def calls_of(store):
    outs = [(key, bytearray(4096)) for key, _ in ITEMS]
    return [
        lambda: store.write_block("k", BLOCK),
        lambda: store.write_block("k", BLOCK, timeout=200),
        lambda: store.write_blocks(ITEMS, if_exists="replace"),
        lambda: store.write_blocks(ITEMS, if_exists="replace", timeout=200),
        lambda: store.submit_write("k", BLOCK),
        lambda: store.submit_write("k", BLOCK, timeout=200).result(),
        lambda: store.read_block("k0"),
        lambda: store.read_blocks_into(outs, timeout=200),
        lambda: list(store.list_keys(timeout=200)),
        lambda: store.flush(timeout=200),
    ]
"""

FILES = """
import contextlib, itertools

sealed = os.path.join(root, "sealed")
with kvio.SharedFile.create(sealed, 1 << 20, durability="visible") as file:
    file.pwrite(bytes(1 << 20), 0)
    file.seal()
names = itertools.count()


@contextlib.contextmanager
def open_it():
    with kvio.SharedFile.open(sealed) as sealed_file:
        path = os.path.join(root, f"f{next(names)}")
        file = kvio.SharedFile.create(path, 1 << 20, durability="visible")
        try:
            yield file, sealed_file
        finally:
            file.abort()


def calls_of(files):
    places, out = itertools.count(0, 4096), bytearray(1 << 16)

    def write(call):
        with contextlib.suppress(kvio.StoreClosedError):  # after a write whose result is unknown
            call(BLOCK, next(places))

    return [
        lambda: write(files[0].pwrite),
        lambda: write(files[0].submit_pwrite),
        lambda: files[1].pread_into(out, 0),
    ]
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("what", ["store", "files"])
def test_what_was_interrupted_at_any_moment_works_and_closes(
    root: Path, what: str, seed: int
) -> None:
    """The next calls succeed, the threads end, and no exported view is left to the collector."""
    then = {
        "store": "assert target.write_blocks(ITEMS, timeout=200)[-1].ok",
        "files": "assert target[1].pread_into(bytearray(8), 0) == 8",
    }[what]
    use = {"store": STORE, "files": FILES}[what]

    facts = programs.run(INTERRUPTED.format(seed=seed, use=use, then=then), root)

    assert facts["interrupted"] >= 1000
    assert facts["rounds"] > 50
