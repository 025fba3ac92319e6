"""Fill in the options of a workload with ``storage_type: parallel_fs``."""

from __future__ import annotations

import importlib.util
from typing import Any, Final

from omegaconf import OmegaConf

STORAGE_TYPE: Final = "parallel_fs"
_PACKAGE: Final = "kvio.connectors.dlio"
#: MLCommons' branch fills in what is missing here from the environment, and prints it in its log;
#: kvio's stores find their own credentials.
_NO_SECRETS: Final = {"access_key_id": "", "secret_access_key": ""}


def goes_through_kvio(workload: Any) -> bool:
    """Return whether a workload uses the storage type that kvio implements, or names none.

    Asked where kvio is configured. Launchers such as mlpstorage name no storage type for a file
    system, so that the environment alone decides.
    """
    return storage_type(workload) in (STORAGE_TYPE, None)


def storage_type(workload: Any) -> str | None:
    """Return the storage type that a workload names, if any."""
    named = (workload.get("storage") or {}).get("storage_type")
    return None if named is None else str(named)


def filled_in(workload: Any) -> Any:
    """Return the workload with kvio's loader, reader and checkpoints where it names no class.

    A named class is kept, also null: ``data_loader_classname: null`` keeps DLIO's loader, which
    then reads through kvio's reader.
    """
    section = "data_reader" if "data_reader" in workload else "reader"
    reader = {"reader_classname": f"{_PACKAGE}.readers.KvioReader"}
    if "data_loader_classname" not in (workload.get(section) or {}):
        reader["data_loader_classname"] = f"{_PACKAGE}.loader.KvioLoader"
        reader["data_loader_sampler"] = "iterative"
    given = {
        "storage": {
            "storage_type": STORAGE_TYPE,
            "storage_root": "kvio",
            "storage_options": _NO_SECRETS,
        },
        section: reader,
        "checkpoint": {"checkpoint_mechanism_classname": f"{_PACKAGE}.checkpoints.{_mechanism()}"},
    }
    return OmegaConf.merge(OmegaConf.create(given), workload)


def _mechanism() -> str:
    return "TorchCheckpointing" if has_library("torch") else "NumpyCheckpointing"


def has_library(name: str) -> bool:
    """Return whether a library is installed, not only kvio's stub of it."""
    spec = importlib.util.find_spec(name)
    return spec is not None and "stand_ins" not in (spec.origin or "")
