"""Dashboard and rules name only metrics and labels that the code has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from engine_shim.metrics import ShimCollector
from router.telemetry.metrics import Metrics
from router.telemetry.tallies import Counter, Histogram

#: Labels that Prometheus itself adds to what it scrapes.
SCRAPE_LABELS = frozenset({"job", "instance"})
SAMPLE_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"), "gauge": ("",)}
SERIES = re.compile(r"(?<![\w:])((?:homing|vllm|worker_rank)[:_]\w[\w:]*)(?:\{([^}]*)\})?")
GROUPING = re.compile(r"\b(?:by|on)\s*\(([^)]*)\)")


class Expression(NamedTuple):
    """A PromQL expression, and what else shows its labels (a legend, an annotation)."""

    where: str
    promql: str
    shown: str


def known_series() -> dict[str, frozenset[str]]:
    """Every sample name the code can expose, with its labels."""
    series: dict[str, frozenset[str]] = {"up": frozenset()}
    metrics = Metrics(CollectorRegistry())
    for metric in vars(metrics).values():
        if isinstance(metric, MetricWrapperBase | Counter | Histogram):
            (family,) = metric.collect()
            names = metric._labelnames if isinstance(metric, MetricWrapperBase) else metric.label_names
            extra = {"le"} if family.type == "histogram" else set()
            for suffix in SAMPLE_SUFFIXES[family.type]:
                series[family.name + suffix] = frozenset({*names, *extra})
    for family in ShimCollector([], model_name="m").collect():
        for suffix in SAMPLE_SUFFIXES.get(family.type, ("",)):
            series[family.name + suffix] = frozenset({"model_name", "engine", "finished_reason", "le"})
    return series


def rule_expressions(deploy: Path) -> Iterator[Expression]:
    rules = yaml.safe_load((deploy / "prometheus/rules.yml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            shown = " ".join(rule.get("annotations", {}).values())
            yield Expression(rule.get("record") or rule["alert"], rule["expr"], shown)


def recorded_series(deploy: Path) -> dict[str, frozenset[str]]:
    """Recorded names; the first part of ``level:metric:operation`` lists the labels that are left."""
    names = (e.where for e in rule_expressions(deploy) if ":" in e.where)
    return {name: frozenset() if name.startswith("homing:") else frozenset({"worker", "rank"}) for name in names}


def dashboard_expressions(deploy: Path) -> Iterator[Expression]:
    dashboard = json.loads((deploy / "grafana/dashboards/homing.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield Expression(panel["title"], target["expr"], target["legendFormat"])


def complaints(expression: Expression, known: dict[str, frozenset[str]]) -> Iterator[str]:
    """What in the expression does not exist."""
    there: set[str] = set(SCRAPE_LABELS)
    for name, matchers in SERIES.findall(expression.promql):
        if name not in known:
            yield f"{expression.where}: no metric {name}"
            continue
        there |= known[name]
        for label in re.findall(r"(\w+)\s*[=!]~?", re.sub(r'"[^"]*"', "", matchers)):
            if label not in known[name] | SCRAPE_LABELS:
                yield f"{expression.where}: {name} has no label {label}"
    for labels in GROUPING.findall(expression.promql):
        yield from (f"{expression.where}: no label {x}" for x in re.findall(r"\w+", labels) if x not in there)
    shown = re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}", expression.shown)
    yield from (f"{expression.where}: shows label {x}, which is not there" for x in shown if x not in there)


def test_dashboard_and_rules_name_only_what_the_code_exposes(deploy: Path) -> None:
    """Every metric and every label in the dashboard, the rules and the alerts' texts exists in the code."""
    known = known_series() | recorded_series(deploy)
    expressions = [*dashboard_expressions(deploy), *rule_expressions(deploy)]
    assert [text for e in expressions for text in complaints(e, known)] == []
    named = {name for e in expressions for name, _ in SERIES.findall(e.promql)}
    assert {"homing_cached_tokens_total", "vllm:kv_cache_usage_perc"} <= named, "the expressions were not read"


@pytest.mark.parametrize(
    ("promql", "shown", "complaint"),
    [
        ("sum(rate(homing_cached_total[5m]))", "", "no metric homing_cached_total"),
        ("homing_requests", "", "no metric homing_requests"),
        ('homing_requests_total{reason="home"}', "", "has no label reason"),
        ("sum by (worker) (homing_sessions)", "", "no label worker"),
        ("homing_rank_up", "{{ $labels.engine }}", "shows label engine"),
    ],
)
def test_a_wrong_name_is_seen(promql: str, shown: str, complaint: str) -> None:
    """The check above sees a wrong metric, a missing suffix, a wrong label in a matcher, a grouping and a legend."""
    (text,) = complaints(Expression("here", promql, shown), known_series())
    assert complaint in text


def test_the_tests_of_the_rules_cover_every_alert(deploy: Path) -> None:
    """Each alert fires in at least one promtool test: an expression that can never be true is found."""
    tests = yaml.safe_load((deploy / "prometheus/tests.yml").read_text())["tests"]
    fired = {case["alertname"] for test in tests for case in test.get("alert_rule_test", ()) if case.get("exp_alerts")}
    assert fired == {e.where for e in rule_expressions(deploy) if ":" not in e.where}
