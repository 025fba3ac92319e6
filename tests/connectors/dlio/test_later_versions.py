"""What DLIO's later versions ask of a storage, on their interfaces as recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from .recorded import record, run_on
from .running import files_below

_LATER = [("2.0.1", False), ("3.0.2", True)]


@pytest.fixture(params=_LATER, ids=["argonne", "mlcommons"])
def dlio(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a directory in which a later DLIO is recorded."""
    version, fork = request.param
    directory = tmp_path / "dlio"
    directory.mkdir()
    record(directory, version=version, fork=fork)
    return directory


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return a directory for blocks."""
    path = tmp_path / "store"
    path.mkdir()
    return path


def _run(dlio: Path, store: Path, code: str) -> None:
    run = run_on(dlio, store, code)
    assert run.returncode == 0, run.stderr


def test_every_kind_of_data_is_put_and_got(dlio: Path, store: Path) -> None:
    """Bytes, what has a buffer, text; whole and by range; each counted."""
    _run(
        dlio,
        store,
        """
        class Foreign:
            def __init__(self): self.bytes = b'0123'
            def getbuffer(self): return memoryview(self.bytes)
        for name, data in (('a', b'0123'), ('b', io.BytesIO(b'0123')), ('c', memoryview(b'0123')),
                           ('d', '0123'), ('e', Foreign()), ('/f/', bytearray(b'0123'))):
            storage.put_data(f'data/{name}', data)
            assert storage.get_data(f'/data/{name}', None) == b'0123'
            assert storage.get_data(f'data/{name}', None, 1, 2) == b'12'
        assert counts.total().writes.blocks == 6 and counts.total().reads.blocks == 12
        """,
    )
    assert files_below(store) == {f"data/{name}": b"0123" for name in "abcdef"}


def test_names_are_listed_and_reported_apart(dlio: Path, store: Path) -> None:
    """One level at a time, by pattern as full paths, with folders that nobody made."""
    _run(
        dlio,
        store,
        """
        for name in ('d/1/a.npz', 'd/2/b.npz', 'd/c.npz', 'd/c.txt', 'dd/e.npz'):
            storage.put_data(name, b'x')
        assert sorted(storage.walk_node('d')) == ['1', '2', 'c.npz', 'c.txt']
        assert storage.walk_node('nothing') == []
        assert sorted(storage.walk_node('d/*/*.npz', True)) == ['/d/1/a.npz', '/d/2/b.npz']
        assert storage.walk_node('d/*.npz', use_pattern=True) == ['/d/c.npz']
        assert storage.get_node('d') is MetadataType.DIRECTORY
        assert storage.get_node('d/c.npz') is MetadataType.FILE
        assert storage.get_node('d/c') is None
        assert storage.isfile('d/c.npz') and not storage.isfile('d')
        assert storage.file_exists('/d/c.npz') and not storage.file_exists('/d/x')
        assert not storage.islocalfs()
        assert storage.get_uri(storage.get_uri('./d/c.npz')) == '/d/c.npz'
        assert storage.delete_node('d')
        assert storage.walk_node('d') == [] and storage.isfile('dd/e.npz')
        """,
    )


def test_generators_that_put_are_left_alone_and_others_staged(dlio: Path, store: Path) -> None:
    """Either way every file is one block, counted once."""
    _run(
        dlio,
        store,
        """
        GeneratorFactory.get_generator(FormatType.NPZ).generate()
        assert counts.total().writes.blocks == 2
        GeneratorFactory.get_generator(FormatType.INDEXED_BINARY).generate()
        assert counts.total().writes.blocks == 4
        """,
    )
    assert files_below(store) == {"data/a": b"data/a", "data/b": b"data/b"}


def test_other_storage_types_stay_dlios_own(dlio: Path, store: Path) -> None:
    """Only parallel_fs is claimed."""
    _run(
        dlio,
        store,
        """
        assert StorageFactory().get_storage(StorageType.LOCAL_FS, 'root', None) == 'stock'
        try:
            StorageFactory().get_storage(StorageType.AISTORE, 'root', None)
        except Exception as exc:
            assert 'EC1001' in str(exc)
        else:
            raise AssertionError
        """,
    )


@pytest.mark.parametrize("reported", [("3.0.2", False), ("1.1.0", False), ("4.0", True)])
def test_a_version_that_is_not_known_is_refused(
    reported: tuple[str, bool], tmp_path: Path, store: Path
) -> None:
    """Before anything of DLIO is wrapped."""
    version, fork = reported
    directory = tmp_path / "dlio"
    directory.mkdir()
    record(directory, version=version, fork=fork)
    run = run_on(directory, store, "")

    assert run.returncode != 0
    assert f"kvio does not know DLIO {version}" in run.stderr


def test_a_checkpoint_without_torch_comes_back_as_it_was_saved(dlio: Path, store: Path) -> None:
    """Nested states, every type of element, saved as one block and loaded."""
    _run(
        dlio,
        store,
        """
        import numpy
        from kvio.connectors.dlio.checkpoints import NumpyCheckpointing

        class Named(NumpyCheckpointing):
            def get_name(self, suffix):
                return f'ck/{suffix}.npz'

        one = Named.get_instance()
        assert one is Named.get_instance()
        state = {'a': one.get_tensor(5) + 3, 'g': {'b': one.get_tensor_core(3, 'fp32') + 0.5}}
        one.save_state('model-1-2-0', state, True)
        found = {}
        one.load_state('model-1-2-0', found)
        assert numpy.array_equal(found['a'], state['a']) and found['a'].dtype == 'i1'
        assert numpy.array_equal(found['g']['b'], state['g']['b']) and found['g']['b'].dtype == 'f4'
        found = counts.total()
        assert (found.checkpoint_writes.blocks, found.checkpoint_reads.blocks) == (1, 1)
        """,
    )
    assert list(files_below(store)) == ["ck/model-1-2-0.npz"]
