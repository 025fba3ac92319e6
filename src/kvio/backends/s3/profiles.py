"""What the user's AWS profile says of region, endpoint and credentials, as botocore reads it.

Without botocore, which boto3 brings, or without such files, a profile says nothing.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kvio.errors import ConfigError

if TYPE_CHECKING:
    from obstore.store import S3Credential

T = TypeVar("T")

_FILES: Final = {
    "AWS_CONFIG_FILE": "~/.aws/config",
    "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials",
}
#: How long credentials are used before botocore is asked again; it renews those that end in 10 min.
_USED_FOR: Final = timedelta(minutes=10)


def settings() -> dict[str, str]:
    """Return the profile's ``region`` and ``endpoint_url``, of S3 before that of all services.

    Raises:
        ConfigError: there is no profile of the name in AWS_PROFILE, or the files are no profiles.
    """
    session = _session()
    if session is None:
        return {}
    profile, services = _asked(lambda: (session.get_scoped_config(), session.full_config))
    of_service = services.get("services", {}).get(profile.get("services"), {})
    of_s3 = of_service.get("s3", {}) if isinstance(of_service, dict) else {}
    found = {
        "region": profile.get("region"),
        "endpoint_url": of_s3.get("endpoint_url") or profile.get("endpoint_url"),
    }
    if os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true":
        del found["endpoint_url"]
    return {name: value for name, value in found.items() if value}


class Credentials:
    """Provides the credentials of the profile: its keys, SSO, roles, a program.

    They are looked for at the first call, which may run a program or make a request. The service
    of EC2 that hands out credentials is asked for AWS alone (*aws*): no other server gets these.
    """

    def __init__(self, *, aws: bool) -> None:
        self._aws = aws
        self._lock = threading.Lock()
        self._found: Any = None
        self._looked = False

    def there(self) -> bool:
        """Return whether there are any.

        Raises:
            ConfigError: the profile cannot be used.
        """
        with self._lock:
            if not self._looked:
                self._found = self._look()
                self._looked = True
            return self._found is not None

    def _look(self) -> Any:
        session = _session()
        if session is None:
            return None

        def look() -> Any:
            if not self._aws:
                session.get_component("credential_provider").remove("iam-role")
            return session.get_credentials()

        return _asked(look)

    def __call__(self) -> S3Credential:
        """Return credentials that hold for ten minutes at least, as obstore asks for them."""
        if not self.there():
            raise ConfigError("the AWS profile has no credentials")
        frozen = _asked(self._found.get_frozen_credentials)
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _USED_FOR,
        }


def _asked(ask: Callable[[], T]) -> T:
    """Return what botocore answers.

    Raises:
        ConfigError: it cannot.
    """
    try:
        return ask()
    except failures() as exc:
        why = reason(exc)
    raise ConfigError(f"the AWS profile cannot be used: {why}")


def failures() -> tuple[type[Exception], ...]:
    """Return what botocore raises where a profile, or what a program printed, is not as it must."""
    from botocore.exceptions import BotoCoreError, ClientError

    own = (OSError, ValueError, KeyError, AttributeError, TypeError, RuntimeError)
    return (BotoCoreError, ClientError, *own)


def reason(exc: Exception) -> str:
    """Return what may be repeated of such an error: not what a program printed."""
    from botocore.exceptions import CredentialRetrievalError

    name = type(exc).__name__
    return name if isinstance(exc, CredentialRetrievalError) else f"{name}: {exc}"


def readable() -> bool:
    """Return whether there is a file that may hold a profile, and botocore to read it."""
    paths = (os.environ.get(name) or path for name, path in _FILES.items())
    there = any(os.path.exists(os.path.expanduser(path)) for path in paths)
    return there and importlib.util.find_spec("botocore") is not None


def _session() -> Any:
    """Return botocore's session; None if there is nothing to read."""
    if not readable():
        return None
    from botocore.session import Session

    return Session()
