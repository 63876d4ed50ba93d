"""A real Prometheus, with the configuration of `deploy/`, scrapes a running router."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import yaml

from tests.fakes.ports import reserve

DEADLINE_SECONDS = 100.0

T = TypeVar("T")


@contextlib.contextmanager
def running(*command: str, output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process with its output in a file; asked to end afterwards, and made to if it will not."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HOMING_")}
    with output.open("wb") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def eventually(ask: Callable[[], T | None], what: str, process: subprocess.Popen[bytes], output: Path) -> T:
    """What ``ask`` answers once it answers; a process that ended or a passed deadline fails with its output."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        answer = ask()
        if answer is not None:
            return answer
        time.sleep(0.1)
    pytest.fail(f"no {what}; the process (status {process.poll()}) wrote:\n{output.read_text()}")


@pytest.fixture(scope="module")
def admin_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """host:port of a running router's admin plane. Its only worker does not exist."""
    output = tmp_path_factory.mktemp("router") / "output"
    ports = ("--port", "0", "--admin-port", "0")
    with contextlib.ExitStack() as stack:
        nobody = stack.enter_context(reserve())
        worker = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        command = (sys.executable, "-m", "router.cli", "router", "--worker", worker, *ports)
        process = stack.enter_context(running(*command, output=output))

        def ready() -> str | None:
            found = re.search(r"^homing router ready .*admin=http://(\S+)", output.read_text(), re.MULTILINE)
            return found and found[1]

        yield eventually(ready, "router", process, output)


@pytest.fixture(scope="module")
def prometheus_api(
    prometheus: str, deploy: Path, admin_address: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Any]]:
    """Asks a Prometheus that runs `deploy/prometheus/prometheus.yml`, pointed at the router, in quicker steps."""
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((deploy / "prometheus/prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"}
    config["rule_files"] = [str(deploy / "prometheus" / name) for name in config["rule_files"]]
    (router_job,) = (job for job in config["scrape_configs"] if job["job_name"] == "homing-router")
    router_job["static_configs"] = [{"targets": [admin_address]}]
    config["scrape_configs"] = [router_job]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))

    place = reserve()
    output, address = folder / "output", f"127.0.0.1:{place.getsockname()[1]}"
    command = (
        prometheus,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
        "--log.level=warn",
    )
    with (
        place,
        running(*command, output=output) as process,
        httpx.Client(base_url=f"http://{address}/api/v1", timeout=20) as client,
    ):

        def ask(path: str, is_good: Callable[[Any], bool] = bool) -> Any:
            """The first answer that is as it should be: by default not empty."""

            def once() -> Any:
                try:
                    answer = client.get(path)
                except httpx.TransportError:
                    return None
                if answer.is_server_error:  # still loading
                    return None
                data = answer.raise_for_status().json()["data"]
                found = data.get("result", data)
                return found if is_good(found) else None

            return eventually(once, f"answer to {path}", process, output)

        yield ask


def test_the_router_is_a_healthy_target(prometheus_api: Callable[..., Any]) -> None:
    """Prometheus reaches the router under the job name that the rules know, and stores its series."""
    (sample,) = prometheus_api('query?query=up{job="homing-router"} == 1')
    assert sample["value"][1] == "1"
    (build,) = prometheus_api("query?query=homing_build_info")
    assert build["metric"]["version"]

    def is_up(found: Any) -> bool:
        return [(target["health"], target["lastError"]) for target in found["activeTargets"]] == [("up", "")]

    prometheus_api("targets", is_up)  # in the end: a scrape may have taken too long on a busy machine


def test_the_rules_run_without_error(prometheus_api: Callable[..., Any]) -> None:
    """Every rule of `rules.yml` is loaded and evaluates against the router's real series."""

    def of(found: Any) -> list[Any]:
        return [rule for group in found["groups"] for rule in group["rules"]]

    prometheus_api('query?query=ALERTS{alertname="HomingNoWorker"}')
    rules = of(prometheus_api("rules", lambda found: all(rule["health"] != "unknown" for rule in of(found))))
    assert len(rules) == 19
    assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"} == {}


def test_a_router_without_a_worker_raises_the_alarm(prometheus_api: Callable[..., Any]) -> None:
    """With its only worker down, `HomingNoWorker` is pending until its minute has passed; clients would get 503."""
    (alert,) = prometheus_api('query?query=ALERTS{alertname="HomingNoWorker"}')
    assert alert["metric"]["alertstate"] in ("pending", "firing")
    assert alert["metric"]["severity"] == "critical"
