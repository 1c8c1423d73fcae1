// Draws the way of a read model's events: topics, stages, states. Shows what a transform makes of them.

import { askJson } from "./api.js";
import { byId, command, h, show, showOptions, svg, trouble } from "./dom.js";
import { live } from "./live.js";
import { isOpen } from "./tabs.js";
import { choose, chosen, onChosen } from "./url.js";

const CHARACTER = 7.3;
const BOX = 44;
const ROW = 76;
const LEAST_GAP = 56;
const MARGIN = 8;

let shown = "";

export function start() {
  byId("flow-model").onchange = (event) => {
    choose({ flowModel: event.target.value });
    showFlow();
  };
  onChosen(showFlow);
}

// Starts over with another token.
export function forget() {
  shown = "";
}

export async function showFlow() {
  const models = [...new Set((live.status?.models ?? []).map((one) => one.model))];
  if (!isOpen("flow") || !models.length || live.state !== "live") return;
  const name = showOptions(byId("flow-model"), models.map((model) => [model, model]), chosen("flowModel"));
  if (name === shown) return;
  shown = name;
  try {
    const flow = await askJson(`api/models/${encodeURIComponent(name)}/flow`);
    if (name !== shown) return;
    const drawing = h("div", { class: "scrolls", tabindex: "0", role: "region", "aria-label": "Drawing of the flow" }, draw(name, flow));
    const plans = (flow.plans ?? []).map((plan) => h("details", {}, h("summary", {}, `Spark's plan of the transform: ${plan.split("\n")[0]}`), h("pre", { tabindex: "0" }, plan)));
    show(
      byId("flow-drawing"),
      drawing,
      plans,
      h("h3", {}, "The same by command"),
      command(`balance-service flow ${name}`),
      plans.length ? command(`balance-service explain ${name}`) : "",
    );
  } catch (error) {
    show(byId("flow-drawing"), trouble(error));
  }
}

function draw(name, { nodes, edges }) {
  const columns = columnsOf(nodes, edges);
  const places = placesOf(columns, edges);
  const width = Math.max(...[...places.values()].map((place) => place.x + place.width)) + MARGIN;
  const height = Math.max(...columns.map((column) => column.length)) * ROW + MARGIN;
  const said = edges.map(({ source, target, label }) => `${nameOf(nodes, source)} to ${nameOf(nodes, target)}${label ? ` (${label})` : ""}`);
  return svg(
    "svg",
    { class: "drawing", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `Flow of ${name}: ${said.join("; ")}` },
    svg("defs", {}, svg("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" }, svg("path", { d: "M0 0L8 4L0 8z", class: "arrow" }))),
    edges.map((edge) => lineOf(edge, places)),
    nodes.map((node) => boxOf(node, places.get(node.id))),
  );
}

const nameOf = (nodes, id) => {
  const { kind, name } = nodes.find((node) => node.id === id);
  return `${kind} ${name}`;
};

// Each node stands to the right of all that lead to it; a table stands just before the stage that joins it.
function columnsOf(nodes, edges) {
  const depth = new Map(nodes.map(({ id }) => [id, 0]));
  for (let round = 0; round < nodes.length; round++) {
    for (const { source, target } of edges) depth.set(target, Math.max(depth.get(target), depth.get(source) + 1));
  }
  for (const { source, target, kind } of edges) {
    if (kind === "join" && !edges.some((edge) => edge.target === source)) depth.set(source, depth.get(target) - 1);
  }
  const columns = [];
  for (const node of nodes) (columns[Math.min(depth.get(node.id), nodes.length)] ??= []).push(node);
  return columns.filter(Boolean);
}

function placesOf(columns, edges) {
  const places = new Map();
  let x = MARGIN;
  for (const column of columns) {
    const widths = column.map(({ name, kind }) => Math.max(name.length, kind.length) * CHARACTER + 24);
    const width = Math.max(...widths);
    column.forEach(({ id }, n) => places.set(id, { x, y: n * ROW + MARGIN, width }));
    const ids = new Set(column.map(({ id }) => id));
    const labels = edges.filter(({ source }) => ids.has(source)).map(({ label }) => label.length * CHARACTER + 24);
    x += width + Math.max(LEAST_GAP, ...labels);
  }
  return places;
}

function boxOf({ kind, name }, { x, y, width }) {
  return svg(
    "g",
    { class: `node ${kind}` },
    svg("rect", { x, y, width, height: BOX, rx: kind === "topic" ? BOX / 2 : 3 }),
    svg("text", { x: x + width / 2, y: y + 18, class: "kind" }, kind),
    svg("text", { x: x + width / 2, y: y + 34 }, name),
  );
}

function lineOf({ source, target, kind, label }, places) {
  const [from, to] = [places.get(source), places.get(target)];
  const [x1, y1, x2, y2] = [from.x + from.width, from.y + BOX / 2, to.x, to.y + BOX / 2];
  const middle = (x1 + x2) / 2;
  return svg(
    "g",
    { class: `edge ${kind}` },
    svg("path", { d: `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`, "marker-end": kind === "states" ? null : "url(#arrow)" }),
    label ? svg("text", { x: middle, y: (y1 + y2) / 2 - 6 }, label) : "",
  );
}
