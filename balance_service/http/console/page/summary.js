// The first line: what needs the reader; and the line that says how recent the page is.

import { byId, consoleLink, h, show } from "./dom.js";
import { absolute, duration, mark, plural } from "./format.js";
import { hasAnswer, modelsOf, standsStill } from "./judge.js";
import { live, setPaused } from "./live.js";
import { runbookLink } from "./runbook.js";
import { linkTo } from "./url.js";

const MOST_NAMES = 8;
const MOST_ITEMS = 8;
const OF_A_TASK = /^\S+_\d+ (is|stands) /;
const STARTING = /^this instance is starting(: )?/;

export function start() {
  const button = byId("pause");
  button.onclick = () => {
    const pauses = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", pauses);
    button.textContent = pauses ? "Resume" : "Pause";
    setPaused(pauses);
  };
}

export function showSummary() {
  showState();
  const { status } = live;
  if (!status) {
    show(byId("needs"), ...withoutStatus());
    return;
  }
  byId("instance").textContent = status.applicationServer;
  const { kind, text, items } = live.state === "lost" ? asLastHeard(status) : needsOf(status);
  show(byId("needs"), mark(kind, text), items.length ? h("ul", {}, items.map((item) => h("li", {}, item))) : "");
  document.title = `${kind === "ok" ? "✓" : "!"} ${status.applicationServer} – balance service`;
  byId("page").classList.toggle("old", live.state !== "live");
}

// What was true of the service may have changed since; another instance can tell.
function asLastHeard(status) {
  const { text, items } = needsOf(status);
  const others = status.applicationServers.filter((server) => server.applicationServer !== status.applicationServer);
  const links = others.map((server, n) => [n ? ", " : "", consoleLink(server.applicationServer)]);
  const where = links.length ? ["Consoles of other instances: ", links, ". "] : "";
  return { kind: "bad", text: `This instance does not answer. As last heard: ${text}`, items: [[where, help("BalanceInstanceDown")], ...items] };
}

function withoutStatus() {
  if (live.state === "refused") {
    return [mark("unknown", live.problem ? `The status is not shown: ${live.problem}.` : "Give a token to see the status.")];
  }
  if (live.state === "lost") return [mark("bad", `N/A: ${live.problem}`)];
  return [mark("unknown", "Asking this instance for its status …")];
}

// `{ kind, text, items }`: a sentence for all, and a line for each thing that needs the reader.
export function needsOf(status) {
  const models = modelsOf(status);
  const items = [];
  if (status.partitions === null) {
    const waits = status.reasons.map((reason) => reason.replace(STARTING, "")).filter(Boolean);
    const items = waits.map((reason) => [`It waits: ${reason}. `, help("BalanceNotReady")]);
    return { kind: waits.length ? "warn" : "info", text: "This instance is starting.", items };
  }
  for (const reason of status.ready ? [] : status.reasons) {
    // The states of tasks are told below, for all instances.
    if (!OF_A_TASK.test(reason)) items.push([`This instance is not ready: ${reason}. `, help("BalanceNotReady")]);
  }
  for (const server of status.applicationServers) {
    if (server.suspect) {
      const silent = server.silentSeconds === null ? "was not heard from" : `has been silent for ${duration(server.silentSeconds)}`;
      items.push([`${server.applicationServer} ${silent}. `, help("BalanceInstanceDown")]);
    }
    if (server.shared) items.push([`Several instances run as ${server.applicationServer}. `, help("BalanceAddressShared")]);
  }
  // What has one cause is told once.
  const problems = models.flatMap((model) => [...model.problems, ...model.others.flatMap((other) => other.problems)]);
  for (const alike of Map.groupBy(problems, (one) => (one.owner && one.reason ? `${one.verdict.word} ${one.reason}` : one.id)).values()) {
    const others = alike.length > 1 ? ` So are ${listed(alike.slice(1).map((one) => one.id))}.` : "";
    items.push([`${saidOf(alike[0])}${others} `, help(alike[0].verdict.section)]);
  }
  for (const { name, others } of models) {
    for (const { generation } of others.filter(({ status }) => status === "ready")) items.push([readyLink(name, generation), "."]);
  }
  if (items.length > MOST_ITEMS) items.splice(MOST_ITEMS, items.length, `And ${plural(items.length - MOST_ITEMS, "other problem", "other problems")}: see the partitions.`);
  if (status.endsAgeSeconds !== 0) {
    const age = status.endsAgeSeconds === null ? "not been read yet" : `not been read for ${duration(status.endsAgeSeconds)}`;
    items.push([`The ends of the topics have ${age}: lags are not known. `, help("BalanceEndsUnknown")]);
  }
  const needs = models.reduce((sum, model) => sum + model.needs, 0);
  if (needs) items.push([lettersLink(needs), ". ", help("BalanceDeadLettersWaiting")]);
  return { kind: kindOf(models, items), text: sentenceOf(models, items), items };
}

const lettersLink = (needs) =>
  h("a", { href: linkTo({ at: "letters" }) }, plural(needs, "dead letter needs you", "dead letters need you"));

// It would serve already if nobody had to decide.
const readyLink = (name, generation) =>
  h("a", { href: linkTo({ at: "generations", generationsModel: name }) }, `Generation ${generation} of ${name} is ready and needs you: switch to it, or drop it`);

function kindOf(models, items) {
  if (models.some((model) => !model.answers || model.partitions.some(standsStill))) return "bad";
  return items.length ? "warn" : "ok";
}

function sentenceOf(models, items) {
  const serve = models.filter((model) => model.answers).length;
  const all = models.length;
  const first =
    serve === all
      ? all === 1
        ? "The read model serves"
        : `All ${all} read models serve`
      : `${serve} of ${plural(all, "read model serves", "read models serve")}`;
  if (serve < all) return `${first}:`;
  return items.length ? `${first}, but:` : `${first}; no dead letter needs you.`;
}

// Why nobody answers now for the partition of a position, such as `1:42`, of a read model; empty if somebody does.
export function troubleOf(status, model, position) {
  const partition = Number(position.split(":")[0] || NaN);
  const serving = modelsOf(status).find(({ name }) => name === model);
  const found = serving?.partitions.find((one) => one.stage === serving.stage && one.partition === partition);
  return found && !hasAnswer(found) ? saidOf(found) : "";
}

// A partition that does not run as it should, in words.
export function saidOf({ stage, partition, verdict, owner, reason }) {
  const where = `${stage}_${partition}`;
  if (!owner) return `${where} has no owner: ${reason}.`;
  const left = owner.secondsLeft === null ? "" : `, about ${duration(owner.secondsLeft)} left`;
  // The reason names the task.
  if (standsStill({ verdict })) return `At ${owner.server.applicationServer}, ${reason}.`;
  if (verdict.word === "behind") return `${where} is ${duration(owner.lagSeconds)} behind.`;
  return `${where} at ${owner.server.applicationServer} is ${verdict.word}${left}${reason ? `: ${reason}` : ""}.`;
}

function listed(names) {
  const more = names.length - MOST_NAMES;
  return names.slice(0, MOST_NAMES).join(", ") + (more > 0 ? ` and ${more} more` : "");
}

const help = (section) => runbookLink(section);

function showState() {
  const { state, at, lostAt } = live;
  const age = at ? duration((Date.now() - at) / 1000) : null;
  const since = lostAt ? duration((Date.now() - lostAt) / 1000) : "";
  const said = {
    connecting: ["unknown", "connecting …"],
    live: ["ok", "live"],
    paused: ["info", age ? `paused; as of ${age} ago` : "paused"],
    refused: ["unknown", "not permitted"],
    lost: ["bad", `no connection for ${since}; trying again${age ? `; as of ${age} ago` : ""}`],
  }[state];
  const title = at ? `The last change came at ${absolute(at)}.` : "";
  show(byId("state"), mark(said[0], said[1], title));
}
