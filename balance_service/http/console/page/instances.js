// The instances, and one of them: its process, its settings, the end of its log, and where a model's code failed.

import { addressOf, askJson, hasToken } from "./api.js";
import { byId, command, consoleLink, copyButton, h, show, table, trouble } from "./dom.js";
import { count, duration, mark, moment, size, UNKNOWN } from "./format.js";
import { tasksOf } from "./judge.js";
import { live } from "./live.js";
import { quoted, tokenOption } from "./shell.js";
import { isOpen } from "./tabs.js";
import { choose, chosen, onChosen } from "./url.js";

const PATH = "api/instance";
const EVERY_MS = 5000;
const COLUMNS = [
  ["Instance", ""],
  ["State", ""],
  ["Owns", "number"],
  ["Standbys", "number"],
];
const LOG = [
  ["Last", ""],
  ["Times", "number"],
  ["Level", ""],
  ["Event", "key"],
];
const SETTINGS = [
  ["Setting", "key"],
  ["Value", "key"],
];

// The details of an instance: when they were asked for, and the processor time of the answer before.
let known = { address: "", details: null, error: null, at: 0, before: null };

export function start() {
  onChosen(showInstances);
}

// Starts over with another token.
export function forget() {
  known = { ...known, address: "" };
}

export function showInstances() {
  const { status } = live;
  if (!status || !isOpen("instances")) return;
  const here = status.applicationServer;
  const tasks = tasksOf(status);
  const chosenOne = chosen("instance") || here;
  const servers = status.applicationServers.some((one) => one.applicationServer === here)
    ? status.applicationServers
    : [{ applicationServer: here, suspect: false, shared: false, silentSeconds: 0 }, ...status.applicationServers];
  show(byId("instances-table"), table("Instances", COLUMNS, servers.map((server) => row(server, here, tasks, chosenOne))));
  if (known.address !== chosenOne) known = { address: chosenOne, details: null, error: null, at: 0, before: null };
  if (live.state === "live" && Date.now() - known.at >= EVERY_MS) look(known);
  showOne(known, here);
}

function row(server, here, tasks, chosenOne) {
  const { applicationServer: address } = server;
  const own = tasks.filter((task) => task.server.applicationServer === address);
  const onclick = () => {
    choose({ instance: address === here ? "" : address });
    showInstances();
  };
  return {
    key: address,
    selected: address === chosenOne,
    cells: [
      h("button", { type: "button", class: "quiet", onclick }, address),
      stateOf(server, here),
      String(own.filter((task) => task.role === "active").length),
      String(own.filter((task) => task.role === "standby").length),
    ],
  };
}

function stateOf({ applicationServer, suspect, shared, silentSeconds }, here) {
  if (shared) return mark("bad", "shares its address");
  if (applicationServer === here) return mark("ok", "this instance");
  if (!suspect) return mark("ok", "running");
  return mark("warn", silentSeconds === null ? "not heard of" : `silent for ${duration(silentSeconds)}`);
}

async function look(one) {
  one.at = Date.now();
  try {
    const details = await askJson(PATH, { parameters: { address: one.address } });
    Object.assign(one, { before: one.details && { at: one.answeredAt, of: one.details }, details, answeredAt: Date.now(), error: null });
  } catch (error) {
    one.error = error;
  }
  if (one === known) showInstances();
}

function showOne({ address, details, error }, here) {
  show(
    byId("instance-details"),
    h("h3", {}, address === here ? address : consoleLink(address)),
    error ? trouble(error) : "",
    details ? detailsOf(details) : error ? "" : h("p", { class: "empty" }, "Asking it …"),
    h("h4", {}, "The same by command"),
    command(`curl -i ${quoted(addressOf(PATH, { address }).href)}${tokenOption(hasToken())}`),
  );
}

function detailsOf(details) {
  const { version, startedAt, freeBytes, diskBytes, storeBytes, heapBytes, mostHeapBytes } = details;
  const facts = [
    ["Version", version],
    ["Started", moment(new Date(startedAt))],
    ["Processor", processorOf(details)],
    ["Memory", `Python ${size(details.python?.memoryBytes)}, Spark ${size(details.jvm?.memoryBytes)}`],
    ["Heap of Spark", `${size(heapBytes)} of ${size(mostHeapBytes)}`],
    ["Disk", `${size(freeBytes)} of ${size(diskBytes)} free; stores have ${size(storeBytes)}`],
  ];
  const set = details.settings.filter((one) => one.isSet);
  const rest = details.settings.filter((one) => !one.isSet);
  return [
    h("dl", { class: "facts" }, facts.map(([name, said]) => h("div", {}, h("dt", {}, name), h("dd", {}, said)))),
    details.halted.map(haltOf),
    h("h4", {}, "Last warnings and errors of its log"),
    details.log.length
      ? h("div", { class: "scrolls", tabindex: "0", role: "region", "aria-label": "Log" }, table("Log", LOG, details.log.map(lineOf)))
      : h("p", { class: "empty" }, "It has logged none."),
    h("h4", {}, "Settings"),
    settingsOf(set, "It was given none."),
    h("details", {}, h("summary", {}, `${rest.length} more have their defaults`), settingsOf(rest, "")),
  ];
}

function processorOf({ python, jvm, processors }) {
  const { before, answeredAt } = known;
  const part = (name, now) => {
    const earlier = before?.of[name];
    if (!now || !earlier || now.cpuSeconds < earlier.cpuSeconds) return UNKNOWN;
    return `${Math.round((100_000 * (now.cpuSeconds - earlier.cpuSeconds)) / (answeredAt - before.at))} %`;
  };
  return `Python ${part("python", python)}, Spark ${part("jvm", jvm)} of a core; it has ${processors ?? UNKNOWN}`;
}

// Where a model's own code failed, as far as its author needs it to find the bug.
function haltOf({ task, since, key, keyBase64, line, error }) {
  const said = keyBase64 === undefined ? key : `base64:${keyBase64}`;
  return h(
    "div",
    { class: "halted", "data-key": task },
    h("h4", {}, `${task} is halted by its model's code, since `, since ? moment(new Date(since)) : UNKNOWN),
    h("p", {}, h("code", {}, error)),
    copied("Key of the event", said ?? UNKNOWN),
    copied("Line", line || UNKNOWN),
  );
}

const copied = (name, text) => h("div", { class: "command" }, h("span", { class: "note" }, name), h("code", { tabindex: "0" }, text), copyButton(text));

function lineOf({ at, level, line, times }, n) {
  return {
    key: `${at} ${n}`,
    cells: [moment(new Date(at)), count(times), mark(level === "warning" ? "warn" : "bad", level), h("code", {}, eventOf(line))],
  };
}

// The event of a line, and what it is about; a line that was cut as it is.
function eventOf(line) {
  try {
    const { event, level, logger, timestamp, ...rest } = JSON.parse(line);
    const about = Object.entries(rest).map(([name, value]) => `${name}=${typeof value === "string" ? value : JSON.stringify(value)}`);
    return [event, ...about].join("  ");
  } catch {
    return line;
  }
}

function settingsOf(settings, none) {
  if (!settings.length) return h("p", { class: "empty" }, none);
  const rows = settings.map(({ name, value }) => ({ key: name, cells: [name, value || "–"] }));
  return table("Settings", SETTINGS, rows);
}
