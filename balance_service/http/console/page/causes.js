// What needs the reader: a line for each cause, as the instance tells them. Title and icon of the page show the worst.

import { byId, consoleLink, h, show } from "./dom.js";
import { absolute, duration, mark, plural } from "./format.js";
import { kindOf, modelsOf } from "./judge.js";
import { live, setPaused } from "./live.js";
import { runbookLink } from "./runbook.js";
import { linkTo } from "./url.js";

const SIGNS = { ok: "✓", info: "✓", warn: "▲", bad: "■", unknown: "…" };
// A connection that is lost comes back within seconds as a rule, such as during a restart.
const HEALS_MS = 10_000;
// The reader knows that a paused page is old.
const NOW = ["live", "paused"];
const ICONS = { warn: "icon-soon.svg", bad: "icon-now.svg" };
// The panel that says more.
const PANELS = {
  "begun-again": "partitions",
  behind: "partitions",
  building: "generations",
  halted: "instances",
  letters: "letters",
  "read-otherwise": "generations",
  ready: "generations",
  restoring: "partitions",
  silent: "instances",
  standby: "partitions",
  "stands-still": "partitions",
  "unknown-setting": "instances",
  unowned: "partitions",
  waiting: "partitions",
};

export function start() {
  const button = byId("pause");
  button.onclick = () => {
    const pauses = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", pauses);
    button.textContent = pauses ? "Resume" : "Pause";
    setPaused(pauses);
  };
}

export function showCauses() {
  showState();
  const { status } = live;
  const { kind, text, causes, more = "" } = status ? (NOW.includes(live.state) ? needsOf(status) : asLastHeard(status)) : withoutStatus();
  const items = causes.length ? h("ul", { class: "causes" }, causes.map(itemOf)) : "";
  show(byId("needs"), mark(kind, text), more, items);
  if (status) byId("instance").textContent = status.applicationServer;
  const urgent = causes.filter((cause) => cause.urgency !== "none").length;
  document.title = `${SIGNS[kind]}${urgent ? ` ${urgent}` : ""} ${status?.applicationServer ?? location.host} – balance service`;
  const icon = `console/${ICONS[kind] ?? "icon.svg"}`;
  if (byId("icon").getAttribute("href") !== icon) byId("icon").setAttribute("href", icon);
  byId("page").classList.toggle("old", Boolean(status) && live.state !== "live");
}

// `{ kind, text, causes }`: a sentence for all, and what is wrong.
export function needsOf(status) {
  const { causes } = status;
  const isStarting = status.partitions === null;
  const models = isStarting ? [] : modelsOf(status);
  const serve = models.filter((model) => model.answers).length;
  const urgent = causes.filter((cause) => cause.urgency !== "none");
  const worst = urgent.some((cause) => cause.urgency === "now") ? "bad" : urgent.length ? "warn" : "";
  const kind = worst || (isStarting || serve < models.length ? "info" : "ok");
  if (isStarting) return { kind, text: "This instance is starting.", causes };
  return { kind, text: `${servingOf(serve, models.length)}${urgent.length ? (serve ? ", but:" : ":") : "; nothing needs you."}`, causes };
}

function servingOf(serve, all) {
  if (serve < all) return `${serve} of ${plural(all, "read model serves", "read models serve")}`;
  return all === 1 ? "The read model serves" : `All ${all} read models serve`;
}

// What was true of the service may have changed since; another instance can tell.
function asLastHeard(status) {
  const { text, causes } = needsOf(status);
  if (live.state !== "lost") {
    const now = withoutStatus();
    return { kind: now.kind, text: `${now.text} As last heard: ${text}`, causes };
  }
  const others = status.applicationServers.filter((server) => server.applicationServer !== status.applicationServer);
  const links = others.map((server, n) => [n ? ", " : "", consoleLink(server.applicationServer)]);
  const where = links.length ? ["Consoles of other instances: ", links, ". "] : "";
  const more = h("p", {}, where, runbookLink("BalanceInstanceDown"));
  return { kind: lossKind(), text: `This instance does not answer. As last heard: ${text}`, causes, more };
}

const lossKind = () => (Date.now() - live.lostAt < HEALS_MS ? "warn" : "bad");

function withoutStatus() {
  if (live.state === "refused") {
    const text = live.problem ? `The status is not shown: ${live.problem}.` : "Give a token to see the status.";
    return { kind: "unknown", text, causes: [] };
  }
  if (live.state === "lost") return { kind: lossKind(), text: `N/A: ${live.problem}`, causes: [] };
  return { kind: "unknown", text: "Asking this instance for its status …", causes: [] };
}

function itemOf(cause) {
  const { kind, what, since, action, heals, section, tasks, servers, follows } = cause;
  const panel = PANELS[kind];
  const choices = panel === "instances" ? { at: panel, instance: servers[0] ?? "" } : { at: panel };
  const more = follows.length === 1 ? "1 thing follows from it" : `${follows.length} things follow from it`;
  return h(
    "li",
    { "data-key": `${kind} ${tasks[0] ?? what}`, class: kindOf(cause) },
    mark(kindOf(cause), ""),
    h("strong", {}, what, "."),
    since === null ? "" : sinceOf(new Date(since)),
    ` ${action}.${heals ? " Waiting suffices." : ""} `,
    panel ? [h("a", { href: linkTo(choices) }, "Show"), " "] : "",
    section ? runbookLink(section) : "",
    follows.length ? h("details", {}, h("summary", {}, more), h("ul", {}, follows.map((told) => h("li", {}, told)))) : "",
  );
}

function sinceOf(date) {
  const seconds = Math.max(0, (Date.now() - date.getTime()) / 1000);
  return h("time", { datetime: date.toISOString(), title: absolute(date) }, ` Since ${duration(seconds < 1 ? 1 : Math.floor(seconds))}.`);
}

function showState() {
  const { state, at, lostAt } = live;
  const age = at ? duration((Date.now() - at) / 1000) : null;
  const since = lostAt ? duration((Date.now() - lostAt) / 1000) : "";
  const said = {
    connecting: ["unknown", "connecting …"],
    live: ["ok", "live"],
    paused: ["info", age ? `paused; as of ${age} ago` : "paused"],
    refused: ["unknown", "not permitted"],
    lost: [lossKind(), `no connection for ${since}; trying again${age ? `; as of ${age} ago` : ""}`],
  }[state];
  const title = at ? `The last change came at ${absolute(at)}.` : "";
  show(byId("state"), mark(said[0], said[1], title));
}
