"""Images, compose file and Kubernetes manifest: valid by their schemas, and true of the code."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from router.knobs import knobs
from router.options import parse
from router.settings import Settings
from router.settings_sources import ENV_PREFIX, load_settings

Manifest = dict[str, Any]


def tool(name: str, *arguments: str | Path) -> None:
    """Run a checker of the virtual environment; its complaint is the failure's text."""
    command = [str(Path(sysconfig.get_path("scripts")) / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def compose(deploy: Path) -> Manifest:
    loaded: Manifest = yaml.safe_load((deploy / "compose.yaml").read_text())
    return loaded


@pytest.fixture(scope="module")
def kubernetes(deploy: Path) -> dict[str, Manifest]:
    """The documents by kind."""
    documents = yaml.safe_load_all((deploy / "kubernetes/router.yaml").read_text())
    return {document["kind"]: document for document in documents}


@pytest.fixture(scope="module")
def image_environment(deploy: Path) -> dict[str, str]:
    """The variables that the router's image sets."""
    text = (deploy / "docker/router.Dockerfile").read_text()
    variables = dict(re.findall(r"(?:^ENV|^\s{4})\s*(\w+)=(\S+)", text, re.MULTILINE))
    assert any(name.startswith(ENV_PREFIX) for name in variables)
    return variables


# --- by their schemas ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["router", "shim"])
def test_hadolint_finds_nothing(deploy: Path, name: str) -> None:
    """Both Dockerfiles pass hadolint with no rule switched off."""
    path = deploy / f"docker/{name}.Dockerfile"
    tool("hadolint", path)
    assert "hadolint ignore" not in path.read_text()


def test_compose_file_fits_the_compose_specification(deploy: Path) -> None:
    """`compose.yaml` is valid by the Compose Specification's JSON schema."""
    tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", deploy / "compose.yaml")


def test_kubernetes_manifest_is_strictly_valid(deploy: Path) -> None:
    """Every document is valid by Kubernetes' API schemas, with no key that the API does not know."""
    tool("kubernetes-validate", "--strict", deploy / "kubernetes/router.yaml")


# --- true of the code ----------------------------------------------------------------------------


def test_compose_starts_the_router_with_settings_that_it_knows(
    compose: Manifest, deploy: Path, image_environment: dict[str, str]
) -> None:
    """Flags, variables and file of compose and of the image make valid settings, and the ports published are theirs."""
    router = compose["services"]["router"]
    mounts = dict(volume.split(":")[:2][::-1] for volume in router["volumes"])
    arguments = [str(deploy / mounts[part]) if part in mounts else part for part in router["command"]]
    assert parse(arguments).workers

    settings = load_settings(environ=image_environment, config=deploy / "router.yaml")
    assert (settings.server.host, settings.admin.host) == ("0.0.0.0", "0.0.0.0")
    assert router["ports"] == [
        f"{settings.server.port}:{settings.server.port}",
        f"127.0.0.1:{settings.admin.port}:{settings.admin.port}",
    ]
    assert float(router["stop_grace_period"].rstrip("s")) > settings.server.shutdown_seconds


def test_compose_publishes_only_the_data_port(compose: Manifest) -> None:
    """Every published port but the router's data port is bound to loopback."""
    published = [port for service in compose["services"].values() for port in service.get("ports", ())]
    assert [port for port in published if not port.startswith("127.0.0.1:")] == ["8000:8000"]


def test_compose_router_and_prometheus_name_services_that_exist(compose: Manifest, deploy: Path) -> None:
    """The workers of the router and the targets of Prometheus are services of the compose file."""
    scrape = yaml.safe_load((deploy / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    targets = [target for job in scrape for config in job["static_configs"] for target in config["targets"]]
    workers = load_settings(environ={}, config=deploy / "router.yaml").workers
    hosts = {target.split(":")[0] for target in targets} | {
        worker.url.removeprefix("http://").split(":")[0] for worker in workers
    }
    assert hosts == {"router", "shim-a", "shim-b"}
    assert hosts <= compose["services"].keys()


def test_every_service_has_a_health_check(compose: Manifest, deploy: Path) -> None:
    """Each container is checked: by compose, or by the image that this repository builds."""
    for name, service in compose["services"].items():
        if "build" in service:
            assert "\nHEALTHCHECK " in (deploy.parent / service["build"]["dockerfile"]).read_text(), name
        else:
            assert service["healthcheck"]["test"], name


def test_the_shim_is_started_with_flags_that_it_has(compose: Manifest, deploy: Path) -> None:
    """Every flag that compose or the image passes to `homing shim` is in its help."""
    command = [sys.executable, "-m", "router.cli", "shim", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True).stdout
    image = re.findall(r"--[\w-]+", (deploy / "docker/shim.Dockerfile").read_text().rpartition("\nCMD")[2])
    given = {part for part in (*compose["services"]["shim-a"]["command"], *image) if part.startswith("--")}
    assert given >= {"--dp-size", "--host"}
    assert given <= set(re.findall(r"--[\w-]+", shown))


@pytest.fixture
def pod_settings(kubernetes: dict[str, Manifest], image_environment: dict[str, str], tmp_path: Path) -> Settings:
    """What the router in the pod reads: the ConfigMap's file under the image's variables."""
    path = tmp_path / "router.yaml"
    path.write_text(kubernetes["ConfigMap"]["data"]["router.yaml"])
    return load_settings(environ=image_environment, config=path)


def test_kubernetes_config_map_holds_settings_that_the_router_knows(
    kubernetes: dict[str, Manifest], pod_settings: Settings
) -> None:
    """The ConfigMap's file is accepted, both doors bind the pod's address, and the container's ports are theirs."""
    settings = pod_settings
    assert (settings.server.host, settings.admin.host, settings.log_format) == ("0.0.0.0", "0.0.0.0", "json")
    assert settings.workers
    pod = kubernetes["Deployment"]["spec"]["template"]
    ports = {port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
    assert ports == {"http": settings.server.port, "admin": settings.admin.port}
    assert pod["metadata"]["annotations"]["prometheus.io/port"] == str(settings.admin.port)


def test_kubernetes_router_has_tokenizers(kubernetes: dict[str, Manifest], pod_settings: Settings) -> None:
    """Every model's tokenizer lies on a volume that is mounted and there: else the router would key prompts by text."""
    pod = kubernetes["Deployment"]["spec"]["template"]["spec"]
    mounts = {Path(mount["mountPath"]): mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes.keys() == set(mounts.values())
    assert pod_settings.models
    for model in pod_settings.models:
        assert model.tokenizer is not None
        (mount,) = mounts.keys() & set(model.tokenizer.parents)
        assert "persistentVolumeClaim" in volumes[mounts[mount]]


def test_kubernetes_gives_a_drain_the_time_it_takes(kubernetes: dict[str, Manifest], pod_settings: Settings) -> None:
    """The grace period exceeds the preStop sleep and the drain together: no stream is killed that the drain allows."""
    pod = kubernetes["Deployment"]["spec"]["template"]["spec"]
    sleep, seconds = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    assert pod["terminationGracePeriodSeconds"] > int(seconds) + pod_settings.server.shutdown_seconds


def test_kubernetes_pod_is_confined(kubernetes: dict[str, Manifest]) -> None:
    """Not root, nothing writable but /tmp, no capability, no service links, no token, bounded in memory and CPU."""
    pod = kubernetes["Deployment"]["spec"]["template"]["spec"]
    assert pod["enableServiceLinks"] is False
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    for container in pod["containers"]:
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["limits"].keys() == {"cpu", "memory"}
        writable = [mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")]
        assert writable == ["/tmp"]


def test_the_images_user_is_the_pods(kubernetes: dict[str, Manifest], deploy: Path) -> None:
    """The pod runs as the user whom the image creates."""
    pod = kubernetes["Deployment"]["spec"]["template"]["spec"]
    (user,) = re.findall(r"^USER (\d+):\d+$", (deploy / "docker/router.Dockerfile").read_text(), re.MULTILINE)
    assert pod["securityContext"]["runAsUser"] == int(user)


def test_one_name_selects_the_pods(kubernetes: dict[str, Manifest]) -> None:
    """Service, disruption budget, network policy and deployment select the labels that the pod carries."""
    labels = kubernetes["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert kubernetes["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert kubernetes["Service"]["spec"]["selector"] == labels
    assert kubernetes["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert kubernetes["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels


def test_compose_router_shares_its_state_over_the_redis_beside_it(compose: Manifest, deploy: Path) -> None:
    """The Redis of the compose file is one that the router is told of, and whose client its image has."""
    url = load_settings(environ={}, config=deploy / "router.yaml").shared.redis_url
    assert url is not None
    assert urlsplit(url).hostname in compose["services"]
    assert "'.[redis]'" in (deploy / "docker/router.Dockerfile").read_text()


def test_the_readme_names_only_settings_alerts_and_files_that_there_are(deploy: Path) -> None:
    """Every dotted setting, every alert and every file or folder in backticks exists."""
    quoted = set(re.findall(r"`([^`\s]+)`", (deploy / "README.md").read_text()))
    sections = "|".join({knob.path[0] for knob in knobs() if len(knob.path) > 1})
    named = {word for word in quoted if re.fullmatch(rf"(?:{sections})\.[a-z_]+", word) and not word.endswith(".yaml")}
    assert named >= {"shared.redis_url", "auth.keys_file"}
    assert named <= {knob.key for knob in knobs()}
    alerts = {word for word in quoted if re.fullmatch(r"Homing[A-Z]\w+", word)}
    assert alerts
    assert alerts <= set(re.findall(r"alert: (\w+)", (deploy / "prometheus/rules.yml").read_text()))
    paths = {word for word in quoted if re.fullmatch(r"[\w./-]*(/|\.(yaml|yml|json|py|Dockerfile))", word)}
    places = (deploy, deploy / "prometheus", deploy / "grafana")
    assert [path for path in paths if not any((place / path).exists() for place in places)] == []
