"""infra/grafana: Grafana's own types, a real PromQL parser, and the metrics that the code and Ray export."""

import json
import re

import pytest

from raypd.cluster.metrics import COUNTERS, GAUGES
from tests.infra.filled import INFRA

promql = pytest.importorskip("promql_parser", reason="needs promql-parser: pip install -e '.[dev]'")
BOARD = json.loads((INFRA / "grafana/raypd.json").read_text())
OF_RAY = {"ray_node_gpus_utilization"}
TAGS = {f"ray_{name}_total": tag for name, (_, tag) in COUNTERS.items()} | {
    f"ray_{name}": tag for name, (_, tag) in GAUGES.items()
}
EXPORTED = set(TAGS)


def expressions():
    return [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]


def selectors(node):
    """All vector selectors of a parsed expression."""
    if isinstance(node, promql.VectorSelector):
        return [node]
    parts = [getattr(node, name, None) for name in ("expr", "lhs", "rhs", "vector_selector", "vs", "param")]
    parts += list(getattr(node, "args", None) or [])
    return [found for part in parts if part is not None for found in selectors(part)]


def parsed(expression):
    return promql.parse(expression.replace("$__rate_interval", "5m"))


def test_grafana_reads_it_and_loses_nothing():
    dashboard = pytest.importorskip(
        "grafana_foundation_sdk.models.dashboard", reason="needs grafana-foundation-sdk: pip install -e '.[dev]'"
    )
    read = dashboard.Dashboard.from_json(BOARD)
    panels = [panel.to_json() for panel in read.panels]
    for given, kept in zip(BOARD["panels"], panels, strict=True):
        assert set(given) <= set(kept), given["title"]
        assert isinstance(read.panels[0].grid_pos, dashboard.GridPos)
    assert [variable.name for variable in read.templating.list_val] == ["datasource", "run"]


def test_panels_fill_rows_without_overlap():
    taken = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    assert len(taken) == 24 * (1 + max(y for _, y in taken))


@pytest.mark.parametrize("expression", expressions())
def test_expressions_parse_and_ask_for_metrics_that_exist(expression):
    found = selectors(parsed(expression))
    assert found, expression
    for selector in found:
        assert selector.name in EXPORTED | OF_RAY
        labels = {matcher.name for matcher in selector.matchers.matchers}
        if selector.name in EXPORTED:
            assert "run" in labels  # two runs on one cluster must not add up
            assert labels <= {"run", TAGS[selector.name]}
    for grouped in re.findall(r"by \((\w+)\)", expression):
        assert grouped in {TAGS[s.name] for s in found}


def test_every_metric_of_raypd_is_drawn():
    drawn = {selector.name for expression in expressions() for selector in selectors(parsed(expression))}
    assert drawn >= EXPORTED
    with pytest.raises(ValueError, match=r"parse|unexpected|unclosed|missing"):  # a wrong one does not parse
        parsed("sum(rate(x[5m])")
