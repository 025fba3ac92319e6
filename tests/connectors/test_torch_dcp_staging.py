"""The stager does not reuse memory in use, and keeps saves in order."""

from __future__ import annotations

import copy
import pickle
import threading
from concurrent.futures import Future
from typing import Any

import pytest

import kvio

from .dcp import (
    ALONE,
    CheckpointException,
    KvioStager,
    KvioWriter,
    Watched,
    dcp,
    load,
    memory_store,
    save,
    torch,
)

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings(ALONE)]


def addresses(state: dict[str, Any]) -> set[int]:
    """Return the addresses of the state's tensors."""
    return {tensor.untyped_storage().data_ptr() for tensor in state.values()}


def on_thread(work: Any) -> Future[Any]:
    """Run a function in a new thread."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as exc:  # noqa: BLE001  # for whoever looks at the future
            future.set_exception(exc)

    threading.Thread(target=run).start()
    return future


def test_a_staged_state_is_a_copy_with_its_views() -> None:
    """Tensors that share memory share it in the copy, which later changes do not reach."""
    base = torch.arange(12.0)
    state = {"base": base, "view": base.view(3, 4).t(), "n": {"lr": [0.1]}, "e": torch.empty(0)}
    staged = KvioStager().stage(state)
    base.zero_()
    state["n"]["lr"][0] = 9

    assert staged["base"].tolist() == list(range(12))
    assert staged["view"].stride() == (1, 4)
    assert staged["view"].untyped_storage().data_ptr() == staged["base"].data_ptr()
    assert staged["n"] == {"lr": [0.1]}
    assert staged["e"].numel() == 0


def test_staging_memory_is_page_aligned() -> None:
    """Direct I/O needs no copy of staged tensors."""
    staged = KvioStager().stage({"a": torch.ones(3), "b": torch.ones(5000)})

    assert [tensor.data_ptr() % 4096 for tensor in staged.values()] == [0, 0]


def test_memory_is_reused_after_a_state_is_freed() -> None:
    """The next state of the same shape has the memory of the last one."""
    stager = KvioStager()
    staged = stager.stage({"a": torch.ones(5000)})
    before = addresses(staged)
    del staged
    again = stager.stage({"a": torch.zeros(5000)})

    assert addresses(again) == before


def test_memory_is_not_reused_while_a_tensor_uses_it() -> None:
    """One view of one staged tensor keeps its memory, whatever became of the state dict."""
    stager = KvioStager()
    view = stager.stage({"a": torch.ones(5000)})["a"][7:9]
    others = [stager.stage({"a": torch.zeros(5000)}) for _ in range(2)]

    assert view.tolist() == [1, 1]
    assert all(view.untyped_storage().data_ptr() not in addresses(other) for other in others)


def test_memory_that_the_next_state_does_not_use_is_freed() -> None:
    """The stager holds no more than the last states needed."""
    stager = KvioStager()
    for n in range(5):
        stager.stage({"a": torch.ones(1000 + n)})
    stager.stage({"a": torch.ones(1)})

    assert stager._pool._free == {}
    assert len(stager._pool._returned) == 1


def test_a_save_ends_after_its_memory_is_freed() -> None:
    """Otherwise the next save would allocate other memory."""
    from kvio.connectors.torch_dcp.staging import _QueuedSave, _StagedState

    save, ended = _QueuedSave(None), list[bool]()

    class Tensor:
        def __del__(self) -> None:
            ended.append(save.ended)

    staged = _StagedState({"tensor": Tensor()}, save)
    del staged

    assert ended == [False]
    assert save.ended


def test_a_third_save_waits_for_the_first() -> None:
    """No more saves than allowed are staged and have not ended; waiting is bounded."""
    stager = KvioStager(saves=2, timeout=0)
    staged = [stager.stage({"a": torch.ones(3)}) for _ in range(2)]
    with pytest.raises(kvio.StorageTimeoutError, match="wait for its future"):
        stager.stage({"a": torch.ones(3)})
    del staged[0]

    assert stager.stage({"a": torch.ones(3)})["a"].tolist() == [1, 1, 1]


def test_a_save_begins_when_the_one_before_has_ended() -> None:
    """Threads that save in any order begin in the order of staging."""
    stager = KvioStager(saves=3)
    first, second, third = (stager.stage({"a": torch.ones(3)}) for _ in range(3))
    began: list[str] = []

    def begin(name: str, staged: Any) -> None:
        staged.items()
        began.append(name)

    last = on_thread(lambda: begin("third", third))
    middle = on_thread(lambda: begin("second", second))
    del first
    middle.result(timeout=60)
    last.result(timeout=60)

    assert began == ["second", "third"]


def test_a_state_that_is_dropped_unsaved_does_not_let_the_next_overtake() -> None:
    """What comes after a dropped state still waits for what came before it."""
    stager = KvioStager(saves=3)
    first, dropped, third = (stager.stage({"a": torch.ones(3)}) for _ in range(3))
    first.items()  # under way, on a thread that lives on
    del dropped
    waiting = on_thread(lambda: third.items() and None)
    with pytest.raises(TimeoutError):
        waiting.result(timeout=0.2)
    del first
    waiting.result(timeout=60)


def test_a_save_that_failed_holds_nobody_up() -> None:
    """A failed save whose future is kept, with all it holds, has ended all the same."""

    def fail(key: str) -> None:
        raise kvio.StorageError("the disk is gone", key=key)

    stager = KvioStager(saves=1, timeout=60)
    with memory_store() as store:
        failing: Any = Watched(store, fail)
        bad = KvioWriter(failing, "run", level="visible")
        good = KvioWriter(store, "run", level="visible")
        failed = dcp.async_save({"a": torch.ones(9)}, storage_writer=bad, async_stager=stager)
        saved = dcp.async_save({"a": torch.ones(9)}, storage_writer=good, async_stager=stager)
        saved.result()
        loaded = load(store, {"a": torch.zeros(9)})

        assert isinstance(failed.exception(), CheckpointException)
        assert loaded["a"].tolist() == [1] * 9


def test_many_asynchronous_saves_end_with_the_last() -> None:
    """A training loop that never waits has, in the end, saved its last state."""
    stager, state = KvioStager(), {"a": torch.zeros(2000), "step": 0}
    with memory_store() as store:
        writer = KvioWriter(store, "run", level="visible", keep=20)
        saves = []
        for step in range(1, 11):
            state["a"].fill_(step)
            state["step"] = step
            saves.append(dcp.async_save(state, storage_writer=writer, async_stager=stager))
        for saving in saves:
            saving.result()
        kept = kvio_versions(store)
        steps = [
            load(store, {"a": torch.zeros(2000), "step": 0}, version=version) for version in kept
        ]
    stager.close()

    assert [loaded["step"] for loaded in steps] == list(range(10, 0, -1))
    assert all(bool((loaded["a"] == loaded["step"]).all()) for loaded in steps)


def kvio_versions(store: Any) -> list[str]:
    """List the saves there are."""
    from kvio.connectors.torch_dcp import versions

    return versions(store, "run")


def test_a_stager_serves_saves_that_wait_too() -> None:
    """A staged state may be saved by dcp.save, one after the other, on one thread."""
    stager = KvioStager(saves=1, timeout=0)
    with memory_store() as store:
        for value in range(3):
            staged = stager.stage({"a": torch.full((9,), float(value))})
            save(store, staged)
        loaded = load(store, {"a": torch.zeros(9)})

    assert loaded["a"].tolist() == [2] * 9


def test_a_staged_state_goes_to_another_process_as_a_dict() -> None:
    """Pickled and copied, a staged state is a dict and holds up nothing."""
    staged = KvioStager().stage({"a": 1})

    assert type(pickle.loads(pickle.dumps(staged))) is dict
    assert type(copy.copy(staged)) is dict


def test_a_closed_stager_stages_no_more() -> None:
    """After close() staging is refused, and what was staged stays as it is."""
    stager = KvioStager()
    staged = stager.stage({"a": torch.ones(3)})
    stager.close()

    assert staged["a"].tolist() == [1, 1, 1]
    with pytest.raises(kvio.StoreClosedError):
        stager.stage({})
    with pytest.raises(kvio.ConfigError):
        KvioStager(saves=0)
