"""The compose file and the Kubernetes manifests are valid and name existing settings, ports and labels."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_validate import validate

from balance_service.errors import ConfigurationError
from balance_service.http.app import HttpServer
from balance_service.http.peers.trust import PeerTrust
from balance_service.settings import Settings, load_settings
from tests.support.fakes import IdleInstance
from tests.support.shipped import ROUTES

ROOT = Path(__file__).resolve().parents[3]
KUBERNETES = ROOT / "deploy" / "kubernetes" / "base"
OPEN = ROOT / "deploy" / "kubernetes" / "open"
OLDEST, NEWEST = "1.32", "1.36"


def documents() -> list[dict[str, Any]]:
    names = kustomization()["resources"]
    return [d for name in names for d in yaml.safe_load_all((KUBERNETES / name).read_text())]


def kustomization() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())
    return loaded


def rendered() -> list[dict[str, Any]]:
    """The output of kustomize for the base: adds labels to metadata, templates and selectors, except of budgets."""
    (pairs,) = (entry["pairs"] for entry in kustomization()["labels"])
    made = documents()
    for document in made:
        document["metadata"]["labels"] = pairs
        spec = document.get("spec", {})
        if document["kind"] == "Service":
            spec["selector"] = pairs
        if document["kind"] == "StatefulSet":
            spec["selector"] = {"matchLabels": pairs}
            spec["template"].setdefault("metadata", {})["labels"] = pairs
    return made


def the(kind: str, name: str = "balance-service") -> dict[str, Any]:
    return next(d for d in rendered() if d["kind"] == kind and d["metadata"]["name"] == name)


def pod() -> dict[str, Any]:
    spec: dict[str, Any] = the("StatefulSet")["spec"]["template"]["spec"]
    return spec


def in_pod(variable: str) -> str:
    """A variable of the first replica, in the namespace `payments`."""
    given = next(str(e["value"]) for e in pod()["containers"][0]["env"] if e["name"] == variable)
    return given.replace("$(POD_NAME)", "balance-service-0").replace("$(POD_NAMESPACE)", "payments")


def settings_file() -> dict[str, str]:
    lines = (KUBERNETES / "settings.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def opened() -> dict[str, str]:
    """The settings of the overlay for trying."""
    (merged,) = yaml.safe_load((OPEN / "kustomization.yaml").read_text())["configMapGenerator"]
    return settings_file() | dict(line.split("=", 1) for line in merged["literals"])


def compose() -> dict[str, Any]:
    # As compose interpolates it without an environment; `$$` is a dollar sign.
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (ROOT / "docker-compose.yml").read_text())
    loaded: dict[str, Any] = yaml.safe_load(text.replace("$$", "$"))
    return loaded


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_manifest_is_strictly_valid(version: str) -> None:
    for document in rendered():
        validate(document, version, strict=True)


def test_an_unknown_field_is_found() -> None:
    wrong = the("StatefulSet")
    wrong["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}

    with pytest.raises(Exception, match="readinesProbe"):
        validate(wrong, NEWEST, strict=True)


def test_the_kustomization_lists_every_manifest() -> None:
    files = {path.name for path in KUBERNETES.glob("*.yaml")} - {"kustomization.yaml"}

    assert files == set(kustomization()["resources"])


def known_settings() -> set[str]:
    return set(load_settings().printable())


@pytest.mark.parametrize(
    "environment",
    [
        settings_file(),
        compose()["services"]["balance-service"]["environment"],
        {e["name"]: e for e in pod()["containers"][0]["env"] if e["name"].startswith("BALANCE_")},
    ],
    ids=["config map", "compose", "pod"],
)
def test_every_variable_is_a_setting(environment: dict[str, Any]) -> None:
    assert environment
    assert set(environment) <= known_settings()


@pytest.mark.parametrize(
    "environment",
    [settings_file(), compose()["services"]["balance-service"]["environment"]],
    ids=["config map", "compose"],
)
def test_the_service_accepts_its_settings(environment: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        if value is not None:
            monkeypatch.setenv(name, str(value))

    assert isinstance(load_settings(), Settings)


@pytest.mark.parametrize(
    "environment",
    [opened(), compose()["services"]["balance-service"]["environment"]],
    ids=["overlay", "compose"],
)
def test_the_files_state_that_anonymous_clients_are_allowed(
    environment: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        if value is not None:
            monkeypatch.setenv(name, str(value))
    settings = load_settings()

    assert "BALANCE_HTTP_HOST=0.0.0.0" in (ROOT / "deploy" / "Dockerfile").read_text()
    assert settings.admits_anonymous == settings.allow_anonymous
    assert "balance-service" in settings.allowed_hosts


def test_the_base_admits_no_anonymous_client(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (settings_file() | {"BALANCE_HTTP_PORT": "0"}).items():
        monkeypatch.setenv(name, value)
    settings = load_settings()

    assert settings.admits_anonymous
    assert not settings.allow_anonymous
    with pytest.raises(ConfigurationError, match="BALANCE_ALLOW_ANONYMOUS"):
        HttpServer(settings, IdleInstance(), ())


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_the_overlay_for_trying_is_the_base_and_admits_anonymous_clients() -> None:
    made = {}
    for folder in (KUBERNETES, OPEN):
        done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, check=True)
        # The name of a config map has a digest of its contents.
        made[folder] = re.sub(r"balance-service-[0-9a-z]{10}\b", "balance-service", done.stdout)

    assert "BALANCE_ALLOW_ANONYMOUS" not in made[KUBERNETES]
    assert made[OPEN].replace('  BALANCE_ALLOW_ANONYMOUS: "true"\n', "") == made[KUBERNETES]


def test_peers_reach_each_other_through_the_headless_service() -> None:
    stateful, peers = the("StatefulSet"), the("Service", "balance-service-peers")
    name, address = peers["metadata"]["name"], in_pod("BALANCE_APPLICATION_SERVER")

    assert peers["spec"]["clusterIP"] == "None"
    assert stateful["spec"]["serviceName"] == name
    assert address == f"balance-service-0.{name}.payments.svc.cluster.local:{settings_file()['BALANCE_HTTP_PORT']}"
    trust = PeerTrust(allow_list=[in_pod("BALANCE_PEER_ALLOW_LIST")])
    assert trust.allows(address)
    assert not trust.allows("balance-service-0.another.payments.svc.cluster.local:5051")
    assert not trust.allows(address.replace("payments", "elsewhere"))
    assert load_settings(application_server=address).application_server == address


def test_services_and_probes_use_the_ports_of_the_container() -> None:
    (container,) = pod()["containers"]
    ports = {port["name"]: str(port["containerPort"]) for port in container["ports"]}

    assert ports == {"http": settings_file()["BALANCE_HTTP_PORT"], "health": settings_file()["BALANCE_HEALTH_PORT"]}
    for service in ("balance-service", "balance-service-peers"):
        assert [p["targetPort"] for p in the("Service", service)["spec"]["ports"]] == ["http"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["port"] == "health"


def test_the_network_policy_allows_the_namespace_to_use_http_and_all_clients_to_use_probes() -> None:
    spec = the("NetworkPolicy")["spec"]
    by_port = {rule["ports"][0]["port"]: rule.get("from") for rule in spec["ingress"]}

    assert spec["policyTypes"] == ["Ingress"]
    assert by_port == {"http": [{"podSelector": {}}], "health": None}


def test_probes_and_health_checks_request_existing_routes() -> None:
    (container,) = pod()["containers"]
    asked = {container[f"{probe}Probe"]["httpGet"]["path"] for probe in ("startup", "liveness", "readiness")}
    asked.add(the("StatefulSet")["spec"]["template"]["metadata"]["annotations"]["prometheus.io/path"])

    assert asked <= {route.path for route in ROUTES}


def test_selectors_match_the_pods() -> None:
    labels = the("StatefulSet")["spec"]["template"]["metadata"]["labels"]
    spreads = [s["labelSelector"]["matchLabels"] for s in pod()["topologySpreadConstraints"]]

    assert spreads == [labels, labels]
    assert the("PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    assert the("NetworkPolicy")["spec"]["podSelector"]["matchLabels"] == labels


def test_only_state_and_scratch_are_writable() -> None:
    (container,) = pod()["containers"]
    security = container["securityContext"]
    claims = [claim["metadata"]["name"] for claim in the("StatefulSet")["spec"]["volumeClaimTemplates"]]
    volumes = {*claims, *(volume["name"] for volume in pod()["volumes"])}
    written = {m["mountPath"] for m in container["volumeMounts"] if not m.get("readOnly")}

    assert security["readOnlyRootFilesystem"]
    assert not security["allowPrivilegeEscalation"]
    assert security["capabilities"]["drop"] == ["ALL"]
    assert {m["name"] for m in container["volumeMounts"]} == volumes
    assert written == {"/tmp", settings_file()["BALANCE_STATE_DIR"]}


def test_the_user_of_the_container_is_the_user_of_the_image() -> None:
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    security = pod()["securityContext"]

    assert f"USER {security['runAsUser']}:{security['runAsGroup']}" in dockerfile
    assert f"VOLUME {settings_file()['BALANCE_STATE_DIR']}" in dockerfile


def test_any_user_of_the_group_root_may_write_the_state() -> None:
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()

    assert f"install -d -o balance -g root -m 0770 {settings_file()['BALANCE_STATE_DIR']}" in dockerfile


def test_only_root_can_write_the_folder_from_which_modules_are_imported() -> None:
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    last = dockerfile.rpartition("\nFROM ")[2]

    (folder,) = re.findall(r"^WORKDIR (\S+)$", last, re.MULTILINE)
    assert f"install -d {folder}" in last
    assert folder not in {m["mountPath"] for m in pod()["containers"][0]["volumeMounts"]}


def test_the_image_installs_only_wheels_except_pyspark() -> None:
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text().replace("\\\n", "")
    installs = re.findall(r"pip install [^&\n]*-r \S+", dockerfile)

    assert 'ENV WHEELS="--only-binary :all:"' in dockerfile
    assert len(installs) == 4
    assert all("$WHEELS" in install for install in installs)
    assert {name for install in installs for name in re.findall(r"--no-binary (\S+)", install)} == {"pyspark"}


def test_all_files_of_the_wheel_are_in_the_build_context_and_copied() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    made_of = {*wheel["packages"], *wheel["force-include"], project["project"]["readme"], "deploy/image/trim.sh"}
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copies = re.findall(r"^COPY (?!--)(.*) \S+$", (ROOT / "deploy" / "Dockerfile").read_text(), re.MULTILINE)
    copied = {path for paths in copies for path in paths.split()}

    for there in (sent, copied):
        assert [part for part in made_of if not any(part == t or part.startswith(f"{t}/") for t in there)] == []


def test_compose_drops_all_capabilities_of_every_container() -> None:
    services = compose()["services"]

    assert {name: service["cap_drop"] for name, service in services.items()} == {name: ["ALL"] for name in services}
    unconfined = [name for name, s in services.items() if s["security_opt"] != ["no-new-privileges:true"]]
    assert unconfined == []


def _started(tmp_path: Path, name: str, **given: str) -> str:
    """Runs the entrypoint of a service as compose does, with a folder of the test for all its volumes."""
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    (folder / "balance-service").write_text('#!/bin/sh\necho "$BALANCE_PEER_SECRET" "$@"\n')
    (folder / "balance-service").chmod(0o755)
    service = compose()["services"][name]
    command = [*service["entrypoint"], *service.get("command", [])]
    for volume in ("/var/lib/balance-service", "/run/balance-peers"):
        command = [part.replace(volume, str(tmp_path)) for part in command]
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", **given}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def test_compose_makes_a_secret_for_its_replicas_once_unless_there_is_one(tmp_path: Path) -> None:
    _started(tmp_path, "prepare")
    secret = (tmp_path / "secret").read_text().strip()
    _started(tmp_path, "prepare")

    assert len(secret) >= 40
    assert (tmp_path / "secret").read_text().strip() == secret
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    assert _started(tmp_path, "balance-service") == f"{secret} serve\n"
    assert _started(tmp_path, "balance-service", BALANCE_PEER_SECRET="a secret of ours") == "a secret of ours serve\n"
    volumes = {name: compose()["services"][name]["volumes"] for name in ("prepare", "balance-service")}
    assert "peers:/var/lib/balance-service" in volumes["prepare"]
    assert "peers:/run/balance-peers:ro" in volumes["balance-service"]


def test_every_image_of_the_compose_file_can_be_replaced() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    images = re.findall(r"^\s+image: (.*)$", text, re.MULTILINE)

    assert images
    assert all(re.fullmatch(r"\$\{\w+_IMAGE:-[^}:]+:[^}:@]+(@sha256:[0-9a-f]{64})?\}", image) for image in images)


def test_prometheus_scrapes_the_port_of_the_service() -> None:
    config = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    (found,) = job["dns_sd_configs"]
    (published,) = compose()["services"]["balance-service"]["ports"]

    assert found["names"] == ["balance-service"]
    assert published.endswith(f":{found['port']}")
