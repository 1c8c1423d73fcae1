"""The way of a read model's events as a Mermaid flowchart: topics as cylinders, stages as boxes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from balance_service.model.joins import Global

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from balance_service.model.conditions import Condition
    from balance_service.model.joins import Join
    from balance_service.model.read_model import ReadModel
    from balance_service.model.stage import Stage


def flowchart(model: ReadModel, stages: Sequence[Stage]) -> str:
    """The stages of a read model, in order, as text.

    Source: Mermaid, "Flowcharts - Basic Syntax".
    """
    nodes: dict[str, str] = {}
    lines = ["flowchart LR"]

    def node(form: str, name: str) -> str:
        shape = form.format(name)
        if shape not in nodes:
            nodes[shape] = f"n{len(nodes)}"
            lines.append(f"    {nodes[shape]}{shape}")
        return nodes[shape]

    for stage in stages:
        source, work = node(_TOPIC, stage.source), node('["{}"]', stage.name)
        lines.append(f"    {source} -->{_told(stage.conditions)} {work}")
        tables = [(node(_TOPIC, join.table.topic), join) for join in stage.joins]
        lines += [f'    {table} -. "{_joined(join)}" .-> {work}' for table, join in tables]
        if stage.by is not None:
            lines.append(f'    {work} -->|"by {stage.by}"| {node(_TOPIC, stage.rekeyed)}')
            continue
        if model.has_states():
            lines.append(f"    {work} --- {node(_STATES, model.state_schema['name'])}")
        for output in model.outputs:
            where = () if output.where is None else (output.where,)
            lines.append(f"    {work} -->{_told(where, output.record or '')} {node(_TOPIC, output.topic)}")
    return "\n".join(lines)


def _joined(join: Join) -> str:
    """What the arrow of a table says."""
    return f"{'global, ' if isinstance(join.table, Global) else ''}by {join.on}"


_TOPIC, _STATES = '[("{}")]', '[["{}"]]'


def _told(conditions: Iterable[Condition], record: str = "") -> str:
    """What an arrow says."""
    # Mermaid's text ends at a quote.
    said = "; ".join(filter(None, [record, *map(str, conditions)])).replace('"', "#quot;")
    return f'|"{said}"|' if said else ""
