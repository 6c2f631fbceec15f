"""The container files keep their promises: they scale, drain, lose nothing, and show nothing to the network."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.setting_checks import unknown_variables
from app.settings import WorkerSettings, child_environment

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    """Return the parsed Compose file."""
    document = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    assert isinstance(document, dict)
    return document


def seconds(text: str) -> float:
    """Read a duration such as 60s."""
    found = re.fullmatch(r"(\d+)s", text)
    assert found, text
    return float(found.group(1))


def test_any_service_can_be_scaled(compose: dict[str, Any]) -> None:
    """No fixed name and, on workers, no published port stands in the way of `--scale worker=4`."""
    for name, service in compose["services"].items():
        assert not {"container_name", "hostname", "network_mode"} & set(service), name
    assert "ports" not in compose["services"]["worker"]
    assert "worker@%h" in compose["services"]["worker"]["command"]


def test_a_worker_has_time_to_drain(compose: dict[str, Any]) -> None:
    """Docker waits longer than the drain takes, and signals reach the worker because it is not process 1."""
    worker = compose["services"]["worker"]
    drain_s = float(worker["environment"]["MILL_DRAIN_S"])
    assert drain_s >= WorkerSettings().drain_s
    assert seconds(worker["stop_grace_period"]) >= drain_s + 15
    assert worker["init"] is True


def test_no_command_hides_behind_a_shell(compose: dict[str, Any]) -> None:
    """Commands are lists, so that SIGTERM meets the program and not a shell."""
    for name, service in compose["services"].items():
        for key in ("command", "entrypoint"):
            assert isinstance(service.get(key, []), list), name
    for line in (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines():
        if line.startswith(("CMD", "ENTRYPOINT")):
            assert line.split(maxsplit=1)[1].startswith("["), line


def test_a_worker_is_asked_for_its_own_health(compose: dict[str, Any]) -> None:
    """The health check names its own node; otherwise any other worker would answer for a dead one."""
    check = compose["services"]["worker"]["healthcheck"]["test"]
    assert "-d worker@$$HOSTNAME" in check[1]


def test_redis_keeps_the_queue(compose: dict[str, Any]) -> None:
    """Redis appends to a file on a volume and evicts nothing."""
    redis = compose["services"]["redis"]
    options = dict(zip(redis["command"][::2], redis["command"][1::2], strict=True))
    assert options["--appendonly"] == "yes"
    assert options["--maxmemory-policy"] == "noeviction"
    assert "redis:/data" in redis["volumes"]
    assert "redis" in compose["volumes"]


def test_everybody_waits_for_a_healthy_redis(compose: dict[str, Any]) -> None:
    """Workers, Flower and the producer start when Redis has loaded its file."""
    assert "healthcheck" in compose["services"]["redis"]
    for name in ("worker", "flower", "producer"):
        assert compose["services"][name]["depends_on"]["redis"]["condition"] == "service_healthy"


def test_nothing_is_shown_to_the_network(compose: dict[str, Any]) -> None:
    """Published ports are bound to this machine, and Flower has a login."""
    published = [port for service in compose["services"].values() for port in service.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)
    assert "FLOWER_BASIC_AUTH" in compose["services"]["flower"]["environment"]


def test_files_belong_to_the_caller(compose: dict[str, Any]) -> None:
    """Whatever writes records runs as the user who started it, never as root."""
    for name in ("worker", "producer"):
        assert compose["services"][name]["user"] == "${UID:-1000}:${GID:-1000}"
    users = re.findall(r"^USER (\S+)", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    assert users[-1] == "1000:1000"


def test_the_containers_know_every_variable(compose: dict[str, Any]) -> None:
    """No MILL_ variable in the file is misspelt."""
    for service in compose["services"].values():
        assert unknown_variables(service.get("environment", {})) == []


def test_the_file_keeps_to_what_both_compose_versions_read(compose: dict[str, Any]) -> None:
    """docker-compose 1.29 knows no `name`, and a Dockerfile `syntax` line would need a registry."""
    assert set(compose) <= {"x-mill", "services", "volumes"}
    assert "syntax=" not in (ROOT / "Dockerfile").read_text(encoding="utf-8")


def test_the_image_gets_the_files_that_it_copies() -> None:
    """Nothing that the Dockerfile copies is left out by .dockerignore, and only that goes in."""
    copied = re.findall(r"^COPY (.+)$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    sources = {source for line in copied for source in line.split()[:-1]}
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[0] == "!"}
    assert sources == let_in
    assert all((ROOT / source).exists() for source in sources)


@pytest.mark.parametrize("command", [["docker-compose"], ["docker", "compose"]], ids=["v1", "v2"])
@pytest.mark.parametrize("profiles", [[], ["--profile", "model", "--profile", "tools"]], ids=["plain", "profiles"])
def test_compose_accepts_the_file(command: list[str], profiles: list[str]) -> None:
    """`config -q` passes without any variable set, on every Compose of this machine."""
    if shutil.which(command[0]) is None or _run([*command, "version"]).returncode != 0:
        pytest.skip(f"{' '.join(command)} is not installed")
    done = _run([*command, *profiles, "config", "-q"])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in child_environment().items() if not name.startswith(("MILL_", "FLOWER_"))}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)
