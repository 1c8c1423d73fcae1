// The partitions of a read model by the instances that have them: a partition that moves is seen moving.

import { byId, consoleLink, h, show, showOptions } from "./dom.js";
import { behind, count, duration, mark, UNKNOWN } from "./format.js";
import { kindOf, modelsOf } from "./judge.js";
import { live } from "./live.js";
import { isOpen } from "./tabs.js";
import { choose, chosen, onChosen } from "./url.js";

const MOVED_MS = 60_000;

const owned = new Map();
const moved = new Map();
const DEFAULT_ROWS = 40;

export function start() {
  byId("partitions-model").onchange = (event) => {
    choose({ partitionsModel: event.target.value });
    showPartitions();
  };
  onChosen(showPartitions);
}

export function showPartitions() {
  const { status } = live;
  if (!status?.applicationServers.length || status.partitions === null) {
    show(byId("partitions-table"), h("p", { class: "empty" }, UNKNOWN));
    return;
  }
  const models = modelsOf(status);
  // A move is seen later, too.
  for (const one of models.flatMap(partitionsOf)) noteMove(one);
  if (!isOpen("partitions")) return;
  const names = models.map((model) => model.name).sort();
  const rows = models.flatMap(partitionsOf).length;
  const options = [["", "all read models"], ...names.map((name) => [name, name])];
  const asked = chosen("partitionsModel") || (rows > DEFAULT_ROWS ? models[0].name : "");
  const model = showOptions(byId("partitions-model"), options, asked);
  const servers = status.applicationServers;
  const shown = models.filter((one) => model === "" || one.name === model).sort((a, b) => (a.name < b.name ? -1 : 1));
  const partitions = shown.flatMap(partitionsOf);
  show(
    byId("partitions-table"),
    h(
      "table",
      { "aria-label": "Partitions by instance" },
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Partition"), servers.map((server) => heading(server, status)))),
      h("tbody", {}, partitions.map((one) => row(one, servers))),
    ),
  );
}

const partitionsOf = ({ partitions, others }) => [...partitions, ...others.flatMap((other) => other.partitions)];

function heading(server, status) {
  const isThis = server.applicationServer === status.applicationServer;
  const name = isThis
    ? `${server.applicationServer}`
    : consoleLink(server.applicationServer);
  const silent = server.silentSeconds === null ? "not heard from" : `silent for ${duration(server.silentSeconds)}`;
  const note = isThis ? h("span", { class: "note" }, "this instance") : server.suspect ? mark("warn", silent) : "";
  return h("th", { scope: "col", "data-key": server.applicationServer }, name, " ", note);
}

function row(one, servers) {
  const cells = servers.map((server) => {
    const task = one.tasks.find((each) => each.server.applicationServer === server.applicationServer);
    return h("td", { "data-key": server.applicationServer }, task ? cell(task, one) : h("span", { class: "none" }, "–"));
  });
  return h("tr", { "data-key": one.id }, h("th", { scope: "row" }, one.id, one.status ? h("span", { class: "note" }, ` ${one.status}`) : "", one.owner ? "" : [" ", mark(one.cause ? kindOf(one.cause) : "unknown", "no owner")]), cells);
}

function cell(task, one) {
  const isOwner = one.owner === task;
  const [kind, word] = stateOf(task, isOwner, one.cause);
  const move = isOwner ? moved.get(one.id) : null;
  return h(
    "div",
    { class: `task${move ? " moved" : ""}` },
    mark(task.server.suspect ? "unknown" : kind, `${isOwner ? "owner" : task.role}`, task.reason || undefined),
    " ",
    h("span", { class: "word" }, word),
    h("span", { class: "figures" }, figures(task)),
    move ? h("span", { class: "note" }, `${move.from ? `moved from ${move.from}` : "taken over"} ${duration((Date.now() - move.at) / 1000)} ago`) : "",
  );
}

function stateOf(task, isOwner, cause) {
  if (task.server.suspect) return ["unknown", `${task.state}, as last heard`];
  if (task.role === "active" && !isOwner) return ["warn", `${task.state}, succeeded by another owner`];
  if (task.state === "RESTORING" && task.toRestore) {
    const percent = Math.floor((100 * Math.min(task.restored, task.toRestore)) / task.toRestore);
    const left = task.secondsLeft === null ? "" : `, about ${duration(task.secondsLeft)} left`;
    return [isOwner && cause ? kindOf(cause) : "info", `RESTORING ${percent} %${left}`];
  }
  if (isOwner && cause) return [kindOf(cause), task.state];
  const kinds = { RUNNING: "ok", TAILING: "info", WAITING: "info", HALTED: "warn", RESTORING: "info" };
  return [kinds[task.state] ?? "unknown", task.state];
}

function figures(task) {
  const at = task.position < 0 ? `position ${UNKNOWN}` : `position ${count(task.position)}`;
  if (task.server.suspect) return at;
  const lag = task.lag === null || task.state === "HALTED" ? `lag ${UNKNOWN}` : `lag ${count(task.lag)}${task.lag ? ` (${behind(task.lagSeconds, task.lagSecondsIsLeast)})` : ""}`;
  return `${at} · ${lag}${task.role === "active" ? ` · epoch ${task.epoch || UNKNOWN}` : ""}`;
}

function noteMove({ id, owner }) {
  const now = owner?.server.applicationServer ?? null;
  const before = owned.get(id);
  if (now !== null && before !== undefined && before.server !== now) {
    moved.set(id, { from: before.server, at: Date.now() });
  }
  if (now !== null || before === undefined) owned.set(id, { server: now });
  if (moved.has(id) && Date.now() - moved.get(id).at > MOVED_MS) moved.delete(id);
}
