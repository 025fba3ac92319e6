"""docs/recipes/lightning.md is true: Lightning's trainers save to a store, and go on from it."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvio

from .running import require, run, write_program

require("torch", "lightning")
import torch  # noqa: E402
from lightning.pytorch import LightningModule, Trainer  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.plugins.io import AsyncCheckpointIO  # noqa: E402

from kvio.connectors.lightning import KvioCheckpointIO  # noqa: E402

pytestmark = [
    *(pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(600)),
    pytest.mark.filterwarnings("ignore"),  # Lightning's advice on speed
]

PAGE = "docs/recipes/lightning.md"


class Tiny(LightningModule):  # type: ignore[misc, unused-ignore]
    """A model of one layer, with hyperparameters."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(16, width)

    def training_step(self, batch: Any, _: int) -> Any:
        loss = self.layer(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit(model: Tiny, plugin: Any, epochs: int, *callbacks: Any, **options: Any) -> Any:
    """Train on fixed data for some epochs."""
    data: Any = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        plugins=[plugin],
        callbacks=list(callbacks),
        enable_checkpointing=bool(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=8), **options)
    return trainer


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[kvio.Store]:
    """Yield a store; the working directory is another, and empty."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with kvio.open_store(tmp_path / "store", create=True) as opened:
        yield opened


def plugin_of(store: Any) -> KvioCheckpointIO:
    """Make a plugin that is content with a store without durability."""
    return KvioCheckpointIO(store, level="visible")


def test_the_program_of_the_page_runs(real_disk: Path) -> None:
    """It trains, resumes and loads; the page says which checkpoints are left."""
    (real_disk / "ckpt").mkdir()
    instead = {"/mnt/ckpt": f"{real_disk}/ckpt"}

    printed = run(write_program(PAGE, real_disk, name="train.py", instead=instead))

    wanted = [f"run-7/{name}.ckpt" for name in ("epoch=2", "epoch=3", "last")]
    assert str(wanted) in printed
    assert not [path for path in real_disk.rglob("*.ckpt") if "run-7" in path.parts]


def test_a_resumed_run_ends_as_one_that_was_not_interrupted(store: kvio.Store) -> None:
    """Weights and the optimizer's state are equal bit for bit."""
    first = Tiny()
    whole = copy.deepcopy(first)
    fit(whole, plugin_of(store), 4)
    fit(first, plugin_of(store), 2, ModelCheckpoint("run", "{epoch}", save_last=True))

    resumed = Tiny()
    trainer = fit(resumed, plugin_of(store), 4, ckpt_path="run/last.ckpt")

    assert trainer.current_epoch == 4
    assert all(
        torch.equal(one, other)
        for one, other in zip(whole.parameters(), resumed.parameters(), strict=True)
    )
    assert not list(Path.cwd().rglob("*.ckpt"))


def test_checkpoints_beyond_the_best_are_removed(store: kvio.Store) -> None:
    """``save_top_k`` is of the store's blocks."""
    keep = ModelCheckpoint("run", "{epoch}", monitor="loss", save_top_k=2)
    fit(Tiny(), plugin_of(store), 4, keep)

    assert sorted(store.list_keys()) == ["run/epoch=2.ckpt", "run/epoch=3.ckpt"]


def test_the_plugin_works_behind_lightnings_own_thread(store: kvio.Store) -> None:
    """Under ``AsyncCheckpointIO`` the checkpoint is stored when ``fit`` returns."""
    fit(Tiny(), AsyncCheckpointIO(plugin_of(store)), 1, ModelCheckpoint("run", "last"))

    assert plugin_of(store).load_checkpoint("run/last.ckpt")["epoch"] == 0


def test_a_tier_is_waited_for_until_the_level(store: kvio.Store) -> None:
    """A staging tier in front of the store holds nothing back when a save returns."""
    with kvio.stage(store, "16MiB") as tier:
        plugin_of(tier).save_checkpoint({"a": torch.ones(3)}, "run/a.ckpt")
        assert store.contains("run/a.ckpt")


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_either_trainer_takes_the_plugin(package: str) -> None:
    """Each distribution has an interface of its own, and refuses what is none of it."""
    module = pytest.importorskip(package, reason=f"{package} is not installed")
    with kvio.open_store("memory") as memory:
        plugin = plugin_of(memory)
        trainer = module.Trainer(plugins=[plugin], logger=False, barebones=False, accelerator="cpu")

        assert trainer.strategy.checkpoint_io is plugin


class Breaks:
    """Unpickling it would run code."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("broken-into"),)


def test_a_checkpoint_runs_no_code_unless_it_is_trusted(store: kvio.Store) -> None:
    """A pickle of a store that others write to is refused, and named; trust is explicit."""
    plugin = plugin_of(store)
    plugin.save_checkpoint({"callbacks": Breaks()}, "run/a.ckpt")

    with pytest.raises(kvio.UnsupportedError, match=r"'run/a\.ckpt'.*weights_only") as caught:
        plugin.load_checkpoint("run/a.ckpt")
    assert isinstance(caught.value.__cause__, pickle.UnpicklingError)
    assert not Path("broken-into").exists()

    plugin.load_checkpoint("run/a.ckpt", weights_only=False)
    assert Path("broken-into").exists()


def test_a_missing_checkpoint_is_named(store: kvio.Store) -> None:
    """By its path, its key and its store; removing it is no error."""
    plugin = plugin_of(store)

    with pytest.raises(kvio.BlockNotFoundError, match=r"'run/none\.ckpt' in <kvio\.Store"):
        plugin.load_checkpoint("run/none.ckpt")
    plugin.remove_checkpoint("run/none.ckpt")


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("../a.ckpt", "not below"),
        ("/elsewhere/a.ckpt", "not below"),
        (".", "not below"),
        ("run/a b.ckpt", "a b"),
    ],
)
def test_a_path_that_is_no_key_is_refused(path: str, says: str, store: kvio.Store) -> None:
    """Nothing is stored under a name that was not asked for; the error says what to change."""
    with pytest.raises(kvio.InvalidKeyError, match=says):
        plugin_of(store).save_checkpoint({}, path)

    assert not list(store.list_keys())


def test_a_level_that_the_store_lacks_is_refused(store: kvio.Store) -> None:
    """The default is durable; the error says how to have it."""
    with pytest.raises(kvio.UnsupportedError, match="durability='durable'"):
        KvioCheckpointIO(store).save_checkpoint({}, "run/a.ckpt")
    with pytest.raises(kvio.ConfigError, match="level"):
        KvioCheckpointIO(store, level="accepted")
    with pytest.raises(kvio.UnsupportedError, match="storage_options"):
        plugin_of(store).save_checkpoint({}, "run/a.ckpt", storage_options={"a": 1})


def test_tensors_of_a_checkpoint_come_back_bit_for_bit(store: kvio.Store) -> None:
    """Also those larger than torch reads at once."""
    state: Any = {"a": torch.randn(1_000_003), "b": {"c": [torch.arange(7).to(torch.bfloat16), 3]}}
    plugin = plugin_of(store)
    plugin.save_checkpoint(state, "run/a.ckpt")

    found = plugin.load_checkpoint("run/a.ckpt")

    assert torch.equal(found["a"], state["a"])
    assert torch.equal(found["b"]["c"][0], state["b"]["c"][0])
    assert found["b"]["c"][1] == 3


def test_without_lightning_the_import_says_what_to_install() -> None:
    """The connector is a MissingDependencyError where neither distribution is."""
    code = """
import sys
sys.modules["lightning"] = sys.modules["lightning_fabric"] = None
import kvio
try:
    import kvio.connectors.lightning
except kvio.MissingDependencyError as exc:
    print(exc)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "pip install lightning" in done.stdout
