"""The doctor's answers agree with direct system calls, and it leaves no files."""

from __future__ import annotations

import ctypes
import json
import os
import re
from contextlib import nullcontext
from pathlib import Path

import pytest

import kvio
from kvio.diagnostics import tuning
from kvio.diagnostics.doctor import Diagnosis, diagnose
from kvio.filesystem.io_mode import BY_SIZE
from kvio.types import Finding
from tests.media import filesystem_of
from tests.posix import mounts

_RENAME_NOREPLACE = 1


def renames_to_a_free_name(path: Path) -> bool:
    """Return whether renameat2(2) moves a file to a free name under RENAME_NOREPLACE."""
    old, new = path / "old", path / "new"
    old.touch()
    arguments = (-100, os.fsencode(old), -100, os.fsencode(new), _RENAME_NOREPLACE)
    renamed: bool = ctypes.CDLL(None).renameat2(*arguments) == 0
    (new if renamed else old).unlink()
    return renamed


def found(diagnosis: Diagnosis, name: str) -> Finding:
    (finding,) = (f for f in diagnosis.findings if f.name == name)
    return finding


def tree(path: Path) -> set[str]:
    return {str(p) for p in path.rglob("*")}


class TestDirectory:
    def test_every_answer_has_a_sentence_as_its_meaning(self, disk_path: Path) -> None:
        """Names are unique; a meaning starts with a capital and ends with a full stop."""
        findings = diagnose(str(disk_path)).findings

        assert len({f.name for f in findings}) == len(findings)
        assert all(f.meaning[0].isupper() and f.meaning.endswith(".") for f in findings)

    def test_it_leaves_nothing(self, disk_path: Path) -> None:
        """There is no new file or directory, also for the URL of a durable store."""
        for target in (
            disk_path,
            f"hybrid://{disk_path}?durability=durable",
            f"hybrid://{disk_path}",
        ):
            diagnose(str(target))

            assert tree(disk_path) == set()

    def test_the_file_system_is_the_kernel_s(self, disk_path: Path, disk_filesystem: str) -> None:
        """The name is that of the mount table."""
        assert found(diagnose(str(disk_path)), "file system").answer == disk_filesystem

    def test_o_tmpfile_is_as_open_says(self, disk_path: Path) -> None:
        """The answer is yes exactly if open(2) accepts the flag."""
        try:
            os.close(os.open(disk_path, os.O_TMPFILE | os.O_RDWR))
            works = True
        except OSError:
            works = False

        assert found(diagnose(str(disk_path)), "O_TMPFILE").good is works

    @pytest.mark.parametrize(
        "place", ["disk", pytest.param("bindfs", marks=[pytest.mark.root, pytest.mark.slow])]
    )
    def test_a_rename_without_replacing_is_as_the_file_system_says(
        self, place: str, disk_path: Path
    ) -> None:
        """The answer is yes exactly if a rename to a free name succeeds; no file is left."""
        mounted = mounts.bindfs(disk_path) if place == "bindfs" else nullcontext(disk_path)
        with mounted as path:
            works = renames_to_a_free_name(path)
            finding = found(diagnose(str(path)), "renameat2, no replace")

            assert finding.good is works
            assert tree(path) == set()

    def test_durable_is_promised_where_a_durable_store_opens(self, disk_path: Path) -> None:
        """The doctor and the backend agree, and a refusal has a reason."""
        try:
            kvio.open_store("hybrid", root=disk_path, durability="durable").close()
            opens = True
        except kvio.UnsupportedError:
            opens = False
        finding = found(diagnose(str(disk_path)), "durable writes")

        assert finding.good is opens
        assert opens or "durability=durable does not open here: " in finding.meaning

    def test_tmpfs_is_reported_as_memory(self) -> None:
        """There is no direct I/O and no durability, and another backend is recommended."""
        shm = Path("/dev/shm")
        if not shm.is_dir() or filesystem_of(shm) != "tmpfs":
            pytest.skip("no tmpfs at /dev/shm")
        diagnosis = diagnose(str(shm))

        assert found(diagnosis, "direct I/O").good is False
        assert "tmpfs is memory" in found(diagnosis, "durable writes").meaning
        own = "" if found(diagnosis, "permissions").good else "/kvio?create=true"
        assert diagnosis.url == f"posix-tmpfile:///dev/shm{own}"

    def test_a_directory_writable_by_others_is_reported(self, disk_path: Path) -> None:
        """The permissions finding is bad, and the advice has a solution."""
        assert found(diagnose(str(disk_path)), "permissions").good is True
        disk_path.chmod(0o775)
        diagnosis = diagnose(str(disk_path))

        assert found(diagnosis, "permissions").good is False
        assert "chmod go-w" in diagnosis.advice[0]
        assert diagnosis.url is not None
        kvio.open_store(diagnosis.url).close()
        assert [path.name for path in disk_path.iterdir()] == ["kvio"]

    def test_the_recommended_url_names_any_directory(self, disk_path: Path) -> None:
        """Reserved characters are percent-encoded, and the store is in that directory."""
        odd = disk_path / "50% of a?b #1"
        odd.mkdir(mode=0o700)
        url = diagnose(str(odd)).url
        assert url is not None
        with kvio.open_store(url) as store:
            store.write_block("k", b"data")

        assert [path.name for path in odd.iterdir() if path.name != ".kvio"] != []
        assert [path.name for path in disk_path.iterdir()] == [odd.name]

    def test_the_alignment_of_statx_is_reported(self, real_disk: Path) -> None:
        """Kvio's alignment is larger if the device requires less than a page."""
        diagnosis = diagnose(str(real_disk))
        if not found(diagnosis, "direct I/O").good:
            pytest.skip("no direct I/O here")

        answer = found(diagnosis, "direct alignment").answer
        [asked] = re.findall(r"\(statx: (\d+)\)", answer) or ["4096"]
        assert f"file {max(int(asked), 4096)} bytes" in answer

    def test_free_space_is_that_of_statvfs(self, disk_path: Path) -> None:
        """The total in GiB is the kernel's."""
        room = os.statvfs(disk_path)
        free, total = map(
            float, found(diagnose(str(disk_path)), "free space").answer[:-4].split(" of ")
        )

        assert total == pytest.approx(room.f_blocks * room.f_frsize / kvio.GiB, abs=0.1)
        assert free <= total

    def test_a_calibration_is_reported_and_an_invalid_one_is_bad(self, real_disk: Path) -> None:
        """No calibration, a valid one, and one with which hybrid stores do not open."""
        if not found(diagnose(str(real_disk)), "direct I/O").good:
            pytest.skip("no direct I/O here: no calibration is needed")

        assert found(diagnose(str(real_disk)), "calibration").answer == "none"
        name = tuning.save(str(real_disk), tuning.Tuning(BY_SIZE, {}))
        assert found(diagnose(str(real_disk)), "calibration").answer == "default thresholds"
        Path(name).write_text("{")
        assert found(diagnose(str(real_disk)), "calibration").good is False

    def test_a_path_that_is_no_directory_is_a_config_error(self, tmp_path: Path) -> None:
        """A missing path, and a file."""
        (tmp_path / "file").write_bytes(b"")
        for name, message in (("nope", "does not exist"), ("file", "is not a directory")):
            with pytest.raises(kvio.ConfigError, match=message):
                diagnose(str(tmp_path / name))


class TestURL:
    def test_a_url_that_opens_is_reported_first(self, disk_path: Path) -> None:
        """The first finding is about the URL."""
        opens = diagnose(f"posix-tmpfile://{disk_path}?layout=plain").findings[0]

        assert (opens.answer, opens.good) == ("opens", True)

    def test_a_url_that_does_not_open_has_a_reason(self, disk_path: Path) -> None:
        """An unknown option, and a root that others can write to, without shared_root."""
        wrong = diagnose(f"hybrid://{disk_path}?durabilty=durable").findings[0]
        disk_path.chmod(0o777)
        shared = diagnose(f"hybrid://{disk_path}").findings[0]
        asked = diagnose(f"hybrid://{disk_path}?shared_root=true").findings[0]

        assert diagnose(f"hybrid://{disk_path}?shared_root=true").refused is None
        assert "shared_root" in (diagnose(f"hybrid://{disk_path}").refused or "")
        assert (wrong.answer, wrong.good) == ("does not open", False)
        assert "durabilty" in wrong.meaning
        assert (shared.good, asked.good) == (False, True)
        assert "shared_root" in shared.meaning

    def test_the_memory_backend_reports_its_capabilities(self) -> None:
        """The findings for a backend without a path are its capabilities."""
        diagnosis = diagnose("memory://")

        assert found(diagnosis, "atomic writes").good is True
        assert found(diagnosis, "durable writes").good is False
        assert "may be lost" in found(diagnosis, "durable writes").meaning

    def test_an_absent_backend_is_the_registry_s_error(self) -> None:
        """An absent S3 backend raises the same error as any other."""
        with pytest.raises(kvio.UnknownBackendError):
            diagnose("s3+gopher://bucket/prefix")

    def test_it_goes_into_json(self, disk_path: Path) -> None:
        """The diagnosis has only JSON values."""
        content = diagnose(f"hybrid://{disk_path}").as_json()

        assert json.loads(json.dumps(content))["target"] == f"hybrid://{disk_path}"
