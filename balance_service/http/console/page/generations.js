// The generations of the read models: what serves, is built or kept, how they compare, and which steps are possible.

import { addressOf, ask, askJson, exactJson, hasToken, text } from "./api.js";
import { catalogue } from "./catalogue.js";
import { byId, command, consoleLink, h, show, showOptions, table, trouble } from "./dom.js";
import { count, duration, mark, moment, progress, rate, UNKNOWN } from "./format.js";
import { applied, stageName } from "./judge.js";
import { live, rateOf, secondsLeft } from "./live.js";
import { runbookLink } from "./runbook.js";
import { quoted, tokenOption } from "./shell.js";
import { drop, onStep, rebuild, switchTo } from "./steps.js";
import { isOpen } from "./tabs.js";
import { choose, chosen, onChosen } from "./url.js";

const EVERY_MS = 2000;
// A read model with one generation changes by a step only, which the status shows.
const ALONE_MS = 10_000;
const OLD_MS = 15_000;
const COLUMNS = [
  ["Read model", ""],
  ["Generation", "number"],
  ["Version", "number"],
  ["State", ""],
  ["Partitions running", "number"],
  ["Position", "number"],
  ["Lag, records", "number"],
  ["Rate", "number"],
  ["Steps", ""],
];
const KINDS = { serving: "ok", building: "info", ready: "warn", kept: "unknown" };
const NEXT = {
  when_equal: "It serves once it has caught up, if all states are equal.",
  always: "It serves once it has caught up.",
  never: "It serves when an operator switches.",
};
const COUNTS = [
  ["equal", "Keys equal"],
  ["different", "Different"],
  ["onlyServing", "Only in the old"],
  ["onlyBuilding", "Only in the new"],
];

// By read model: `{ answer, at, askedAt, hosted, error }`.
const known = new Map();
let isAsking = false;
let differences = null;

export function start() {
  byId("generations-model").onchange = (event) => {
    choose({ generationsModel: event.target.value });
    showGenerations();
  };
  onChosen(showGenerations);
  onStep((answer) => {
    take(answer);
    showGenerations();
  });
}

// Starts over with another token.
export function forget() {
  known.clear();
  differences = null;
  show(byId("differences"));
}

// The generations of each read model here that keeps states, as the status has them: `{ name, generations }`.
function hosted() {
  const names = catalogue.models.filter(({ key }) => key !== "").map(({ name }) => name);
  const byModel = Map.groupBy(live.status.models, ({ model }) => model);
  return names.filter((name) => byModel.has(name)).map((name) => ({ name, generations: byModel.get(name) }));
}

export function showGenerations() {
  if (!isOpen("generations") || !live.status) return;
  if (!catalogue.isKnown || live.status.partitions === null) {
    show(byId("generations-table"), catalogue.error ? trouble(catalogue.error) : h("p", { class: "empty" }, UNKNOWN));
    return;
  }
  const all = hosted();
  const options = [["", "all read models"], ...all.map(({ name }) => [name, name])];
  const only = showOptions(byId("generations-model"), options, chosen("generationsModel"));
  const shown = all.filter(({ name }) => only === "" || name === only);
  for (const { name } of shown) if (!known.has(name)) known.set(name, { answer: null, at: 0, askedAt: 0, hosted: "", error: null });
  look(shown);
  showTable(shown);
  showDifferences();
}

// Asks for those that may have changed, one after the other.
async function look(shown) {
  if (isAsking) return;
  isAsking = true;
  try {
    for (const model of shown) if (isDue(model)) await lookAt(model);
  } finally {
    isAsking = false;
  }
}

function isDue({ name, generations }) {
  const one = known.get(name);
  if (live.state !== "live" || !one) return false;
  const every = generations.length > 1 && !one.error ? EVERY_MS : ALONE_MS;
  return Date.now() - one.askedAt >= every || (one.hosted !== JSON.stringify(generations) && !one.error);
}

async function lookAt({ name, generations }) {
  const one = known.get(name);
  Object.assign(one, { askedAt: Date.now(), hosted: JSON.stringify(generations) });
  try {
    take(await askJson(`api/models/${encodeURIComponent(name)}/generations`));
  } catch (error) {
    one.error = error;
  }
  showGenerations();
}

function take(answer) {
  const one = known.get(answer.model);
  if (one) Object.assign(one, { answer, at: Date.now(), error: null });
}

function showTable(shown) {
  show(
    byId("generations-table"),
    shown.map(({ name }) => problemOf(name, known.get(name))),
    h("div", { class: "scrolls", tabindex: "0", role: "region", "aria-label": "Table of generations" }, table("Generations", COLUMNS, shown.flatMap(rows))),
  );
}

function problemOf(name, { error, at }) {
  const age = Date.now() - at;
  if (!error && (live.state === "live" || !at || age < OLD_MS)) return "";
  const asOf = at ? h("p", { class: "note", "data-key": `${name} age` }, `${name}: As of ${duration(age / 1000)} ago.`) : "";
  return [error ? trouble(error, `${name}: `) : "", asOf];
}

// Before the first answer, the status tells which generations there are.
function rows({ name, generations }) {
  const { answer } = known.get(name);
  if (answer) return answer.generations.map((one) => row(name, one, answer));
  const numbers = generations.map((one) => Number(/\.g(\d+)$/.exec(one.name)?.[1] ?? 1));
  return generations.map(({ status }, n) => row(name, { generation: numbers[n], status, lag: null }, null));
}

function row(name, one, answer) {
  const stage = stageName(name, one.generation);
  return {
    key: `${name} ${one.generation}`,
    cells: [
      name,
      String(one.generation),
      count(one.version),
      stateOf(name, stage, one, answer),
      answer ? `${one.running} of ${one.partitions}` : UNKNOWN,
      count(one.position),
      count(one.lag),
      live.state === "live" ? rate(rateOf(stage)) : UNKNOWN,
      answer ? h("div", { class: "buttons" }, stepsOf(one, answer)) : "",
    ],
  };
}

const differs = ({ comparison }) => comparison !== null && COUNTS.some(([name]) => name !== "equal" && comparison[name] > 0);

function stateOf(name, stage, one, answer) {
  return h("div", { class: "state" }, mark(KINDS[one.status], one.status), answer ? detailsOf(name, stage, one, answer) : "");
}

function detailsOf(name, stage, one, answer) {
  const { status, lag, position } = one;
  const isOther = status !== "serving";
  const line = (...parts) => h("span", { class: "reason" }, parts);
  const details = [];
  if (status === "building") {
    details.push(progress(`Rebuild of ${name}`, applied(position, lag), secondsLeft(stage, lag)), line(NEXT[answer.switch]));
  }
  if (status === "ready") details.push(...comparisonOf(answer), line("It needs you: switch to it, or drop it."));
  if (status === "kept" && answer.keptUntil) details.push(line("It is to be dropped ", moment(new Date(answer.keptUntil)), "."));
  if (!isOther && answer.action) {
    details.push(line(`Last step: ${answer.action}, by ${answer.by || "the service"}${answer.reason ? `: ${answer.reason}` : ""}`));
  }
  if (one.declarationChanged) details.push(h("span", { class: "reason waits" }, "This instance declares this version otherwise than it was when the generation began."));
  if (one.readOtherwise.length > 0) {
    details.push(h("span", { class: "reason waits" }, `It began under rules ${one.decoderRules} of the decoder. Newer rules read other values of events under schema ${one.readOtherwise.join(", ")}: rebuild it.`));
  }
  if (answer.problem && isOther === answer.generations.length > 1) {
    // What merely waits is not red.
    details.push(h("span", { class: one.halted ? "reason problem" : "reason waits" }, `A step waits: ${answer.problem}. `, runbookLink("BalanceGenerationStalled")));
  }
  return details;
}

function comparisonOf(answer) {
  const { model, comparison } = answer;
  const facts = COUNTS.map(([name, label]) => h("div", {}, h("dt", {}, label), h("dd", {}, count(comparison[name]))));
  const onclick = () => {
    choose({ differences: model });
    differences = null;
    showDifferences();
  };
  const first = h("button", { type: "button", class: "quiet", onclick }, "Show the first differences");
  return [h("dl", { class: "facts" }, facts), differs(answer) ? first : ""];
}

// The steps that the generations allow now.
function stepsOf(one, answer) {
  const { model, generations } = answer;
  const serving = generations.find(({ status }) => status === "serving");
  const button = (label, onclick, kind) => h("button", { type: "button", "data-key": label, class: kind, onclick }, label);
  if (one === serving) return generations.length === 1 ? button("Rebuild …", () => rebuild(model)) : "";
  const label = { ready: "Switch …", kept: "Switch back …" }[one.status];
  // What would be refused is not offered: a generation that does not run everywhere, and, until the one that serves has
  // taken over all partitions, the loss of the way back.
  const runs = one.running === one.partitions;
  const isSettled = answer.action !== "switch";
  return [
    label && runs ? button(label, () => switchTo(answer, serving, one, one.status === "ready" && differs(answer))) : "",
    one.status !== "kept" || isSettled ? button("Drop …", () => drop(answer, one), "danger") : "",
  ];
}

// The first differences of the read model that the address of the page names, while it has any.
async function showDifferences() {
  const name = chosen("differences");
  const { answer } = known.get(name) ?? {};
  if (!name || !answer?.generations.some(({ status }) => status === "ready")) {
    differences = null;
    show(byId("differences"));
    return;
  }
  const of = JSON.stringify([name, answer.generations.map(({ generation }) => generation)]);
  if (differences?.of === of) return;
  const asked = (differences = { of });
  const path = `api/models/${encodeURIComponent(name)}/differences`;
  let found;
  try {
    found = tableOf(answer, exactJson((await ask(path)).text).differences);
  } catch (error) {
    found = trouble(error);
  }
  if (asked !== differences) return;
  const close = () => {
    choose({ differences: "" });
    showDifferences();
  };
  const others = live.status.applicationServers.filter((server) => server.applicationServer !== live.status.applicationServer);
  show(
    byId("differences"),
    h("div", { class: "title" }, h("h3", {}, `First differences of ${name}`), h("button", { type: "button", onclick: close }, "Close")),
    h("p", {}, "At most 20, of the partitions that this instance owns.", others.length ? [" Consoles of other instances: ", others.map((server, n) => [n ? ", " : "", consoleLink(server.applicationServer)]), "."] : ""),
    found,
    h("h4", {}, "The same by command"),
    command(`curl -i ${quoted(addressOf(path).href)}${tokenOption(hasToken())}`),
  );
}

function tableOf({ generations }, found) {
  if (!found.length) return h("p", { class: "empty" }, "None of them differs.");
  const numberOf = (wanted) => generations.find(({ status }) => status === wanted).generation;
  const columns = [["Key", "key"], [`Generation ${numberOf("serving")}, serving`, "key"], [`Generation ${numberOf("ready")}`, "key"]];
  const valueOf = (value) => (value === null ? h("span", { class: "none" }, "no state") : text(value));
  const cells = found.map(({ key, serving, building }) => ({ key: `k${key}`, cells: [key, valueOf(serving), valueOf(building)] }));
  return h("div", { class: "scrolls", tabindex: "0", role: "region", "aria-label": "First differences" }, table("First differences", columns, cells));
}
