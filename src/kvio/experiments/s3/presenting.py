"""What a run leaves: one record, its tables and its plot; and several runs made one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Final

from kvio import ConfigError
from kvio.experiments.machine import Machine
from kvio.experiments.measure import Sample, summarise
from kvio.experiments.record import Record, present
from kvio.experiments.s3.drawing import drawer
from kvio.experiments.s3.order import CONTENDERS, FLOOR, HEAD, LIST
from kvio.experiments.s3.server import Medium
from kvio.experiments.s3.tables import tables

NAME: Final = "s3"
TITLE: Final = "Objects by five S3 libraries: through kvio, by hand, and as they come"
#: Rounds of one run keep apart from those of another.
_ROUNDS_OF_A_RUN: Final = 1000


def show(
    samples: Sequence[Sample],
    *,
    machine: Machine,
    medium: Medium,
    options: dict[str, Any],
    notes: list[str],
    results: Path | None,
) -> None:
    """Print tables, and leave JSON, Markdown and PNG."""
    moved = [sample for sample in samples if sample.operation not in (HEAD, LIST)]
    record = Record(
        experiment=NAME,
        title=TITLE,
        machine=machine,
        file_system=medium,
        options=options,
        notes=notes,
        samples=samples,
        summaries=summarise(moved, FLOOR, CONTENDERS),
    )
    present(record, tables(samples), results, drawer(samples))


def merge(folders: Sequence[Path], results: Path | None) -> int:
    """Join runs, of one library each for example, into one record.

    Returns:
        0; 1 if a byte differed in one of them.

    Raises:
        ConfigError: a folder holds no run of this experiment.
    """
    paths = [path for folder in folders for path in _runs_in(folder, results)]
    runs = [_load(path) for path in paths]
    samples = [
        replace(sample, round=sample.round + at * _ROUNDS_OF_A_RUN)
        for at, run in enumerate(runs)
        for sample in _samples(run)
    ]
    first = runs[0]
    machines = list(dict.fromkeys(run["machine"]["processor"] for run in runs))
    notes = list(dict.fromkeys(note for run in runs for note in run["notes"]))
    notes.insert(0, f"{len(runs)} runs joined; ratios are made within a run")
    if len(machines) > 1 or len({run["machine"]["processors_usable"] for run in runs}) > 1:
        notes.insert(1, f"NOT COMPARABLE: different machines: {', '.join(machines)}")
    show(
        samples,
        machine=_machine(first["machine"]),
        medium=Medium(**first["file_system"]),
        options={"merged": [run["options"] for run in runs]},
        notes=notes,
        results=results,
    )
    return 1 if any(sample.intact is False for sample in samples) else 0


def _runs_in(folder: Path, results: Path | None) -> list[Path]:
    """Find runs in a folder or below it; one that was merged before is not taken again."""
    if not folder.is_dir():
        raise ConfigError(f"--merge {folder}: no such folder")
    found = [folder / f"{NAME}.json"]
    if not found[0].is_file():
        found = sorted(folder.glob(f"*/{NAME}.json"))
    mine = None if results is None else (results / f"{NAME}.json").resolve()
    found = [path for path in found if path.resolve() != mine]
    if not found:
        raise ConfigError(f"--merge {folder}: no {NAME}.json in it or one below")
    return found


def _load(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise ConfigError(f"--merge {path}: no JSON") from None
    if not isinstance(content, dict) or content.get("experiment") != NAME:
        raise ConfigError(f"--merge {path}: no run of this experiment")
    return content


def _samples(run: Mapping[str, Any]) -> list[Sample]:
    names = {field.name for field in fields(Sample)}
    return [Sample(**{k: v for k, v in one.items() if k in names}) for one in run["samples"]]


def _machine(content: Mapping[str, Any]) -> Machine:
    names = {field.name for field in fields(Machine)}
    known = {name: value for name, value in content.items() if name in names}
    return Machine(**{**known, "load_average": tuple(known["load_average"])})


def versions(names: Sequence[str]) -> dict[str, str]:
    """Tell the versions of distributions that are installed."""
    from importlib import metadata

    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def plain(options: Any) -> dict[str, Any]:
    """Give a dataclass as what JSON can hold."""
    return {name: str(value) for name, value in asdict(options).items()}
