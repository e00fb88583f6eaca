"""The dashboard and the alert rules as their readers see them: Grafana's types, and a parser of PromQL."""

import copy
import enum
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from pulse_rl.watch.measurements import METRICS
from tests import ROOT

yaml = pytest.importorskip("yaml")
schema = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder").JSONEncoder
promql = pytest.importorskip("promql_parser")
pytest.importorskip("grafana_foundation_sdk.cog.plugins").register_default_plugins()  # the types of panels and queries

MONITORING = ROOT / "examples" / "monitoring"
DASHBOARD = json.loads((MONITORING / "grafana-dashboard.json").read_text())
RULES = yaml.safe_load((MONITORING / "prometheus-alerts.yml").read_text())["groups"][0]["rules"]


def expressions() -> dict[str, str]:
    """Every query of the dashboard, by its panel."""
    return {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in DASHBOARD["panels"]
        for target in panel["targets"]
    }


def lost(given: Any, kept: Any, place: str = "") -> Iterator[str]:
    """What Grafana's types have no field for."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for name, value in given.items():
            yield from lost(value, kept[name], f"{place}.{name}") if name in kept else [f"{place}.{name}"]
    elif isinstance(given, list) and isinstance(kept, list):
        for number, (value, other) in enumerate(zip(given, kept, strict=True)):
            yield from lost(value, other, f"{place}[{number}]")
    elif given != kept:
        yield place


def wrong(found: Any, hint: Any, place: str = "") -> Iterator[str]:
    """Values that are not of the types that Grafana gives their fields."""
    kinds = get_args(hint)
    if get_origin(hint) is Union:  # what is wrong by the type that fits best
        yield from min((list(wrong(found, kind, place)) for kind in kinds), key=len)
        return
    fits = True
    if get_origin(hint) is Literal:
        fits = found in kinds
    elif isinstance(hint, enum.EnumMeta):
        fits = found in hint._value2member_map_
    elif hint is float:
        fits = isinstance(found, int | float)
    elif hint is not Any:
        fits = isinstance(found, get_origin(hint) or hint)
    if not fits:
        yield f"{place}: expected {hint}, found {found!r}"
    elif isinstance(found, list):
        for number, value in enumerate(found):
            yield from wrong(value, kinds[0] if kinds else Any, f"{place}[{number}]")
    elif hasattr(found, "to_json"):
        for name, kind in get_type_hints(type(found)).items():
            yield from wrong(getattr(found, name), kind, f"{place}.{name}")


def faults(dashboard: Any) -> list[str]:
    made = schema.Dashboard.from_json(dashboard)
    return [*lost(dashboard, json.loads(json.dumps(made, cls=encoder))), *wrong(made, schema.Dashboard)]


def test_the_dashboard_has_grafana_s_types() -> None:
    assert faults(DASHBOARD) == []
    assert {panel["id"] for panel in DASHBOARD["panels"]} == set(range(1, len(DASHBOARD["panels"]) + 1))


@pytest.mark.parametrize(
    ("plant", "place"),
    [
        (lambda board: board.update(titel="x"), ".titel"),
        (lambda board: board.update(title=5), ".title: expected "),
        (lambda board: board.update(graphTooltip=7), ".graph_tooltip: expected "),
        (lambda board: board["panels"][1]["gridPos"].update(w="wide"), ".panels[1].grid_pos.w: expected "),
        (lambda board: board["panels"][0]["targets"][0].update(expression="x"), ".panels[0].targets[0].expression"),
        (lambda board: board["panels"][0]["options"].update(colorMode="red"), ".panels[0].options.color_mode: "),
        (lambda board: board["panels"][0]["fieldConfig"]["defaults"].update(units="s"), ".panels[0].fieldConfig.defa"),
        (lambda board: board["templating"]["list"][1].update(multi="yes"), ".templating.list_val[1].multi: expected "),
    ],
)
def test_what_grafana_does_not_know_is_found(plant: Callable[[Any], None], place: str) -> None:
    board = copy.deepcopy(DASHBOARD)
    plant(board)
    assert any(fault.startswith(place) for fault in faults(board)), faults(board)


@pytest.mark.parametrize("of", [*expressions(), *(rule["alert"] for rule in RULES)])
def test_every_expression_is_promql_over_what_is_exported(of: str) -> None:
    text = (expressions() | {rule["alert"]: rule["expr"] for rule in RULES})[of]
    promql.parse(text.replace("$__rate_interval", "1m"))  # which checks functions, their arguments and types
    known = METRICS.keys() | {f"pulse_phase_seconds_{part}" for part in ("sum", "bucket", "count")}
    named = set(re.findall(r"\bpulse_[a-z_]+", text))
    assert named
    assert named <= known


@pytest.mark.parametrize("bad", ["rate(pulse_version)", "sum by pulse_version", "histogram_quantile(0.9)", "low(x)"])
def test_bad_promql_is_refused(bad: str) -> None:
    with pytest.raises(ValueError):
        promql.parse(bad)
