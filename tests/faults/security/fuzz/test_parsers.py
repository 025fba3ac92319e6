"""Every parser takes what it reads or refuses it by its one error, and takes no time or memory."""

from __future__ import annotations

import io
import ipaddress
import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Final

import numpy as np
import pytest
import typer

from kvio import format as blocks
from kvio._native import crc32c
from kvio.backends.s3.options import options_from_url
from kvio.cli.output import parse_duration
from kvio.connectors.dlio import decoding
from kvio.connectors.dlio.settings import key_of
from kvio.errors import ConfigError, InvalidKeyError, KvioError
from kvio.filesystem.mounts import mount_of, parse_mounts
from kvio.filesystem.sysfs import parse_cpulist, parse_number
from kvio.placement.devices import _route
from kvio.sharedfile import index, plan
from kvio.sharedfile.layout import Layout
from kvio.staging.daemon import protocol
from kvio.staging.daemon.protocol import ProtocolError
from kvio.types import check_key
from kvio.url import parse_size, parse_url
from tests.faults.security.fuzz.mutation import fuzz, mutate_text
from tests.faults.sizes import seed, size
from tests.faults.totals import Tally
from tests.staging.daemon.test_fuzz import _SAMPLES as MESSAGES

#: No parser needs more memory than this for any of what is parsed here.
MOST_BYTES: Final = 64 << 20
HASH: Final = blocks.key_hash("", "key")
LAYOUTS: Final = (
    Layout(50_000, 1, 4096, 8192, 0, (50_000,)),
    Layout(10_000, 3, 4096, 8192, 0, (5000, 0, 5000)),
    Layout(100_000, 4, 512, 4096, 8192, ()),
)


def sums_anew(data: bytes, at: int) -> bytes:
    """Return data with a right checksum of its first bytes, as an attacker would write it."""
    return data[:at] + struct.pack("<I", crc32c(data[:at])) + data[at + 4 :]


def block_trailer(data: bytes) -> object:
    """Take what ends a block."""
    found = blocks.unpack_trailer(
        data[-64:], stored_nbytes=len(data) + 100, expected_key_hash=HASH, crc32c=crc32c
    )
    assert found.nbytes <= len(data) + 36
    return found


def seal_trailer(data: bytes) -> bytes:
    """Set a right checksum at a block's end."""
    return data[:-64] + sums_anew(data[-64:].ljust(64, b"\0"), 60)


def shared_index(data: bytes) -> object:
    """Take the end of a sealed file, which is as long as it says, as a reader does."""
    trailer = data[-96:]
    said = struct.unpack_from("<2xHI16xQQQIIII", trailer.ljust(96, b"\0"), 8)
    flags, _, size, _, cells, _, align, nsizes, _ = said
    start = -(-size // align) * align if align > 0 and size < 1 << 40 else size
    file_nbytes = start + 8 * nsizes + 4 * cells * (flags & 1) + 96
    nbytes = index.table_nbytes(trailer, file_nbytes)
    table = data[:-96][-nbytes:] if nbytes else b""
    found = index.unpack(table, trailer, file_nbytes)
    return index.whole_checksum(found) if found.layout.cells < 10_000 else found


def seal_index(data: bytes) -> bytes:
    """Set right checksums in an index and its trailer."""
    trailer = data[-96:].ljust(96, b"\0")
    sizes, cells = (
        struct.unpack_from("<I", trailer, 64)[0],
        struct.unpack_from("<Q", trailer, 48)[0],
    )
    flags = struct.unpack_from("<H", trailer, 10)[0]
    nbytes = min(8 * sizes + 4 * cells * (flags & 1), len(data))
    table = data[:-96][-nbytes:] if nbytes else b""
    return data[:-96] + sums_anew(
        trailer[:68] + struct.pack("<I", crc32c(table)) + trailer[72:], 92
    )


def shared_map(data: bytes) -> object:
    """Take the head of a map, which is as long as it says, as a writer does."""
    data = data.ljust(plan.WRITERS_AT, b"\0")
    plan.room_of(data)
    writers, size, cell_bytes, stripe_bytes, nsizes, align = (
        struct.unpack_from(word, data, at)[0]
        for word, at in zip(
            ("<I", "<Q", "<Q", "<Q", "<Q", "<I"), (12, 48, 56, 64, 72, 80), strict=True
        )
    )
    nbytes = 0
    with suppress(KvioError):
        at = plan.WRITERS_AT + plan.WRITER_BYTES * writers
        sizes = struct.unpack_from(f"<{nsizes}Q", data, at) if 8 * nsizes <= len(data) - at else ()
        layout = Layout(size, writers, align, cell_bytes, stripe_bytes, sizes)
        nbytes = plan.Plan(
            bytes(16), bytes(16), layout, 512, True, True, False, True, False
        ).map_nbytes
    return plan.unpack(data, nbytes)


def seal_map(data: bytes) -> bytes:
    """Set a right checksum for the head of a map and the sizes behind it."""
    data = data.ljust(plan.WRITERS_AT, b"\0")
    writers, sizes = struct.unpack_from("<I", data, 12)[0], struct.unpack_from("<Q", data, 72)[0]
    at = plan.WRITERS_AT + plan.WRITER_BYTES * writers
    crc = crc32c(data[at : at + 8 * sizes], crc32c(data[:124]))
    return data[:124] + struct.pack("<I", crc) + data[128:]


#: How what has checksums is sealed again.
SEALS: Final[dict[str, Callable[[bytes], bytes]]] = {
    "block trailer": seal_trailer,
    "index of a shared file": seal_index,
    "map of a shared file": seal_map,
}


def of_text(parse: Callable[[str], object]) -> Callable[[bytes], object]:
    """Parse text; what is no UTF-8 comes as a file system's names would."""
    return lambda data: parse(data.decode("utf-8", "surrogateescape"))


def url(text: str) -> object:
    """Take a URL to the end: of S3 its options too."""
    found = parse_url(text)
    return options_from_url(found) if found.scheme.startswith("s3") else found


def mounts(text: str) -> object:
    """Take a table of mounts and look for a path in it."""
    return mount_of(tuple(parse_mounts(text)), "/mnt/kv/store", (259, 1))


def route(text: str) -> object:
    """Take a table of routes."""
    return _route(text, ipaddress.IPv4Address("10.1.2.3"))


def messages_of_the_daemon() -> list[bytes]:
    """Return a message of each kind a client may send."""
    choose = random.Random(1)
    return [protocol.encode(make(choose)) for make in MESSAGES for _ in range(3)]


def plans() -> Iterator[bytes]:
    """Yield heads of maps."""
    for layout in LAYOUTS:
        made = plan.Plan(bytes(16), bytes(16), layout, 512, True, True, False, True, False)
        head, sizes = plan.pack(made)
        body = bytearray(made.sizes_at - len(head))
        yield head + bytes(body) + sizes + bytes(8)


def indices() -> Iterator[bytes]:
    """Yield ends of sealed files."""
    for layout in LAYOUTS:
        for sums in (None, range(layout.cells)):
            yield index.pack(index.Index(bytes(16), layout, sums))


def arrays(kind: str) -> list[bytes]:
    """Return files of numpy."""
    found = []
    for array in (np.arange(20, dtype="u1"), np.ones((3, 4)), np.zeros((0,), "<U3")):
        file = io.BytesIO()
        np.save(file, array) if kind == "npy" else np.savez(file, x=array)
        found.append(file.getvalue())
    return found


def records() -> list[bytes]:
    """Return files of TFRecord."""
    one = decoding.example({"image": b"\1\2\3" * 30, "size": 90})
    return [decoding.framed(one), decoding.framed(one) * 3, decoding.framed(b"")]


def read_records(data: bytes) -> object:
    """Take every record, and look for its image."""
    return [bytes(decoding.image_of(each)) for each in decoding.records(memoryview(data))]


MOUNTS: Final = (
    b"36 35 98:0 /mnt1 /mnt/kv rw,noatime master:1 - ext3 /dev/root rw,errors=continue\n"
    b"37 36 259:1 / /mnt\\040x rw - nfs4 server:/x rw,vers=4.2,addr=10.0.0.1\n36 35 0:5 / /\n"
)
ROUTES: Final = (
    b"Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
    b"eth0\t00000000\t0102000A\t0003\t0\t0\t100\t00000000\t0\t0\t0\n"
    b"eth1\t0000010A\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0\n"
)
URLS: Final = (
    b"hybrid:///mnt/kv?durability=durable&chunk_bytes=4MiB",
    b"s3+boto3://bucket/prefix/x?region=eu-central-1&part_bytes=8MiB&retries=3",
    b"posix-tmpfile:///a/%20b?create=true&layout=plain",
    b"memory",
)
#: Parsers: what they are given at first, what reads it, and its errors.
PARSERS: Final[dict[str, tuple[list[bytes], Callable[[bytes], object], Any]]] = {
    "block trailer": (
        [blocks.pack_trailer(blocks.Trailer(n, n, HASH), crc32c) for n in (0, 64, 100)],
        block_trailer,
        blocks.TrailerError,
    ),
    "index of a shared file": (list(indices()), shared_index, index.SealError),
    "map of a shared file": (list(plans()), shared_map, plan.PlanError),
    "message of the daemon": (messages_of_the_daemon(), protocol.decode, ProtocolError),
    "URL": (list(URLS), of_text(url), ConfigError),
    "size": ([b"4MiB", b"512", b"1.5 GiB", b"7k"], of_text(parse_size), ConfigError),
    "duration": (
        [b"30s", b"15m", b"24h", b"7d", b"90"],
        of_text(parse_duration),
        typer.BadParameter,
    ),
    "key": ([b"a/b", b"models/llama=3@x+y-z", b"k" * 200], of_text(check_key), InvalidKeyError),
    "name of DLIO": ([b"/data/train/img_1.npz", b"./a"], of_text(key_of), InvalidKeyError),
    "list of CPUs": ([b"0-3,8", b"0", b"", b"0-255"], of_text(parse_cpulist), ConfigError),
    "number of sysfs": ([b"1\n", b"-1", b"65535"], of_text(parse_number), ()),
    "mounts": ([MOUNTS], of_text(mounts), ()),
    "routes": ([ROUTES], of_text(route), ()),
    "TFRecord": (records(), read_records, ValueError),
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_takes_or_refuses(name: str, tally: Tally) -> None:
    """Mutants of valid input: each is taken, or is the parser's own error and no other."""
    samples, parse, error = PARSERS[name]
    for sample in samples:
        parse(sample)
    rounds = size(400, 30_000)
    dice = random.Random(f"{seed()} {name}")
    allowed = error if isinstance(error, tuple) else (error,)
    take = partial(fuzz, samples, parse, allowed, dice=dice, seal=SEALS.get(name))
    watched = min(rounds, 300)  # to watch memory is slow
    tracemalloc.start()
    try:
        taken = take(rounds=watched)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    taken += take(rounds=rounds - watched)

    print(f"{name}: {taken} of {rounds} are taken")
    tally.add(fuzzed=rounds)
    assert most < MOST_BYTES, f"{most} bytes at once"
    assert taken > 0
    assert taken < rounds or not allowed


@pytest.mark.parametrize("name", ["URL", "size", "duration", "key", "list of CPUs"])
def test_a_parser_of_text_takes_or_refuses(name: str, tally: Tally) -> None:
    """The same with what stumbles over text: signs, digits of other scripts, surrogates."""
    samples, _, error = PARSERS[name]
    parse: Any = {
        "URL": url,
        "size": parse_size,
        "duration": parse_duration,
        "key": check_key,
        "list of CPUs": parse_cpulist,
    }[name]
    dice = random.Random(f"{seed()} text {name}")
    rounds, taken = size(400, 30_000), 0
    for _ in range(rounds):
        text = mutate_text(dice.choice(samples).decode(), dice)
        try:
            parse(text)
            taken += 1
        except error:
            continue
        except BaseException as exc:
            exc.add_note(repr(text))
            raise
    tally.add(fuzzed=rounds)
    assert 0 < taken < rounds


@pytest.mark.parametrize("kind", ["npy", "npz"])
def test_a_decoder_of_samples_takes_or_refuses(kind: str, tally: Tally) -> None:
    """Damaged files of numpy are arrays or one error of kvio's, and no object of them runs."""
    dice = random.Random(f"{seed()} {kind}")
    rounds = size(300, 20_000)

    def parse(data: bytes) -> object:
        return decoding.decode(kind, memoryview(data), key="k")

    for sample in arrays(kind):
        parse(sample)
    taken = fuzz(arrays(kind), parse, (KvioError,), dice=dice, rounds=rounds)
    tally.add(fuzzed=rounds)
    assert 0 < taken < rounds
