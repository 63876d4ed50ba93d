"""Makes ``dashboards/homing.json``: run it after a change here (``make dashboards``); a test compares the two.

Panels are rows of three on Grafana's grid of 24 columns; a query is a pair (expression, legend).
"""

from __future__ import annotations

import json
from pathlib import Path

OUTPUT = Path(__file__).parent / "dashboards" / "homing.json"
DATASOURCE = {"type": "prometheus", "uid": "prometheus"}
GRID_COLUMNS, PANEL_HEIGHT = 24, 8
PANELS_PER_ROW = 3

Json = dict[str, object]
Query = tuple[str, str]

RANK = "{{worker}}/{{rank}}"
PROMPT_TOKENS = "(sum(rate(homing_prompt_tokens_total[$__rate_interval])) > 0)"


def share(counter: str) -> str:
    """Tokens of ``counter`` per prompt token, over the fleet."""
    return f"sum(rate({counter}[$__rate_interval])) / {PROMPT_TOKENS}"


def per_rank(counter: str) -> str:
    """Rate of ``counter`` on each rank, over all routers."""
    return f"sum by (worker, rank) (rate({counter}[$__rate_interval]))"


def quantiles(histogram: str) -> list[Query]:
    """Its p50, p90 and p99."""
    buckets = f"sum by (le) (rate({histogram}_bucket[$__rate_interval]))"
    return [(f"histogram_quantile(0.{percent}, {buckets})", f"p{percent}") for percent in (50, 90, 99)]


def panel(title: str, *queries: Query, unit: str = "short", about: str = "", top: float | None = None) -> Json:
    """Lines over time. ``about`` is shown behind the panel's (i); ``top`` fixes the axis to 0..top."""
    axis: Json = {"min": 0} if top is None else {"min": 0, "max": top}
    return {
        "type": "timeseries",
        "title": title,
        "description": about,
        "datasource": DATASOURCE,
        "fieldConfig": {
            "defaults": {"unit": unit, **axis, "custom": {"fillOpacity": 8, "lineWidth": 2, "showPoints": "never"}},
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": DATASOURCE, "expr": expr, "legendFormat": legend, "range": True}
            for i, (expr, legend) in enumerate(queries)
        ],
    }


ROWS: dict[str, list[Json]] = {
    "Service": [
        panel(
            "Prefix hit rate",
            (share("homing_cached_tokens_total"), "measured"),
            (share("homing_predicted_cached_tokens_total"), "predicted"),
            (share("homing_best_cached_tokens_total"), "best rank"),
            (share("homing_ideal_cached_tokens_total"), "ideal"),
            unit="percentunit",
            top=1,
            about="Share of prompt tokens reused: as the engines report it, as the router expected it on the ranks it "
            "chose, on the rank that held most, and with an endless cache.",
        ),
        panel("Time to first token", *quantiles("homing_first_token_seconds"), unit="s", about="Of streamed answers."),
        panel(
            "Requests by status",
            ("sum by (status) (rate(homing_requests_total[$__rate_interval]))", "{{status}}"),
            unit="reqps",
        ),
        panel(
            "Decisions by reason",
            ("sum by (policy, reason) (rate(homing_decisions_total[$__rate_interval]))", "{{policy}}: {{reason}}"),
            unit="reqps",
            about="Why each request went where it went.",
        ),
        panel(
            "Between chunks",
            *quantiles("homing_inter_token_seconds"),
            unit="s",
            about="Each streamed answer's mean gap.",
        ),
        panel(
            "Errors",
            ("sum by (code) (rate(homing_errors_total[$__rate_interval]))", "router: {{code}}"),
            (
                'sum by (worker, outcome) (rate(homing_attempts_total{outcome!~"ok|client_gone|shutdown"}'
                "[$__rate_interval]))",
                "attempt on {{worker}}: {{outcome}}",
            ),
            ("sum(rate(homing_client_disconnects_total[$__rate_interval]))", "client left"),
            unit="reqps",
        ),
    ],
    "Ranks": [
        panel("Requests in flight", ("sum by (worker, rank) (homing_rank_inflight_requests)", RANK)),
        panel(
            "Tokens waiting for prefill",
            ("sum by (worker, rank) (homing_rank_waiting_tokens)", RANK),
            about="Uncached prompt tokens sent to a rank whose first token is still to come.",
        ),
        panel(
            "KV cache in use",
            ("max by (instance, engine) (vllm:kv_cache_usage_perc)", "{{instance}}/{{engine}}"),
            unit="percentunit",
            top=1,
            about="As the engines report it; what no request holds is cache that may be evicted.",
        ),
        panel(
            "Uncached tokens",
            (f"{per_rank('homing_prompt_tokens_total')} - {per_rank('homing_cached_tokens_total')}", RANK),
            about="Prompt tokens a second that had to be computed.",
        ),
        panel(
            "Imbalance of uncached tokens",
            ("homing:uncached_tokens_imbalance:ratio_rate5m", "busiest rank / mean"),
            about="1 is even; with N ranks and one at work it is N.",
        ),
        panel(
            "Engine queues",
            ("max by (instance, engine) (vllm:num_requests_running)", "running {{instance}}/{{engine}}"),
            ("max by (instance, engine) (vllm:num_requests_waiting)", "waiting {{instance}}/{{engine}}"),
        ),
        panel("Ranks up", ("min by (worker, rank) (homing_rank_up)", RANK), top=1),
        panel("Prefill speed learned", ("avg by (worker, rank) (homing_rank_prefill_tokens_per_second)", RANK)),
        panel(
            "Trust in predictions",
            ("min by (worker, rank) (homing_rank_trust_ratio)", RANK),
            unit="percentunit",
            top=1,
            about="How much of a rank's predicted reuse is believed; falls when the engine reports otherwise.",
        ),
    ],
    "Event streams and index": [
        panel("Event messages", (per_rank("homing_kv_event_batches_total"), RANK), unit="cps"),
        panel(
            "Stream trouble",
            (per_rank("homing_kv_event_gaps_total"), f"gap {RANK}"),
            (per_rank("homing_kv_event_decode_errors_total"), f"damaged {RANK}"),
            (
                "sum by (worker, rank, cause) (rate(homing_kv_resyncs_total[$__rate_interval]))",
                f"resync {RANK} {{{{cause}}}}",
            ),
            unit="cps",
        ),
        panel("Event lag", *quantiles("homing_kv_event_lag_seconds"), unit="s"),
        panel(
            "Blocks in the index",
            ("max by (worker, rank) (homing_index_blocks)", RANK),
            ("max by (worker, rank) (homing_index_orphan_blocks) > 0", f"orphans {RANK}"),
        ),
        panel(
            "Decision time",
            *quantiles("homing_decision_seconds"),
            (
                "histogram_quantile(0.99, sum by (le) (rate(homing_tokenize_seconds_bucket[$__rate_interval])))",
                "tokenize p99",
            ),
            unit="s",
        ),
        panel("Sessions remembered", ("max by (instance) (homing_sessions)", "{{instance}}")),
    ],
}


def dashboard() -> Json:
    """The whole dashboard as Grafana's JSON model."""
    panels: list[Json] = []
    width, y = GRID_COLUMNS // PANELS_PER_ROW, 0

    def place(item: Json, *, x: int, w: int, h: int) -> None:
        panels.append({"id": len(panels) + 1, **item, "gridPos": {"x": x, "y": y, "w": w, "h": h}})

    for title, items in ROWS.items():
        place({"type": "row", "title": title, "collapsed": False, "panels": []}, x=0, w=GRID_COLUMNS, h=1)
        y += 1
        for i, item in enumerate(items):
            column = i % PANELS_PER_ROW
            place(item, x=column * width, w=width, h=PANEL_HEIGHT)
            if column == PANELS_PER_ROW - 1 or i == len(items) - 1:
                y += PANEL_HEIGHT

    return {
        "uid": "homing",
        "title": "Homing",
        "tags": ["homing", "llm"],
        "timezone": "browser",
        "schemaVersion": 39,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "editable": False,
        "graphTooltip": 1,
        "templating": {"list": []},
        "annotations": {"list": []},
        "panels": panels,
    }


def render() -> str:
    """The file's text."""
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    OUTPUT.write_text(render(), encoding="utf-8")
