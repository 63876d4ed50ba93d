"""TLS for the router's doors, from PEM files that may be replaced while it runs."""

from __future__ import annotations

import ssl
from pathlib import Path

from router.errors import ConfigError


class Certificate:
    """A certificate with its key. ``context`` stays the same object; ``reload`` changes what new connections get."""

    def __init__(self, certificate: Path, key: Path | None) -> None:
        """``certificate``: leaf first, then its chain; ``key`` None: in the same file. Raises ``ConfigError``."""
        self._files = (certificate, key)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(["http/1.1"])
        self.reload()

    def reload(self) -> None:
        """Read the files again. Raises ``ConfigError``; what was in force then stays so."""
        certificate, key = self._files
        # A chain that does not fit its key would be in force by halves: tried where it does no harm.
        for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self.context):
            try:
                context.load_cert_chain(certificate, key, password=_no_password)
            except FileNotFoundError as error:
                name = certificate if not certificate.exists() else key
                raise ConfigError(f"cannot read the TLS file {name}: {error.strerror}") from error
            except (ssl.SSLError, OSError, ValueError) as error:
                raise ConfigError(f"the TLS certificate {certificate} with its key cannot be used: {error}") from error


def _no_password() -> str:
    raise ValueError("the key is encrypted; give one without a passphrase")
