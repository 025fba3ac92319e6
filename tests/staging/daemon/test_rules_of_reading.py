"""Blocks that are read like files: as in a tier of one's own."""

from __future__ import annotations

from tests.staging.test_files_reading import (  # noqa: F401
    store,
    test_a_reader_does_what_a_file_in_memory_does,
    test_a_reader_keeps_room_and_nobody_waits_for_it,
    test_a_reader_sees_what_is_staged_when_it_is_opened,
    test_a_stored_block_is_read_in_ranges,
    test_a_stored_block_that_was_replaced_is_not_mixed,
    tier,
)
