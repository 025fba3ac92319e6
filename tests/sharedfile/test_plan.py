"""The fixed part of a map: it survives its bytes, and no other bytes pass for one."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
from google_crc32c import extend
from hypothesis import given, settings
from hypothesis import strategies as st

from kvio.sharedfile import plan as plans
from kvio.sharedfile.layout import Layout
from kvio.sharedfile.plan import Plan, PlanError

from .strategies import layouts

#: The head of a map as docs/format.md has it.
HEAD = struct.Struct("<8sHHI16s16sQQQQIII32xI")
MAGIC, VERSION, FLAGS, WRITERS = range(4)
SIZE, CELL, STRIPE, SIZES, ALIGN, MEMORY, PERMISSIONS = range(6, 13)
ODD = Layout(10_000, 3, 4096, 8192, 0, (5000, 0, 5000))

PLANS = st.builds(
    Plan,
    file_id=st.binary(min_size=16, max_size=16),
    boot_id=st.binary(min_size=16, max_size=16),
    layout=layouts(),
    memory_align=st.sampled_from([1, 4, 512, 4096, 65536]),
    direct=st.booleans(),
    checksum=st.booleans(),
    durable=st.booleans(),
    index=st.booleans(),
    replace=st.booleans(),
    sidecar=st.booleans(),
    file_mode=st.integers(0, 0o777),
)


def plan_of(layout: Layout) -> Plan:
    """Return a plan with one of each choice."""
    return Plan(
        file_id=b"f" * 16, boot_id=b"b" * 16, layout=layout, memory_align=512, direct=True,
        checksum=True, durable=False, index=True, replace=False, file_mode=0o440,
    )  # fmt: skip


def beginning(plan: Plan) -> bytes:
    """Lay a plan out as the beginning of a map has it."""
    head, sizes = plans.pack(plan)
    return head.ljust(plan.sizes_at, b"\0") + sizes


def signed(fields: list[object], rest: bytes) -> bytes:
    """Encode a head with a right checksum over whatever it says."""
    head = HEAD.pack(*fields)[:-4]
    sizes = rest[-8 * fields[SIZES] :] if fields[SIZES] else b""  # type: ignore[operator]
    return head + struct.pack("<I", extend(extend(0, head), sizes)) + rest


@given(PLANS)
def test_a_plan_survives_its_bytes(plan: Plan) -> None:
    """What is packed is unpacked as it was, whatever follows in the map."""
    data = beginning(plan)

    assert plans.unpack(data, plan.map_nbytes) == plan
    assert plans.unpack(data + b"more", plan.map_nbytes) == plan


@given(PLANS)
def test_the_parts_of_a_map_do_not_overlap(plan: Plan) -> None:
    """Head, state, writers, sizes, cells and shared blocks follow each other, each aligned."""
    assert plans.HEAD_BYTES <= plans.STATE_AT < plans.INODE_AT < plans.WRITERS_AT
    assert plan.sizes_at >= plans.WRITERS_AT + 16 * plan.layout.writers
    assert plan.cells_at >= plan.sizes_at + 8 * len(plan.layout.sizes)
    assert plan.blocks_at >= plan.cells_at + 8 * plan.layout.cells
    assert plan.cells_at % 8 == plan.blocks_at % plan.layout.align == plan.blocks_at % 4096 == 0
    assert plan.map_nbytes >= plan.blocks_at + len(plan.layout.shared_blocks) * plan.layout.align


@given(PLANS)
def test_room_of_is_what_unpack_wants_to_see(plan: Plan) -> None:
    """The bytes that `room_of` asks for are enough, and one less is not."""
    data = beginning(plan)
    enough = plans.WRITERS_AT + plans.room_of(data[: plans.WRITERS_AT])

    assert plans.unpack(data[:enough], plan.map_nbytes) == plan
    if plan.layout.sizes:
        with pytest.raises(PlanError):
            plans.unpack(data[: enough - 1], plan.map_nbytes)


def test_the_head_is_as_the_format_says() -> None:
    """The first 128 bytes are the fields of the format, in its order."""
    plan = plan_of(ODD)
    fields = HEAD.unpack(beginning(plan)[: HEAD.size])

    assert fields[:-1] == (
        *(b"KVIOMAP\n", 2, 1 + 2 + 8, 3, b"f" * 16, b"b" * 16),
        *(10_000, 8192, 0, 3, 4096, 512, 0o440),
    )
    assert signed(list(fields), beginning(plan)[HEAD.size :]) == beginning(plan)


@pytest.mark.parametrize("at", range(HEAD.size))
def test_no_byte_of_the_head_may_change(at: int) -> None:
    """Every single changed byte of the head, padding included, is found."""
    plan = plan_of(ODD)
    data = bytearray(beginning(plan))
    for change in (0x01, 0x80, 0xFF):
        data[at] ^= change
        with pytest.raises(PlanError):
            plans.unpack(bytes(data), plan.map_nbytes)
        data[at] ^= change


def test_no_byte_of_the_sizes_may_change() -> None:
    """The checksum of the head covers the table of domains."""
    plan = plan_of(ODD)
    data = beginning(plan)
    for at in range(plan.sizes_at, len(data)):
        bad = bytearray(data)
        bad[at] ^= 1
        with pytest.raises(PlanError, match="checksum"):
            plans.unpack(bytes(bad), plan.map_nbytes)


@given(PLANS, st.data())
def test_a_beginning_that_is_cut_short_is_refused(plan: Plan, data: st.DataObject) -> None:
    """Every true prefix that lacks a byte of head or sizes is a PlanError."""
    whole = beginning(plan)
    needed = len(whole) if plan.layout.sizes else plans.WRITERS_AT
    nbytes = data.draw(st.integers(0, needed - 1))

    with pytest.raises(PlanError):
        plans.unpack(whole[:nbytes], plan.map_nbytes)


@given(PLANS, st.integers(-9000, 9000).filter(bool))
def test_a_map_of_another_length_is_refused(plan: Plan, by: int) -> None:
    """A map that was cut or grew is a PlanError that gives both lengths."""
    nbytes = plan.map_nbytes + by

    with pytest.raises(PlanError, match=f"{nbytes} bytes, not {plan.map_nbytes}"):
        plans.unpack(beginning(plan), nbytes)


@pytest.mark.parametrize("version", [0, 1, 3, 65535])
def test_another_version_is_named(version: int) -> None:
    """An older or newer map is refused with its version, though its checksum is right."""
    data = beginning(plan_of(ODD))
    fields = list(HEAD.unpack(data[: HEAD.size]))
    fields[VERSION] = version

    with pytest.raises(PlanError, match=f"version {version} "):
        plans.unpack(signed(fields, data[HEAD.size :]), plan_of(ODD).map_nbytes)


def test_an_unknown_flag_is_refused() -> None:
    """A choice that this version does not know is not passed over."""
    data = beginning(plan_of(ODD))
    fields = list(HEAD.unpack(data[: HEAD.size]))
    fields[FLAGS] |= 64

    with pytest.raises(PlanError, match="flags 75"):
        plans.unpack(signed(fields, data[HEAD.size :]), plan_of(ODD).map_nbytes)


@pytest.mark.parametrize("file_mode", [0o1000, 0o4755, 0xFFFFFFFF])
def test_permissions_that_cannot_be_are_refused(file_mode: int) -> None:
    """A sealed file gets no bits beyond those of a mode."""
    data = beginning(plan_of(ODD))
    fields = list(HEAD.unpack(data[: HEAD.size]))
    fields[PERMISSIONS] = file_mode

    with pytest.raises(PlanError, match=f"permissions {file_mode:o}"):
        plans.unpack(signed(fields, data[HEAD.size :]), plan_of(ODD).map_nbytes)


def test_a_foreign_file_is_refused() -> None:
    """Anything that begins otherwise is no map of a shared file."""
    with pytest.raises(PlanError, match="does not begin"):
        plans.unpack(bytes(4096), 4096)
    with pytest.raises(PlanError, match="does not begin"):
        plans.unpack(b"KVIOSHF\n" + beginning(plan_of(ODD))[8:], plan_of(ODD).map_nbytes)


NUMBERS_32 = st.one_of(st.integers(0, 9), st.sampled_from([4096, 1 << 16, (1 << 32) - 1]))
NUMBERS_64 = st.one_of(NUMBERS_32, st.sampled_from([1 << 32, 1 << 60, (1 << 64) - 1]))


@settings(max_examples=200)
@given(st.data())
def test_a_head_with_a_right_checksum_is_still_checked(data: st.DataObject) -> None:
    """Whatever numbers a signed head says: a plan that fits the map, or a PlanError, at once."""
    whole = beginning(plan_of(ODD))
    fields = list(HEAD.unpack(whole[: HEAD.size]))
    for place in data.draw(st.sets(st.sampled_from([3, *range(6, 12)]), min_size=1)):
        wide = place in (SIZE, CELL, STRIPE, SIZES)
        fields[place] = data.draw(NUMBERS_64 if wide else NUMBERS_32)
    rest = whole[HEAD.size :]
    head = HEAD.pack(*fields) + rest if fields[SIZES] > 3 else signed(fields, rest)
    try:
        plan = plans.unpack(head, plan_of(ODD).map_nbytes)
    except PlanError:
        return

    assert plan.map_nbytes == plan_of(ODD).map_nbytes


@settings(max_examples=200)
@given(st.binary(max_size=400), st.integers(0, 1 << 62))
def test_any_bytes_are_a_plan_error(data: bytes, nbytes: int) -> None:
    """Bytes that nobody packed end in a PlanError, with the right magic and version too."""
    for whole in (data, b"KVIOMAP\n\1\0" + data):
        with pytest.raises(PlanError):
            plans.unpack(whole, nbytes)


def test_a_head_cannot_ask_for_much_memory() -> None:
    """A head that claims the most writers and domains makes nobody read or allocate gigabytes."""
    fields = list(HEAD.unpack(beginning(plan_of(ODD))[: HEAD.size]))
    fields[WRITERS], fields[SIZES] = (1 << 32) - 1, (1 << 64) - 1
    data = HEAD.pack(*fields).ljust(plans.WRITERS_AT, b"\0")
    tracemalloc.start()
    try:
        assert plans.room_of(data) <= 24 << 16
        with pytest.raises(PlanError):
            plans.unpack(data, 1 << 40)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert most < 1 << 20


@pytest.mark.parametrize(("place", "number"), [(ALIGN, 1 << 23), (MEMORY, 1 << 17)])
def test_an_alignment_beyond_what_the_core_can_do_is_refused(place: int, number: int) -> None:
    """Bounce buffers have room for so much alignment: a map that wants more is not opened."""
    huge = 1 << 23
    layout = Layout(huge, 1, 4096, huge, huge)
    data = beginning(plan_of(layout))
    fields = list(HEAD.unpack(data[: HEAD.size]))
    fields[place] = number
    nbytes = huge if place == ALIGN else plan_of(layout).map_nbytes

    with pytest.raises(PlanError):
        plans.unpack(signed(fields, data[HEAD.size :]), nbytes)
