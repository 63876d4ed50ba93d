"""A guarded router as an operator runs it: a process with keys and certificates, renewed by SIGHUP."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import httpx

from tests.fakes.certificates import make_certificate, trusting
from tests.integration.control.test_router_process import homing, until

OLD_KEY, NEW_KEY, ADMIN_KEY = "sk-old-0123456789abcdef", "sk-new-0123456789abcdef", "sk-adm-0123456789abcdef"


def write_keys(file: Path, data_key: str) -> None:
    file.write_text(
        f"keys:\n- {{tenant: team, key: {data_key}}}\n- {{tenant: ops, key: {ADMIN_KEY}, roles: [admin]}}\n"
    )


def test_keys_and_certificates_guard_both_doors_and_are_renewed(tmp_path: Path) -> None:
    """HTTPS on both, 401 without a key, the new key after SIGHUP and the old no more; no key is ever written out."""
    keys = tmp_path / "keys.yaml"
    write_keys(keys, OLD_KEY)
    certificate, key = make_certificate(tmp_path)
    doors = ("--port", "0", "--admin-port", "0", "--auth.keys-file", str(keys), "--log-level", "debug")
    files = ("tls-certificate", str(certificate)), ("tls-key", str(key))
    tls = [word for door in ("server", "admin") for name, file in files for word in (f"--{door}.{name}", file)]
    with homing("router", *doors, *tls) as running:
        data, admin = running.words["data"], running.words["admin"]
        assert data.startswith("https://")
        assert admin.startswith("https://")

        def status(url: str, key: str | None) -> int:
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            return httpx.get(url, headers=headers, verify=trusting(certificate)).status_code

        assert status(data + "/livez", None) == 200
        assert [status(data + "/v1/models", key) for key in (None, NEW_KEY, OLD_KEY, ADMIN_KEY)] == [401, 401, 200, 403]
        assert [status(admin + "/metrics", key) for key in (None, OLD_KEY, ADMIN_KEY)] == [401, 403, 200]

        keys.write_text("keys: nonsense")
        running.process.send_signal(signal.SIGHUP)
        until(lambda: "keys.yaml" in running.errors)
        assert status(data + "/v1/models", OLD_KEY) == 200, "a bad file changes nothing"

        write_keys(keys, NEW_KEY)
        running.process.send_signal(signal.SIGHUP)
        until(lambda: status(data + "/v1/models", NEW_KEY) == 200)
        assert status(data + "/v1/models", OLD_KEY) == 401
        code, logged = running.stop()
    assert code == 0
    assert "keys.yaml" in logged, "the bad file is named"
    for secret in (OLD_KEY, NEW_KEY, ADMIN_KEY):
        assert secret not in logged


def test_a_bad_key_file_refuses_to_start(tmp_path: Path) -> None:
    """Exit status 2 and one line; a router that was to be guarded never stands open."""
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"keys: [{{tenant: a, key: {OLD_KEY}, role: admin}}]")
    command = [sys.executable, "-m", "router.cli", "router", "--port", "0", "--admin-port", "0"]
    run = subprocess.run(
        [*command, "--auth.keys-file", str(keys)], capture_output=True, text=True, timeout=100, check=False
    )
    assert run.returncode == 2
    assert run.stderr.startswith("homing router: the key file ")
    assert run.stderr.count("\n") == 1
    assert OLD_KEY not in run.stderr
