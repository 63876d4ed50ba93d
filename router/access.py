"""What guards the router's doors, and what opens those of workers: keys and certificates, read again when replaced."""

from __future__ import annotations

import secrets

from router.core.keys import Keyring
from router.errors import ConfigError
from router.key_file import read_keys
from router.settings import Settings
from router.tls import Certificate
from router.worker_key import WorkerKey


class Access:
    """Guards of both doors; None where a door stands open. ``reload`` renews them in place.

    ``worker_key`` None: workers ask for none.
    """

    def __init__(self, settings: Settings) -> None:
        """Raises ``ConfigError`` for files that cannot be used."""
        self._keys_file = settings.auth.keys_file
        self.keyring: Keyring | None = None
        if self._keys_file is not None:
            self.keyring = Keyring(read_keys(self._keys_file), secret=secrets.token_bytes(32))
        self.data_tls, self.admin_tls = (
            None if door.tls_certificate is None else Certificate(door.tls_certificate, door.tls_key)
            for door in (settings.server, settings.admin)
        )
        key_file = settings.upstream.api_key_file
        self.worker_key = None if key_file is None else WorkerKey(key_file)

    def reload(self) -> list[str]:
        """Read all files again. Returns what went wrong, a sentence each; what was in force there stays so."""
        complaints: list[str] = []
        for renew in (self._reload_keys, self._reload_certificates, self._reload_worker_key):
            try:
                renew()
            except ConfigError as error:
                complaints.append(str(error))
        return complaints

    def _reload_keys(self) -> None:
        if self.keyring is not None and self._keys_file is not None:
            self.keyring.replace(read_keys(self._keys_file))

    def _reload_certificates(self) -> None:
        for certificate in (self.data_tls, self.admin_tls):
            if certificate is not None:
                certificate.reload()

    def _reload_worker_key(self) -> None:
        if self.worker_key is not None:
            self.worker_key.reload()
