"""What lies in deploy/ fits the metrics: every name exists, the dashboard loads, each alert says what to do."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.dashboard.metrics_names import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
SERIES = {name: family for family in FAMILIES.values() for name in family.series}
WIDTH = 24
"""Columns of Grafana's grid."""

_NAME = re.compile(r"\bpromptmill_\w+")
_SELECTOR = re.compile(r"(promptmill_\w+)\{([^}]*)\}")
_GROUPING = re.compile(r"\b(?:by|on) \(([^)]*)\)")
_TARGET_LABELS = {"instance", "le"}
"""Labels that Prometheus itself gives a series."""


def dashboard() -> dict[str, Any]:
    """Return the parsed dashboard."""
    document = json.loads((DEPLOY / "grafana" / "promptmill.json").read_text(encoding="utf-8"))
    assert isinstance(document, dict)
    return document


def rules() -> list[dict[str, Any]]:
    """Return the alert rules."""
    document = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text(encoding="utf-8"))
    return [rule for group in document["groups"] for rule in group["rules"]]


def panel_queries() -> list[str]:
    """Return every query of the dashboard, that of the variable too."""
    targets = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    return [*targets, dashboard()["templating"]["list"][1]["definition"]]


def alert_queries() -> list[str]:
    """Return every alert's expression."""
    return [rule["expr"] for rule in rules()]


@pytest.mark.parametrize("queries", [panel_queries, alert_queries], ids=["dashboard", "alerts"])
def test_every_name_and_label_in_a_query_exists(queries: Any) -> None:
    """No query asks for a series or a label that the endpoint does not tell."""
    asked = list(queries())
    assert len(asked) >= 10
    for query in asked:
        names = _NAME.findall(query)
        assert names, query
        assert set(names) <= set(SERIES), query
        for name, matchers in _SELECTOR.findall(query):
            labels = re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", matchers)
            assert set(labels) <= set(SERIES[name].labels), query
        known = {label for name in names for label in SERIES[name].labels} | _TARGET_LABELS
        for words in _GROUPING.findall(query):
            assert {word.strip() for word in words.split(",")} <= known, query


def test_rates_are_taken_of_counters_alone() -> None:
    """`rate` and `increase` stand before counters and histograms, which survive restarts; never before gauges."""
    for query in [*panel_queries(), *alert_queries()]:
        for name in re.findall(r"\b(?:rate|increase)\((promptmill_\w+)", query):
            assert name.endswith(("_total", "_bucket")), query


def test_the_dashboard_has_what_grafana_needs() -> None:
    """Schema version, variables, and panels with an id, a place on the grid that overlaps no other, and targets."""
    document = dashboard()
    assert document["schemaVersion"] >= 39
    assert document["id"] is None
    assert (document["title"], document["uid"]) == ("promptmill", "promptmill")
    kinds = {variable["name"]: variable["type"] for variable in document["templating"]["list"]}
    assert kinds == {"datasource": "datasource", "dataset": "query"}
    ids = [panel["id"] for panel in document["panels"]]
    assert len(set(ids)) == len(ids) >= 20
    taken: set[tuple[int, int]] = set()
    for panel in document["panels"]:
        assert panel["title"], panel["id"]
        assert panel["description"], panel["title"]
        assert panel["type"] in {"stat", "timeseries", "heatmap", "state-timeline"}
        assert panel["fieldConfig"].keys() == {"defaults", "overrides"}
        cells = set(_cells(panel["gridPos"]))
        assert not cells & taken, panel["title"]
        taken |= cells
        assert [target["refId"] for target in panel["targets"]] == list("ABCDEF"[: len(panel["targets"])])
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def _cells(place: dict[str, int]) -> Iterator[tuple[int, int]]:
    assert place["x"] + place["w"] <= WIDTH
    for x in range(place["x"], place["x"] + place["w"]):
        for y in range(place["y"], place["y"] + place["h"]):
            yield x, y


def test_every_alert_says_what_is_wrong_and_what_to_do() -> None:
    """Each rule has a patience, a severity, and three sentences; each is tested."""
    tested = yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text(encoding="utf-8"))["tests"]
    fired = {case["alertname"] for one in tested for case in one["alert_rule_test"] if case["exp_alerts"]}
    assert {rule["alert"] for rule in rules()} == fired
    for rule in rules():
        assert rule["alert"].startswith("Promptmill")
        assert rule["for"]
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert set(rule["annotations"]) == {"summary", "description", "what_to_do"}
        assert all(text.endswith(".") for text in rule["annotations"].values()), rule["alert"]


@pytest.mark.parametrize(
    "words",
    [
        ("check", "rules", "--lint-fatal", "alerts.yml"),
        ("test", "rules", "alerts_test.yml"),
        ("check", "config", "prometheus.yml"),
        ("check", "config", "prometheus.docker.yml"),
    ],
    ids=" ".join,
)
def test_promtool_accepts_the_files(words: tuple[str, ...]) -> None:
    """Prometheus' own tool finds no fault, and each alert fires and keeps silent as alerts_test.yml says."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    done = subprocess.run(["promtool", *words], cwd=PROMETHEUS, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_can_read_every_query_of_the_dashboard(tmp_path: Path) -> None:
    """Each query of a panel is valid PromQL once Grafana has put its variables in."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    plain = [query.replace("$__rate_interval", "1m").replace("$dataset", ".*") for query in panel_queries()[:-1]]
    found = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(plain)]
    assert not [query for query in plain if "$" in query]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": found}]}), encoding="utf-8")
    done = subprocess.run(
        ["promtool", "check", "rules", str(file)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_containers_find_their_files() -> None:
    """What the Compose file mounts exists, nothing is shown to the network, and Prometheus asks Flower by its name."""
    document = yaml.safe_load((DEPLOY / "docker-compose.monitoring.yml").read_text(encoding="utf-8"))
    main = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    assert not set(document["services"]) & set(main["services"])
    for service in document["services"].values():
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert source in document["volumes"] or (source.startswith("./deploy/") and (ROOT / source).exists()), (
                volume
            )
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert not service["image"].endswith("latest")
    (job,) = yaml.safe_load((PROMETHEUS / "prometheus.docker.yml").read_text(encoding="utf-8"))["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    assert target.partition(":")[0] in main["services"]
    assert "flower-password" in (ROOT / ".gitignore").read_text(encoding="utf-8")


def test_grafana_finds_its_dashboard() -> None:
    """The provisioning files name the folder and the server that the Compose file gives Grafana."""
    document = yaml.safe_load((DEPLOY / "docker-compose.monitoring.yml").read_text(encoding="utf-8"))
    provisioning = DEPLOY / "grafana" / "provisioning"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "promptmill.yml").read_text())["providers"]
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    mounted = [volume.split(":")[1] for volume in document["services"]["grafana"]["volumes"]]
    assert f"{provider['options']['path']}/promptmill.json" in mounted
    assert re.fullmatch(r"http://(\w+):9090", source["url"])[1] in document["services"]  # type: ignore[index]
