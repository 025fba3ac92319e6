"""A process that can start no more threads: calls that need one fail, and nothing waits for it."""

from __future__ import annotations

from pathlib import Path

from tests.limited import run_limited


def test_a_call_that_gets_no_thread_fails_and_leaves_the_store_as_it_was(tmp_path: Path) -> None:
    """Submitted and timed calls raise `TransientStorageError`, and the next ones work."""
    run_limited(
        """
        store = kvio.open_store("hybrid", root=sys.argv[1], io_threads=2)
        out = bytearray(3)
        batch = [(f"e{n}", bytes(MiB // 4)) for n in range(4)]
        with at_most(MiB):  # a thread needs more for its stack
            errors = [
                error_of(lambda: store.submit_write("a", b"abc")),
                error_of(lambda: store.submit_write("b", b"abc", timeout=60)),
                error_of(lambda: store.write_block("c", b"abc", timeout=60)),
                store.write_blocks([("d", b"abc")], timeout=60)[0].error,
            ]
            assert store.write_blocks(batch)[3].ok
        assert [type(error) for error in errors] == [kvio.TransientStorageError] * 4, errors

        assert sorted(store.list_keys()) == ["e0", "e1", "e2", "e3"]
        assert store.stats().queued_bytes == 0
        assert store.submit_write("a", b"abc").result(60).nbytes == 3
        assert store.read_block_into("a", out, timeout=60) == 3
        store.flush(timeout=60)
        store.close(timeout=60)
        """,
        tmp_path,
    )


def test_a_task_that_gets_no_thread_fails_and_never_writes(tmp_path: Path) -> None:
    """Calls of an `AsyncStore` raise `TransientStorageError`, and nothing is stored later."""
    run_limited(
        """
        async def main(store):
            for call in (
                lambda: store.write_block("a", b"abc"),
                lambda: store.write_blocks([("b", b"abc")]),
                lambda: store.read_block("c"),
            ):
                try:
                    with at_most(MiB):
                        await call()
                except kvio.TransientStorageError:
                    continue
                raise AssertionError("no error")
            await store.write_block("d", b"abc")
            assert [key async for key in store.list_keys()] == ["d"]
            await store.close(timeout=60)

        asyncio.run(main(kvio.AsyncStore(kvio.open_store("hybrid", root=sys.argv[1]))))
        """,
        tmp_path,
    )


def test_a_tier_that_gets_no_thread_takes_no_write(tmp_path: Path) -> None:
    """A write that no drain could store is refused, and the next one is stored."""
    run_limited(
        """
        store = kvio.open_store("hybrid", root=sys.argv[1], io_threads=2)
        tier = kvio.stage(store, "1MiB", close_store=True)
        with at_most(MiB):
            error = error_of(lambda: tier.write_block("a", b"abc"))
        assert type(error) is kvio.TransientStorageError, error

        tier.write_block("b", b"abc")
        tier.barrier("visible", timeout=60)
        assert list(store.list_keys()) == ["b"]
        tier.close(timeout=60)
        """,
        tmp_path,
    )
