"""Register the commands and map errors, signals and closed pipes to exit statuses."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Annotated, Any, Final, NoReturn

import typer

import kvio
from kvio.cli import bench, blocks, checks, media, placement, shared, staging
from kvio.cli.output import INTERRUPTED, complain, forget_stdout, guarded

_EPILOG: Final = """\b
STORE is a directory, or a URL with options:
  /mnt/kv
  hybrid:///mnt/kv?durability=durable
  posix-direct:///mnt/kv?layout=plain

\b
First steps:
  kvio doctor /mnt/kv                test what this file system supports
  kvio put /mnt/kv weights/0 w.bin   store a file as a block
  kvio get /mnt/kv weights/0 w.bin   read it back, verified
  kvio verify /mnt/kv                check every block

\b
Exit status: 0 success, 1 a block is missing or corrupt, 2 any other error,
130 interrupted.
"""

#: The base class of typer's usage errors that has format_message. Since typer 0.27 bundles its own
#: click, the class has no fixed import path.
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


def _print_version(wanted: bool) -> None:  # noqa: FBT001  # typer's calling convention
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
    """Store and verify blocks of bytes on file systems and S3."""


def _register(commands: Sequence[tuple[str, Callable[..., None], str]]) -> None:
    for name, command, epilog in commands:
        app.command(name, epilog=f"\b\nExamples:\n{epilog}")(guarded(command))


_register(
    (
        *(*media.COMMANDS, *blocks.COMMANDS, *checks.COMMANDS),
        *(*bench.COMMANDS, *staging.COMMANDS, *placement.COMMANDS),
    )
)
bench.register_moved(app)
app.add_typer(shared.shared, name="shared")


def run(arguments: Sequence[str], typer_app: typer.Typer = app, name: str = "kvio") -> int:
    """Run one command line and return its exit status; user errors raise nothing."""
    signal.signal(signal.SIGTERM, _terminated)
    command = typer.main.get_command(typer_app)
    try:
        status: Any = command.main(
            list(arguments) or ["--help"], prog_name=name, standalone_mode=False
        )
        sys.stdout.flush()
    except _UsageError as exc:
        return complain(f"{exc.format_message().rstrip('.')}; try: {_path_of(exc, name)} --help")
    except KeyboardInterrupt:
        status = INTERRUPTED
    except BrokenPipeError:
        status = forget_stdout()
    return int(status or 0)


def _path_of(exc: Any, name: str) -> str:
    """Return the name of the command that was used wrongly."""
    context = getattr(exc, "ctx", None)
    return name if context is None else str(context.command_path)


def _terminated(number: int, _frame: FrameType | None) -> NoReturn:
    """Exit through all cleanup handlers."""
    raise SystemExit(128 + number)
