"""The commands, and how the process ends: exit statuses, signals, closed pipes."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Annotated, Any, Final, NoReturn

import typer

import kvio
from kvio.cli import blocks, checks, experiments, media, placement, shared, staging
from kvio.cli.output import INTERRUPTED, complain, forget_stdout, guarded

_EPILOG: Final = """\b
STORE is a directory, or a URL with options:
  /mnt/kv
  hybrid:///mnt/kv?durability=durable
  posix-direct:///mnt/kv?layout=plain

\b
First steps:
  kvio doctor /mnt/kv                what can this medium do?
  kvio put /mnt/kv weights/0 w.bin   store a file as a block
  kvio get /mnt/kv weights/0 w.bin   read it back, verified
  kvio verify /mnt/kv                check every block

\b
Exit status: 0 all well, 1 a block is missing or corrupt, 2 anything else,
130 interrupted.
"""

#: The first ancestor of typer's usage errors that can say what is wrong. Typer brought its own
#: click in 0.27, so that the class has no one name to import.
_UsageError: Final[Any] = next(
    kind for kind in reversed(typer.BadParameter.__mro__) if hasattr(kind, "format_message")
)

app = typer.Typer(
    name="kvio",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _print_version(wanted: bool) -> None:  # noqa: FBT001  # typer calls it so
    if wanted:
        typer.echo(f"kvio {kvio.__version__}")
        raise typer.Exit


@app.callback()
def _kvio(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Store blocks of bytes on any storage: fast, atomic, verified."""


def _register(commands: Sequence[tuple[str, Callable[..., None], str]]) -> None:
    for name, command, epilog in commands:
        app.command(name, epilog=f"\b\nExamples:\n{epilog}")(guarded(command))


_register(
    (
        *(*media.COMMANDS, *blocks.COMMANDS, *checks.COMMANDS),
        *(*experiments.COMMANDS, *staging.COMMANDS, *placement.COMMANDS),
    )
)
app.add_typer(experiments.experiment, name="experiment")
app.add_typer(shared.shared, name="shared")


def run(arguments: Sequence[str]) -> int:
    """Run one command line and give its exit status; nothing a user can cause raises."""
    signal.signal(signal.SIGTERM, _terminated)
    command = typer.main.get_command(app)
    try:
        status: Any = command.main(
            list(arguments) or ["--help"], prog_name="kvio", standalone_mode=False
        )
        sys.stdout.flush()
    except _UsageError as exc:
        return complain(f"{exc.format_message().rstrip('.')}; try: {_path_of(exc)} --help")
    except KeyboardInterrupt:
        status = INTERRUPTED
    except BrokenPipeError:
        status = forget_stdout()
    return int(status or 0)


def _path_of(exc: Any) -> str:
    """Name the command whose use was wrong."""
    context = getattr(exc, "ctx", None)
    return "kvio" if context is None else str(context.command_path)


def _terminated(number: int, _frame: FrameType | None) -> NoReturn:
    """Leave by way of all cleaning up."""
    raise SystemExit(128 + number)
