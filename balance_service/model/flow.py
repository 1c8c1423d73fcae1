"""The flow of a read model's events: topics, stages and states, and what leads from one to the next."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from balance_service.model.stream import Global

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from balance_service.model.conditions import Condition
    from balance_service.model.read_model import ReadModel
    from balance_service.model.stage import Stage
    from balance_service.model.stream import Join

NodeKind = Literal["topic", "stage", "states"]
EdgeKind = Literal["records", "join", "states"]

_SHAPES = {"topic": '[("{}")]', "stage": '["{}"]', "states": '[["{}"]]'}


@dataclass(frozen=True, slots=True)
class Node:
    """A topic, a stage, or the states of a read model. `id` is unique in its flow."""

    id: str
    kind: NodeKind
    name: str


@dataclass(frozen=True, slots=True)
class Edge:
    """Records that a stage reads or writes, rows that it joins, or states that it keeps.

    `label` names the records and their conditions, or the field that rows are found by; it may be empty.
    """

    source: Node
    target: Node
    kind: EdgeKind
    label: str = ""


@dataclass(slots=True)
class Flow:
    """Nodes and edges in the order of the stages; and, of stages with a transform, what it does."""

    nodes: list[Node] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    plans: list[str] = field(default_factory=list)

    def node(self, kind: NodeKind, name: str) -> Node:
        """Returns the node of this kind and name, which is added if there is none."""
        for node in self.nodes:
            if (node.kind, node.name) == (kind, name):
                return node
        self.nodes.append(Node(f"n{len(self.nodes)}", kind, name))
        return self.nodes[-1]

    def lead(self, source: Node, target: Node, kind: EdgeKind, label: str = "") -> None:
        """Adds an edge."""
        self.edges.append(Edge(source, target, kind, label))


def flow_of(model: ReadModel, stages: Sequence[Stage]) -> Flow:
    """Returns the flow of a read model's stages, in order."""
    flow = Flow()
    for stage in stages:
        source, work = flow.node("topic", stage.source), flow.node("stage", stage.name)
        made = ""
        if stage.transform is not None:
            made = "transform"
            flow.plans.append(stage.explained())
        flow.lead(source, work, "records", _label(stage.conditions, made))
        for join in stage.joins:
            flow.lead(flow.node("topic", join.table.topic), work, "join", _join_label(join))
        if stage.by is not None:
            flow.lead(work, flow.node("topic", stage.rekeyed), "records", f"by {', '.join(stage.by)}")
            continue
        if model.has_states():
            flow.lead(work, flow.node("states", model.state_schema["name"]), "states")
        for output in model.outputs:
            where = () if output.where is None else (output.where,)
            flow.lead(work, flow.node("topic", output.topic), "records", _label(where, output.record or ""))
    return flow


def mermaid(flow: Flow) -> str:
    """Returns a flow as a flowchart. Source: Mermaid, "Flowcharts - Basic Syntax"."""
    lines, drawn = ["flowchart LR"], set()
    for edge in flow.edges:
        for node in (edge.source, edge.target):
            if node.id not in drawn:
                lines.append(f"    {node.id}{_SHAPES[node.kind].format(node.name)}")
                drawn.add(node.id)
        lines.append(f"    {edge.source.id} {_arrow(edge)} {edge.target.id}")
    return "\n".join(lines)


def _arrow(edge: Edge) -> str:
    # A quote ends Mermaid's text.
    label = edge.label.replace('"', "#quot;")
    if edge.kind == "states":
        return "---"
    if edge.kind == "join":
        return f'-. "{label}" .->'
    return f'-->|"{label}"|' if label else "-->"


def _join_label(join: Join) -> str:
    return f"{'global, ' if isinstance(join.table, Global) else ''}by {join.on}"


def _label(conditions: Iterable[Condition], record: str = "") -> str:
    return "; ".join(filter(None, [record, *map(str, conditions)]))
