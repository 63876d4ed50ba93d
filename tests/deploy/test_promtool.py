"""Prometheus' own checker on configuration, rules, their tests, and the dashboard's expressions."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import yaml


def run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


def test_configuration_and_rules_are_valid(promtool: str, deploy: Path) -> None:
    """`promtool check config` accepts the scrape configuration and the rules that it loads."""
    run(promtool, "check", "config", deploy / "prometheus/prometheus.yml")


def test_rules_compute_and_alert_as_their_tests_say(promtool: str, deploy: Path) -> None:
    """`promtool test rules` passes: ratios from written-out arithmetic, alerts that fire and alerts that do not."""
    run(promtool, "test", "rules", deploy / "prometheus/tests.yml")


def test_dashboard_expressions_are_promql(promtool: str, deploy: Path, tmp_path: Path) -> None:
    """Every expression of the dashboard parses, checked as a recording rule with Grafana's interval filled in."""
    dashboard = json.loads((deploy / "grafana/dashboards/homing.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert expressions
    rules = [
        {"record": f"panel:{i}", "expr": expr.replace("$__rate_interval", "1m")} for i, expr in enumerate(expressions)
    ]
    path = tmp_path / "dashboard.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    run(promtool, "check", "rules", path)
