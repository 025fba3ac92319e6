"""Hydra plugin: implement ``+kvio=BACKEND``, and read KVIO_DLIO for other launchers."""

from __future__ import annotations

import os
import sys

from hydra.core.config_store import ConfigStore

import kvio
from kvio.connectors.dlio.settings import VARIABLE
from kvio.errors import KvioError


def _register() -> None:
    for backend in kvio.backend_names():
        node = {
            "kvio": {
                "backend": backend,
                "root": "" if backend == "memory" else "???",
                "options": {},
                "checkpoint": None,
                "file_mode": None,
                "dir_mode": None,
                "group": None,
                "staging_dir": None,
                "write_threads": None,
                "keep_bytes": 256 * 2**20,
                "decode": None,
            },
            "workload": {"storage": {"storage_type": "parallel_fs", "storage_root": "kvio"}},
            "hydra": {
                "callbacks": {
                    "kvio": {"_target_": "kvio.connectors.dlio.hydra_callback.KvioCallback"}
                }
            },
        }
        ConfigStore.instance().store(group="kvio", name=backend, package="_global_", node=node)


def _install() -> None:
    if not os.environ.get(VARIABLE) or "dlio_benchmark" not in sys.modules:
        return
    try:
        from kvio.connectors.dlio.wiring import install

        install()
    except KvioError as exc:
        sys.exit(f"[KVIO] {exc}")


_register()
_install()
