"""Kubernetes: the manifests are valid, fit together, and start the server that they mean to start."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.service.config import ServiceConfig, load_config
from headrace.service.health import LIVENESS, READINESS
from tests.support.dockerfiles import variables_of
from tests.support.repository import ROOT

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import kubernetes_validate

FOLDER = ROOT / "docker" / "kubernetes"
DOCKERFILE = ROOT / "docker" / "Dockerfile.cpu"
OLDEST, NEWEST = "1.30", "1.37"
OF_OTHERS = {"Kustomization", "ServiceMonitor"}
"""Kinds that the API server itself does not know."""


def manifests() -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in sorted(FOLDER.glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            yield path, document


def the(kind: str) -> dict[str, Any]:
    (found,) = (document for _, document in manifests() if document["kind"] == kind)
    return found


def pod() -> dict[str, Any]:
    return the("Deployment")["spec"]["template"]["spec"]


def container() -> dict[str, Any]:
    (found,) = pod()["containers"]
    return found


def settings() -> dict[str, Any]:
    (text,) = the("ConfigMap")["data"].values()
    return yaml.safe_load(text)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServiceConfig:
    """What the container's command line, the image's variables and the mounted file make together."""
    for name, value in variables_of(DOCKERFILE).items():
        monkeypatch.setenv(name, value)
    command, *flags = container()["args"]
    assert command == "serve"
    mounted = Path(flags[flags.index("--config") + 1])
    assert mounted.name in the("ConfigMap")["data"]
    file = tmp_path / mounted.name
    file.write_text(the("ConfigMap")["data"][mounted.name])
    flags[flags.index("--config") + 1] = str(file)
    return load_config(flags)


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize(
    ("path", "document"),
    [(path, document) for path, document in manifests() if document["kind"] not in OF_OTHERS],
    ids=lambda value: value.name if isinstance(value, Path) else value["kind"],
)
def test_every_manifest_is_valid(path: Path, document: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


def test_a_field_that_kubernetes_does_not_know_would_be_found() -> None:
    wrong = the("Service")
    wrong["spec"]["clusterIp"] = wrong["spec"].pop("clusterIP")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, NEWEST, strict=True)


def test_every_manifest_is_applied_but_those_of_operators() -> None:
    named = set(the("Kustomization")["resources"])
    assert named == {path.name for path, document in manifests() if document["kind"] not in OF_OTHERS}


def test_every_setting_of_the_file_is_in_force(config: ServiceConfig) -> None:
    wanted = ServiceConfig.model_validate({**config.model_dump(), **settings()})
    assert {name: getattr(config, name) for name in settings()} == {
        name: getattr(wanted, name) for name in settings()
    }
    assert not config.insecure


def test_ports_are_those_of_the_server(config: ServiceConfig) -> None:
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    assert ports == {"grpc": config.port, "health": config.health_port, "metrics": config.metrics_port}
    assert config.host == config.health_host == config.metrics_host == "0.0.0.0"
    assert config.control_host == "127.0.0.1"
    for port in the("Service")["spec"]["ports"]:
        assert port["port"] == ports[port["targetPort"]]
    allowed = [port["port"] for rule in the("NetworkPolicy")["spec"]["ingress"] for port in rule["ports"]]
    assert sorted(allowed) == ["grpc", "metrics"]
    offered = {port["name"] for port in the("Service")["spec"]["ports"]}
    assert {one["port"] for one in the("ServiceMonitor")["spec"]["endpoints"]} <= offered


def test_probes_ask_the_health_port_for_what_it_tells(config: ServiceConfig) -> None:
    probes = {name: container()[f"{name}Probe"]["grpc"] for name in ("startup", "readiness", "liveness")}
    assert {probe["port"] for probe in probes.values()} == {config.health_port}
    assert probes["startup"].get("service", "") in READINESS
    assert probes["readiness"].get("service", "") in READINESS
    assert probes["liveness"]["service"] == LIVENESS


def test_a_drain_ends_before_the_pod_is_killed(config: ServiceConfig) -> None:
    flush_s = 5
    assert pod()["terminationGracePeriodSeconds"] >= config.lame_duck_s + config.drain_grace_s + flush_s
    readiness = container()["readinessProbe"]
    assert config.lame_duck_s > readiness["periodSeconds"] * readiness["failureThreshold"]


def test_files_are_mounted_where_the_server_looks(config: ServiceConfig) -> None:
    mounts = {mount["name"]: Path(mount["mountPath"]) for mount in container()["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod()["volumes"]}
    assert config.auth_tokens is not None
    assert config.tls_cert is not None
    assert config.tls_key is not None
    assert config.auth_tokens.parent == mounts["tokens"]
    assert {config.tls_cert.parent, config.tls_key.parent} == {mounts["tls"]}
    assert (config.tls_cert.name, config.tls_key.name) == ("tls.crt", "tls.key")
    assert config.cache == mounts["cache"]
    assert Path(container()["args"][-1]).parent == mounts["config"]
    head = (FOLDER / "kustomization.yaml").read_text().partition("apiVersion")[0]
    secrets = [volume["secret"]["secretName"] for volume in pod()["volumes"] if "secret" in volume]
    assert all(f" {name} " in head for name in secrets)


def test_the_pod_passes_the_restricted_standard() -> None:
    assert pod()["securityContext"]["runAsNonRoot"]
    assert f"USER {pod()['securityContext']['runAsUser']}\n" in DOCKERFILE.read_text()
    assert pod()["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    mine = container()["securityContext"]
    assert not mine["allowPrivilegeEscalation"]
    assert mine["readOnlyRootFilesystem"]
    assert mine["capabilities"] == {"drop": ["ALL"]}


def test_everything_selects_the_same_pods() -> None:
    labels = the("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert the("Deployment")["spec"]["selector"]["matchLabels"] == labels
    assert the("Service")["spec"]["selector"] == labels
    assert the("PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    assert the("NetworkPolicy")["spec"]["podSelector"]["matchLabels"] == labels
    assert the("ServiceMonitor")["spec"]["selector"]["matchLabels"] == the("Service")["metadata"]["labels"]
    # Kubernetes sets HEADRACE_PORT=tcp://… for a Service of this name, which no port can be.
    assert pod()["enableServiceLinks"] is False
