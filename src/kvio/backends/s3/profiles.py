"""What the user's AWS profile says of region, endpoint and credentials, as botocore reads it.

Without botocore, which boto3 brings, or without such files, a profile says nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from kvio.errors import ConfigError

if TYPE_CHECKING:
    from obstore.store import S3Credential

_FILES: Final = {
    "AWS_CONFIG_FILE": "~/.aws/config",
    "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials",
}
#: How long credentials are used before botocore is asked again; it renews those that end in 10 min.
_USED_FOR: Final = timedelta(minutes=10)


def settings() -> dict[str, str]:
    """Return the profile's ``region`` and ``endpoint_url``, of S3 before that of all services.

    Raises:
        ConfigError: there is no profile of the name in AWS_PROFILE.
    """
    session = _session()
    if session is None:
        return {}
    from botocore.exceptions import BotoCoreError

    try:
        profile = session.get_scoped_config()
        services = session.full_config.get("services", {}).get(profile.get("services"), {})
    except BotoCoreError as exc:
        raise ConfigError(f"the AWS profile cannot be used: {exc}") from None
    of_s3 = services.get("s3", {}) if isinstance(services, dict) else {}
    found = {
        "region": profile.get("region"),
        "endpoint_url": of_s3.get("endpoint_url") or profile.get("endpoint_url"),
    }
    if os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true":
        del found["endpoint_url"]
    return {name: value for name, value in found.items() if value}


def credentials() -> Callable[[], S3Credential] | None:
    """Return what provides the credentials of the profile: its keys, SSO, roles, a process.

    None: botocore is not installed, there are no such files, or they hold none.

    Raises:
        ConfigError: the profile cannot be used.
    """
    session = _session()
    if session is None:
        return None
    from botocore.exceptions import BotoCoreError

    try:
        found = session.get_credentials()
    except BotoCoreError as exc:
        raise ConfigError(f"the AWS profile cannot be used: {exc}") from None
    if found is None:
        return None

    def provide() -> S3Credential:
        frozen = found.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _USED_FOR,
        }

    return provide


def _session() -> Any:
    """Return botocore's session; None if there is none, or nothing for it to read."""
    paths = (os.environ.get(name) or path for name, path in _FILES.items())
    if not any(os.path.exists(os.path.expanduser(path)) for path in paths):
        return None
    try:
        from botocore.session import Session
    except ModuleNotFoundError:
        return None
    return Session()
