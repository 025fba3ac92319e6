"""Handle ``+kvio=BACKEND``: put the settings into the environment and install kvio into DLIO."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue

from kvio.connectors.dlio.settings import VARIABLE, Settings, store_url
from kvio.errors import ConfigError, KvioError
from kvio.url import SECRET_OPTIONS, locate

_OWN = ("backend", "root")


class KvioCallback(Callback):  # type: ignore[misc, unused-ignore]  # Any where Hydra is absent
    """A callback that Hydra calls before DLIO starts."""

    def on_run_start(self, config: Any, **kwargs: Any) -> None:
        """Configure this run; exit on errors, because Hydra turns exceptions into warnings."""
        del kwargs
        try:
            os.environ[VARIABLE] = settings_of(config.get("kvio")).to_text()
            from kvio.connectors.dlio.wiring import install

            install()
        except KvioError as exc:
            sys.exit(f"[KVIO] {exc}")


def settings_of(group: Any) -> Settings:
    """Return the settings in the group ``kvio`` of a configuration.

    Raises:
        ConfigError: a value is missing, unknown or of the wrong type.
    """
    if group is None:
        raise ConfigError("the callback of kvio needs +kvio=BACKEND")
    try:
        given = OmegaConf.to_container(group, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue:
        raise ConfigError(
            "kvio.root is missing: give a directory or bucket, kvio.root=DIRECTORY"
        ) from None
    if not isinstance(given, dict):
        raise ConfigError("the group kvio must be a mapping: +kvio=BACKEND kvio.root=DIRECTORY")
    rest = {str(name): value for name, value in given.items() if name not in _OWN}
    _refuse_secrets(given)
    data = store_url(str(given["backend"]), str(given["root"]))
    return Settings.from_mapping({**rest, "data": data})


def _refuse_secrets(given: Mapping[Any, Any]) -> None:
    """Refuse secrets, before Hydra writes them to the run's folder."""
    checkpoint = given.get("checkpoint")
    if isinstance(checkpoint, str):
        locate(checkpoint)  # raises ConfigError for credentials in the URL
    named = set(given.get("options") or ()) & SECRET_OPTIONS
    if named or any(f"{name}=" in str(given["root"]) for name in SECRET_OPTIONS):
        raise ConfigError(
            "secrets on the command line would be written to disk by Hydra: set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give options in KVIO_DLIO"
        )
