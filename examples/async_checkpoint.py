"""Train a small language model and checkpoint it four ways: how long does each hold training up?

The model is a transformer over bytes, and reads the source code of Python's standard library. Each
way trains the same model from the same seed and saves weights and optimizer every few steps:

    python examples/async_checkpoint.py --steps 20 --every 5 --width 384

The stall is the time from the call that saves until training goes on; a checkpoint is durable when
it survives a loss of power. At the end each way's last checkpoint is loaded and compared.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import kvio

try:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.nn import functional
except ImportError:
    print("async_checkpoint: needs torch: pip install 'kvio[torch]'", file=sys.stderr)
    sys.exit(2)

from kvio.connectors.torch_dcp import KvioReader, KvioStager, KvioWriter

State: TypeAlias = dict[str, Any]
Saved: TypeAlias = "concurrent.futures.Future[Any]"
CONTEXT, BATCH = 64, 4
HEADINGS = (
    *("way", "saves", "MiB", "stall, first", "stall, median", "stall, worst"),
    *("durable after", "training took", "loaded"),
)


class Model(torch.nn.Module):  # type: ignore[misc, unused-ignore]  # Any where torch is absent
    """A transformer that guesses the next byte."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.bytes = torch.nn.Embedding(256, width)
        self.places = torch.nn.Embedding(CONTEXT, width)
        layer = torch.nn.TransformerEncoderLayer(
            width, max(1, width // 64), 4 * width, dropout=0.0, batch_first=True
        )
        self.layers = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.guess = torch.nn.Linear(width, 256)

    def forward(self, text: Any) -> Any:
        """Return the loss over a batch of texts of CONTEXT + 1 bytes."""
        before, after = text[:, :-1], text[:, 1:]
        seen = self.bytes(before) + self.places(torch.arange(CONTEXT))
        mask = torch.nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        guesses = self.guess(self.layers(seen, mask=mask, is_causal=True))
        return functional.cross_entropy(guesses.flatten(0, 1), after.flatten())


def read_text() -> Any:
    """Return a megabyte or so of Python to learn from."""
    sources = sorted(Path(os.__file__).parent.glob("*.py"))[:80]
    return torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in sources)), dtype=torch.uint8)


def state_of(model: Model, optimizer: Any, step: int) -> State:
    """Gather what training needs to go on: weights and the optimizer's two moments of each."""
    state: State = {"step": step}
    for name, weight in model.named_parameters():
        state[f"model.{name}"] = weight.detach()
        for kind, value in optimizer.state[weight].items():
            state[f"optimizer.{kind}.{name}"] = value
    return state


def equal(left: State, right: State) -> bool:
    """Return whether two states are the same to the last bit."""
    return left.keys() == right.keys() and all(
        torch.equal(value, right[name]) if torch.is_tensor(value) else value == right[name]
        for name, value in left.items()
    )


def empty_like(state: State) -> State:
    """Make a state to load into."""
    return {n: torch.zeros_like(v) if torch.is_tensor(v) else 0 for n, v in state.items()}


class Way(Protocol):
    """A way to save; the future of a save is done when it is durable."""

    def save(self, state: State, step: int) -> Saved:
        """Save a state, which may change when this returns."""

    def load(self, step: int, like: State) -> State:
        """Load a checkpoint that is durable."""


class TorchSave:
    """``torch.save`` to a file, synced, then renamed, then its directory synced."""

    def __init__(self, root: Path, _: kvio.StagingTier) -> None:
        self._root = root / "torch-save"
        self._root.mkdir()

    def save(self, state: State, step: int) -> Saved:
        """Hold training up until the file and its name are on the disk."""
        with (self._root / "new").open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        (self._root / "new").rename(self._root / str(step))
        directory = os.open(self._root, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)
        done: Saved = concurrent.futures.Future()
        done.set_result(None)
        return done

    def load(self, step: int, like: State) -> State:  # noqa: ARG002
        """Load the file."""
        with (self._root / str(step)).open("rb") as file:
            return dict(torch.load(file, weights_only=True))


class StockAsyncSave:
    """``async_save`` of torch with its own writer, one save at a time."""

    def __init__(self, root: Path, _: kvio.StagingTier) -> None:
        self._root = root / "stock"
        self._last: Saved | None = None

    def save(self, state: State, step: int) -> Saved:
        """Wait for the save before, copy the state, and write behind."""
        if self._last is not None:
            self._last.result()
        writer = dcp.FileSystemWriter(self._root / str(step))
        self._last = dcp.async_save(state, storage_writer=writer)
        return self._last

    def load(self, step: int, like: State) -> State:
        """Load the directory."""
        dcp.load(like, storage_reader=dcp.FileSystemReader(self._root / str(step)))
        return like


class TierFile:
    """``torch.save``, unchanged, into a file on the staging tier."""

    def __init__(self, _: Path, tier: kvio.StagingTier) -> None:
        self._tier = tier

    def save(self, state: State, step: int) -> Saved:
        """Write the file to the tier; its receipt tells when it is durable."""
        with self._tier.open(f"torch-save/{step}", "wb") as file:
            torch.save(state, file)
        assert file.receipt is not None
        return file.receipt.as_future()

    def load(self, step: int, like: State) -> State:  # noqa: ARG002
        """Load from the tier, or the store behind it."""
        with self._tier.open(f"torch-save/{step}", "rb") as file:
            return dict(torch.load(file, weights_only=True))


class TierAsyncSave:
    """``async_save`` with kvio's writer and stager over the tier."""

    def __init__(self, _: Path, tier: kvio.StagingTier) -> None:
        self._tier = tier
        self._writer = KvioWriter(tier, "run")
        self._stager = KvioStager()

    def save(self, state: State, step: int) -> Saved:  # noqa: ARG002
        """Copy the state, and write it to the tier and the store behind."""
        saved: Saved = dcp.async_save(state, storage_writer=self._writer, async_stager=self._stager)
        return saved

    def load(self, step: int, like: State) -> State:  # noqa: ARG002
        """Load the newest checkpoint of the name."""
        dcp.load(like, storage_reader=KvioReader(self._tier, "run"))
        return like


WAYS: dict[str, Callable[[Path, kvio.StagingTier], Way]] = {
    "torch.save, fsync": TorchSave,
    "async_save, stock writer*": StockAsyncSave,
    "torch.save, tier.open()": TierFile,
    "async_save, KvioWriter, tier": TierAsyncSave,
}


@dataclasses.dataclass
class Times:
    """Seconds of each save of a run: training held up, and until durable; and of all of it."""

    stalls: list[float] = dataclasses.field(default_factory=list)
    durable: list[float] = dataclasses.field(default_factory=list)
    training: float = 0.0

    def save(self, way: Way, state: State, step: int) -> Saved:
        """Save and note how long that held up; when it is durable is noted by its thread."""
        begun = time.perf_counter()
        saved = way.save(state, step)
        self.stalls.append(time.perf_counter() - begun)
        saved.add_done_callback(lambda _: self.durable.append(time.perf_counter() - begun))
        return saved


def train(way: Way, text: Any, arguments: argparse.Namespace) -> tuple[Times, State]:
    """Train and save every few steps; the state at the end, which the last save has."""
    torch.manual_seed(arguments.seed)
    model = Model(arguments.width, arguments.layers)
    optimizer = torch.optim.AdamW(model.parameters())
    times, saves = Times(), []
    begun = time.perf_counter()
    for step in range(1, arguments.steps + 1):
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,)).tolist()
        batch = torch.stack([text[at : at + CONTEXT + 1] for at in starts]).long()
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()
        if step % arguments.every == 0:
            saves.append(times.save(way, state_of(model, optimizer, step), step))
    times.training = time.perf_counter() - begun
    for save in saves:
        save.result()
    return times, state_of(model, optimizer, arguments.steps)


def run_way(name: str, root: Path, tier: kvio.StagingTier, arguments: Any) -> tuple[str, ...]:
    """Train one way, load its last checkpoint and compare: a row of the table."""
    way = WAYS[name](root, tier)
    times, state = train(way, read_text(), arguments)
    tier.barrier()
    loaded = way.load(arguments.steps, empty_like(state))
    nbytes = sum(value.nbytes for value in state.values() if torch.is_tensor(value))
    return (
        name,
        str(len(times.stalls)),
        f"{nbytes / kvio.MiB:.1f}",
        f"{times.stalls[0] * 1e3:.1f} ms",
        f"{statistics.median(times.stalls) * 1e3:.1f} ms",
        f"{max(times.stalls) * 1e3:.1f} ms",
        f"{statistics.median(times.durable) * 1e3:.0f} ms",
        f"{times.training:.1f} s",
        "identical" if equal(state, loaded) else "DIFFERENT",
    )


def run(arguments: argparse.Namespace) -> bool:
    """Train every way and print the table; False if a checkpoint differs."""
    with (
        tempfile.TemporaryDirectory(prefix=".async-checkpoint-", dir=arguments.root) as directory,
        kvio.open_store(arguments.backend, root=directory, durability="durable") as store,
        kvio.stage(store, arguments.capacity, populate=True, spool=directory) as tier,
    ):
        rows = [run_way(name, Path(directory), tier, arguments) for name in WAYS]
    title = f"a checkpoint every {arguments.every} of {arguments.steps} steps"
    print_table(title, HEADINGS, rows)
    print("* syncs its files, not their directory: a power cut may take their names")
    return all(row[-1] == "identical" for row in rows)


def print_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns under a title."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    print(f"{title}\n")
    for first, *others in (headings, *rows):
        numbers = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        print(f"{first:{widths[0]}}", *numbers, sep="  ")
    print()


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0, 1 if a checkpoint differed, 2 if it cannot be run as asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(), help="directory to store in (here)")
    parser.add_argument("--backend", default="hybrid", help="a POSIX backend (hybrid)")
    parser.add_argument("--capacity", default="256MiB", help="of the staging tier (256MiB)")
    parser.add_argument("--steps", type=int, default=8, help="of training, each way (8)")
    parser.add_argument("--every", type=int, default=2, help="steps from save to save (2)")
    parser.add_argument("--width", type=int, default=256, help="of the model (256)")
    parser.add_argument("--layers", type=int, default=4, help="of the model (4)")
    parser.add_argument("--threads", type=int, default=1, help="that train (1)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    if min(arguments.every, arguments.width, arguments.layers, arguments.threads) < 1:
        parser.error("--every, --width, --layers and --threads must be at least 1")
    if arguments.steps < 1 or arguments.steps % arguments.every:
        parser.error("--steps must be a multiple of --every: the last step is saved")
    warnings.filterwarnings("ignore", "torch.distributed is .*", UserWarning)  # one process
    torch.set_num_threads(arguments.threads)
    try:
        return 0 if run(arguments) else 1
    except (kvio.KvioError, OSError) as exc:
        print(f"async_checkpoint: {exc}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
