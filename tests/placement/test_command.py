"""`kvio placement` shows what the library says of this machine."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvio.placement import Placement, Topology, parse_cpulist
from tests.cli.running import SCRIPT, complaint, run

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def command() -> Path:
    """Return the installed command; skip where it or its extra is missing."""
    pytest.importorskip("typer", reason="the extra cli is not installed: no typer")
    pytest.importorskip("rich", reason="the extra cli is not installed: no rich")
    if not SCRIPT.exists():
        pytest.skip("kvio is not installed: no kvio command")
    return SCRIPT


def test_it_prints_the_nodes_the_slots_and_why(tmp_path: Path) -> None:
    """The CPUs of all nodes are those of this process, and the explanation is the library's."""
    near = f"path:{tmp_path}"
    done = run("placement", "--map-by", "numa", "--near", near, "--memory", "bind", "--slots", 2)
    machine, _, explanation = done.stdout.decode().partition("\n\n")
    named = [line.partition(": CPUs ")[2] for line in machine.splitlines() if "node " in line]
    shown = [cpus.partition(";")[0] for cpus in named]
    wish = Placement(map_by="numa", near=near, memory="bind")

    assert (done.returncode, done.stderr) == (0, b"")
    assert {cpu for cpus in shown if cpus != "none" for cpu in parse_cpulist(cpus)} == set(
        os.sched_getaffinity(0)
    )
    assert explanation.rstrip("\n") == wish.explain(Topology.from_system(), 2)


def test_it_prints_json(tmp_path: Path) -> None:
    """What a script reads is what the library gives."""
    done = run("placement", "--order", "spread", "--near", f"path:{tmp_path}", "--json")
    content = json.loads(done.stdout)
    slots = Placement(order="spread").slots(Topology.from_system(), 4)

    assert set(content) == {"topology", "near", "slots", "explanation"}
    assert set(content["topology"]["cpus"]) == os.sched_getaffinity(0)
    assert [tuple(slot["cpus"]) for slot in content["slots"]] == [slot.cpus for slot in slots]
    assert set(content["near"]) == {"nodes", "why"}


def test_without_options_there_are_four_slots() -> None:
    """By core, packed."""
    done = run("placement")

    assert "4 slots by core, pack" in done.stdout.decode().splitlines()


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--map-by=die", "'core', 'l3', 'numa', 'socket'"),
        ("--order=far", "'pack', 'spread'"),
        ("--memory=x", "'local', 'bind', 'interleave'"),
        ("--near=disk", "'path:…' or 'cuda:N'"),
        ("--slots=0", "equal to 1"),
        ("--slots=many", "--slots"),
    ],
)
def test_a_wish_that_cannot_be_is_one_line_with_the_choices(option: str, said: str) -> None:
    """Exit status 2."""
    assert said in complaint(run("placement", option), 2)


def test_its_help_fits_80_columns_and_has_examples() -> None:
    """As that of every command."""
    text = run("placement", "--help").stdout.decode()

    assert "Examples:" in text
    assert max(map(len, text.splitlines())) <= 80
