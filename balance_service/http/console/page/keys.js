// Looks up keys: one with its position and owner, live; or many by range, prefix or greatest value. Of the tables that
// read models join with, one row at a time.

import { addressOf, ask, events, exactJson, hasToken, pause, Refusal, text } from "./api.js";
import { catalogue, onCatalogue } from "./catalogue.js";
import { byId, command, h, show, showOptions, table, trouble } from "./dom.js";
import { count, mark, moment, UNKNOWN } from "./format.js";
import { owners, stageName, troubleOf } from "./judge.js";
import { live } from "./live.js";
import { quoted, tokenOption } from "./shell.js";
import { isOpen } from "./tabs.js";
import { choose, chosen, onChosen } from "./url.js";

const RETRY_MS = 2000;
const NUMBERS = /^(decimal|double|float|int|long)/;

// The key that is followed: what aborts it, and the choices that it was asked for.
let asked = { controller: new AbortController(), choices: "" };
let isStopped = true;
let keyShown = null;
let page = null;

export function start() {
  byId("key-form").onsubmit = (event) => {
    event.preventDefault();
    choose({ keyModel: byId("keys-model").value, key: byId("key").value });
    lookUp();
  };
  byId("keys-model").onchange = (event) => {
    choose({ keyModel: event.target.value, by: "", key: "", within: "" });
    clear();
    showFields();
  };
  byId("range-form").onsubmit = (event) => {
    event.preventDefault();
    const { within, from, to, prefix, limit } = event.target.elements;
    choose({ within: within.value, from: from.value, to: to.value, prefix: prefix.value, limit: limit.value, list: "entries" });
    list();
  };
  byId("top-form").onsubmit = (event) => {
    event.preventDefault();
    choose({ by: byId("top-by").value, list: "top" });
    list();
  };
  onCatalogue(restore);
  onChosen(() => {
    if (choices() !== asked.choices) restore();
  });
  fillForms();
}

export function showKeys() {
  stopWhileUnseen();
  show(byId("keys-problem"), catalogue.error ? trouble(catalogue.error) : "");
  // Its owner may have changed.
  if (keyShown) showKey(keyShown);
}

// The page as a whole can be paused, and another panel can be open.
function stopWhileUnseen() {
  const isUnseen = live.state === "paused" || !isOpen("keys");
  if (isUnseen === isStopped) return;
  isStopped = isUnseen;
  if (isUnseen) asked.controller.abort();
  else if (askable().length) askChosen();
}

function askChosen() {
  if (chosen("key")) lookUp();
  if (chosen("list") && page === null && !asks().isTable) list();
}

// Starts over with another token, when the read models are known again.
export function forget() {
  restore();
  clear();
}

// What the address of the page says about this panel.
const choices = () => JSON.stringify(["keyModel", "key", "within", "from", "to", "prefix", "limit", "by", "list"].map(chosen));

function clear() {
  asked.controller.abort();
  // What ends now must not show itself again.
  asked = { ...asked, controller: new AbortController() };
  keyShown = null;
  show(byId("key-result"));
  show(byId("entries"));
}

function fillForms() {
  byId("key").value = chosen("key");
  for (const name of ["within", "from", "to", "prefix", "limit"]) byId("range-form").elements[name].value = chosen(name);
}

function restore() {
  byId("keys-forms").disabled = !askable().length;
  if (!askable().length) return;
  fillForms();
  const first = live.status.models[0]?.model ?? "";
  showOptions(byId("keys-model"), askable().map(({ label }) => [label, label]), chosen("keyModel") || first);
  showFields();
  asked.choices = choices();
  page = null;
  if (!isStopped) askChosen();
}

// A composite key is named by its columns, as in the address of a query: card=c1&day=20.
const isComposite = ({ key }) => Array.isArray(key);
const formOf = (columns) => columns.map((column) => `${column}=…`).join("&");
const keyText = (key) =>
  typeof key === "string" ? key : new URLSearchParams(Object.entries(key).map(([column, value]) => [column, text(value)])).toString();

// What has keys: a read model has states, and a table rows. No name of a read model has a space.
const askable = () => [
  ...catalogue.models.map((model) => ({ ...model, label: model.name, path: `api/models/${encodeURIComponent(model.name)}`, noun: "state", isTable: false })),
  ...catalogue.tables.map(({ name, keyFormat }) => ({
    name,
    label: `table ${name}`,
    path: `api/tables/${encodeURIComponent(name)}`,
    noun: "row",
    key: `Key (${keyFormat})`,
    fields: {},
    isTable: true,
  })),
];
const asks = () => askable().find(({ label }) => label === byId("keys-model").value);

function showFields() {
  const { key, fields, isTable } = asks();
  const composite = isComposite({ key });
  byId("key-label").textContent = composite ? formOf(key) : key || "Key";
  byId("range-form").hidden = isTable;
  byId("within").hidden = !composite;
  byId("within-label").textContent = composite ? `Of ${formOf(key.slice(0, -1))}` : "";
  const numbers = Object.keys(fields).filter((name) => NUMBERS.test(fields[name]));
  showOptions(byId("top-by"), numbers.map((name) => [name, name]), chosen("by"));
  byId("top-form").hidden = !numbers.length;
}

// One key: a query tells its position, epoch and lag; then a stream tells each change.
export async function lookUp() {
  asked.controller.abort();
  asked = { controller: new AbortController(), choices: choices() };
  const { signal } = asked.controller;
  const of = asks();
  const key = byId("key").value;
  const path = isComposite(of) ? `${of.path}/keys?${new URLSearchParams(key)}` : `${of.path}/keys/${encodeURIComponent(key)}`;
  const shown = { of, key, path, at: null, value: undefined, error: null, isLive: false, about: {} };
  try {
    // The API has no stream of rows.
    await (of.isTable ? query : follow)(shown, signal);
  } catch (error) {
    shown.isLive = false;
    if (signal.aborted && asked.controller.signal !== signal) return;
    shown.error = signal.aborted ? null : error;
    showKey(shown);
  }
}

async function query(shown, signal) {
  let answer;
  try {
    answer = await ask(shown.path, { signal });
    shown.value = exactJson(answer.text).value;
  } catch (error) {
    if (!(error instanceof Refusal) || error.status !== 404) throw error;
    shown.value = null;
  }
  const of = (header) => answer?.headers.get(`Balance-${header}`) ?? "";
  shown.about = { position: of("Position"), epoch: of("Epoch"), role: of("Role"), server: of("Application-Server"), generation: of("Generation"), lag: of("Lag") };
  shown.at = new Date();
  showKey(shown);
}

async function follow(shown, signal) {
  for (;;) {
    try {
      // Another generation may answer than before.
      await query(shown, signal);
      for await (const { event, id, data, comment } of events(shown.path, { signal })) {
        if (comment !== undefined) takeSource(shown, comment);
        else if (event === "state") {
          shown.value = exactJson(data).value;
          // The id also names the changelog that the position is of.
          [shown.about.generation, shown.about.position] = id.split("@")[0].split("/");
          shown.at = new Date();
        }
        shown.isLive = true;
        shown.error = null;
        showKey(shown);
      }
      shown.error = null;
    } catch (error) {
      if (signal.aborted || (error instanceof Refusal && error.status < 500)) throw error;
      shown.error = error;
    }
    shown.isLive = false;
    showKey(shown);
    await pause(RETRY_MS);
  }
}

function takeSource(shown, comment) {
  const [, epoch, server] = /^partition \d+ epoch (\d+) at (.+)$/.exec(comment) ?? [];
  if (server) Object.assign(shown.about, { epoch, server, role: "active" });
}

// A stream does not tell the lag of its owner; the status does.
function lagOf({ of, about }) {
  const task = `${stageName(of.name, Number(about.generation || 1))}_${about.position.split(":")[0]}`;
  const owner = owners(live.status).find((one) => one.task === task);
  return owner ? count(owner.lag) : "";
}

function showKey(shown) {
  keyShown = shown;
  const { of, value, about, at, error } = shown;
  // While nobody answers for its partition, the stream stays open and silent.
  const unanswered = live.status && !of.isTable ? troubleOf(live.status, of.name, about.position ?? "") : "";
  const isLive = shown.isLive && !unanswered;
  const rows = [
    ["Position", about.position],
    ["Epoch", about.epoch],
    ["Role", about.role],
    ["Answered by", about.server],
    ...(of.isTable ? [] : [["Generation", about.generation]]),
    ["Lag", isLive ? lagOf(shown) : about.lag],
  ];
  show(
    byId("key-result"),
    h("p", { class: "live" }, isLive ? mark("ok", "live") : mark("unknown", "not live"), at ? [" received ", moment(at)] : ""),
    error ? trouble(error) : unanswered ? h("p", { class: "waits", role: "alert" }, `Not as of now: ${unanswered}`) : "",
    value === undefined ? "" : value === null ? h("p", {}, `${shown.key} has no ${of.noun}.`) : valueTable(value),
    h("dl", { class: "facts" }, rows.map(([name, said]) => h("div", {}, h("dt", {}, name), h("dd", {}, said || UNKNOWN)))),
    h("h4", {}, "The same by command"),
    command(`curl -i ${quoted(addressOf(shown.path).href)}${tokenOption(hasToken())}`),
    of.label === "balance" ? command(`balance-service get-balance ${quoted(shown.key)} --url ${location.origin}`) : "",
  );
}

function valueTable(value) {
  if (value === null || typeof value !== "object" || Array.isArray(value) || "text" in value) {
    return h("p", { class: "value" }, text(value));
  }
  return h(
    "table",
    { class: "value", "aria-label": "Value" },
    h("tbody", {}, Object.entries(value).map(([name, one]) => h("tr", {}, h("th", { scope: "row" }, name), h("td", { class: "number" }, text(one))))),
  );
}

async function list() {
  asked.choices = choices();
  const of = asks();
  const kind = chosen("list");
  const given =
    kind === "top"
      ? { by: byId("top-by").value, limit: chosen("limit") }
      : { ...withinOf(of), from: chosen("from"), to: chosen("to"), prefix: chosen("prefix"), limit: chosen("limit") };
  page = { path: `${of.path}/${kind}`, given, entries: [], next: null, keys: null };
  show(byId("entries"), h("p", {}, "Asking all instances …"));
  await more(page);
  try {
    page.keys = exactJson((await ask(`${of.path}/count`)).text).count.text;
    showEntries(page);
  } catch {
    // The entries are shown without the number of all keys.
  }
}

function withinOf(one) {
  return isComposite(one) ? Object.fromEntries(new URLSearchParams(chosen("within"))) : {};
}

async function more(shown) {
  try {
    const after = shown.next ?? "";
    const answer = exactJson((await ask(shown.path, { parameters: { ...shown.given, after } })).text);
    shown.entries.push(...answer.entries);
    shown.next = answer.next ?? null;
    shown.error = null;
  } catch (error) {
    shown.error = error;
  }
  if (shown === page) showEntries(shown);
}

function showEntries(shown) {
  const columns = shown.entries[0]?.value && typeof shown.entries[0].value === "object" ? Object.keys(shown.entries[0].value) : [];
  const keys = shown.keys === null ? "" : ` of ${count(Number(shown.keys))} in all`;
  const cellsOf = (value) => (columns.length ? columns.map((name) => text(value[name])) : [text(value)]);
  show(
    byId("entries"),
    shown.error ? trouble(shown.error) : "",
    h("p", {}, `${count(shown.entries.length)} keys${keys}`),
    shown.entries.length
      ? h(
          "div",
          { class: "scrolls", tabindex: "0", role: "region", "aria-label": "Keys" },
          table(
            "Keys and values",
            [["Key", "key"], ...(columns.length ? columns : ["Value"]).map((name) => [name, "number"])],
            shown.entries.map(({ key, value }) => ({ key: `k${keyText(key)}`, cells: [keyButton(keyText(key)), ...cellsOf(value)] })),
          ),
        )
      : "",
    shown.next === null ? "" : h("button", { type: "button", onclick: () => more(shown) }, "More"),
    h("h4", {}, "The same by command"),
    command(`curl -i ${quoted(addressOf(shown.path, shown.given).href)}${tokenOption(hasToken())}`),
  );
}

function keyButton(key) {
  const onclick = () => {
    byId("key").value = key;
    choose({ keyModel: byId("keys-model").value, key });
    lookUp();
    byId("key").focus();
  };
  return h("button", { type: "button", class: "quiet", onclick }, key);
}
