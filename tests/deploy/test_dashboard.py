"""The Grafana dashboard and its provisioning."""

from __future__ import annotations

import json
import runpy
from itertools import combinations
from pathlib import Path

import yaml


def test_the_file_is_what_the_script_makes(deploy: Path) -> None:
    """`homing.json` equals the output of `build.py`: nobody edited it by hand or forgot to build."""
    built = runpy.run_path(str(deploy / "grafana/build.py"))["render"]()
    assert (deploy / "grafana/dashboards/homing.json").read_text() == built, "run: make dashboards"


def test_panels_do_not_overlap_and_have_distinct_ids(deploy: Path) -> None:
    """No two panels share a cell of Grafana's 24-column grid, or an id."""
    panels = json.loads((deploy / "grafana/dashboards/homing.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    boxes = [panel["gridPos"] for panel in panels]
    assert all(box["x"] + box["w"] <= 24 for box in boxes)
    for a, b in combinations(boxes, 2):
        apart_in_x = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        apart_in_y = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert apart_in_x or apart_in_y, (a, b)


def test_panels_use_the_provisioned_datasource(deploy: Path) -> None:
    """The uid in every panel is the one that provisioning creates, and its address is compose's Prometheus."""
    (source,) = yaml.safe_load((deploy / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    panels = json.loads((deploy / "grafana/dashboards/homing.json").read_text())["panels"]
    used = {panel["datasource"]["uid"] for panel in panels if "datasource" in panel}
    assert used == {source["uid"]}
    assert source["url"] == "http://prometheus:9090"
