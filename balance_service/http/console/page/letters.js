// Dead letters: by cause for all instances, then a list, and one of them with its record.

import { addressOf, ask, askJson, exactJson, hasToken, isPassing, text } from "./api.js";
import { decide, isOffered, isTaken, onDecided } from "./decide.js";
import { isDeciding } from "./decision.js";
import { byId, command, h, show, showOptions, table, trouble } from "./dom.js";
import { count, mark, moment, UNKNOWN } from "./format.js";
import { modelsOf } from "./judge.js";
import { live } from "./live.js";
import { actionFor, runbookLink } from "./runbook.js";
import { quoted, tokenOption } from "./shell.js";
import { isOpen } from "./tabs.js";
import { choose, chosen, onChosen } from "./url.js";

const PAGE = "50";
const RETRY_MS = 5000;
const STATUSES = ["scheduled", "behind", "waiting", "parked", "applied", "discarded", "superseded"];
const KINDS = { scheduled: "info", behind: "info", waiting: "warn", parked: "warn", applied: "ok", discarded: "unknown", superseded: "unknown" };
const MOST_BYTES = 1024;
const CAUSES = [
  ["Cause", ""],
  ["Read model", ""],
  ["Heal themselves", "number"],
  ["Need you", "number"],
];
const LETTERS = [
  ["Select", "check"],
  ["Dead letter", ""],
  ["Key", "key"],
  ["Cause", ""],
  ["Status", ""],
  ["Failed", ""],
  ["Tried", ""],
  ["Next retry", ""],
];

const selected = new Set();
let letters = null;
let next = null;
let missing = [];
// Of the status: `{ model, cause, status }` of those that are open.
let open = [];
let error = null;
let failedAt = 0;
let seen = "";
let shownFor = "";
// The one that was asked for last.
let oneAsked = "";

export function start() {
  for (const name of ["Model", "Cause", "Status"]) {
    byId(`letters-${name.toLowerCase()}`).onchange = (event) => {
      choose({ [`letters${name}`]: event.target.value });
      filtered();
    };
  }
  for (const decision of ["redrive", "discard"]) {
    byId(`${decision}-selected`).onclick = () =>
      decide(decision, { letters: letters.filter((letter) => selected.has(letter.id) && isTaken(decision, letter)) });
    byId(`${decision}-all`).onclick = () => decide(decision, { filter: filter() });
  }
  onChosen(showLetters);
  onDecided(() => {
    selected.clear();
    load();
    showOne();
  });
}

// Starts over with another token.
export function forget() {
  letters = null;
  missing = [];
  error = null;
  shownFor = seen = oneAsked = "";
  show(byId("letter"));
}

const filter = () => ({ model: chosen("lettersModel"), cause: chosen("lettersCause"), status: chosen("lettersStatus") });

const isWanted = (one) => Object.entries(filter()).every(([name, value]) => !value || one[name] === value);

// Shows the counts of the status, and reads the list again when they have changed.
export function showLetters() {
  const { status } = live;
  if (!status || !isOpen("letters")) return;
  if (status.partitions === null) {
    // What was open before this instance started again may have changed.
    show(byId("causes"), h("p", { class: "empty" }, `Open dead letters: ${UNKNOWN}, as this instance is starting.`));
    return;
  }
  const models = modelsOf(status);
  showCauses(models);
  open = models.flatMap((model) => model.letters.map((one) => ({ ...one, model: model.name })));
  const causes = [...new Set([...open.map((one) => one.cause), ...(letters ?? []).map((one) => one.cause), chosen("lettersCause")])];
  const options = (names, all) => [["", all], ...names.filter(Boolean).sort().map((name) => [name, name])];
  showOptions(byId("letters-model"), options(models.map((model) => model.name), "all read models"), chosen("lettersModel"));
  showOptions(byId("letters-cause"), options(causes, "all causes"), chosen("lettersCause"));
  showOptions(byId("letters-status"), [["", "all statuses"], ...STATUSES.map((name) => [name, name])], chosen("lettersStatus"));
  const now = JSON.stringify([open, filter()]);
  const isDue = now !== seen || (failedAt && Date.now() - failedAt > RETRY_MS);
  if (isDue && live.state === "live" && !isDeciding()) {
    seen = now;
    load();
  }
  if (live.state === "live" && chosen("letter") !== oneAsked) showOne();
  showList();
}

function filtered() {
  selected.clear();
  showLetters();
}

function showCauses(models) {
  const rows = models.flatMap((model) =>
    [...Map.groupBy(model.letters, (one) => one.cause)].map(([cause, all]) => ({
      model: model.name,
      cause,
      heals: total(all.filter((one) => !one.needsDecision)),
      needs: total(all.filter((one) => one.needsDecision)),
    })),
  );
  rows.sort((one, other) => other.needs - one.needs || other.heals - one.heals);
  if (!rows.length) {
    show(byId("causes"), h("p", { class: "empty" }, models.every((model) => model.lettersAreKnown) ? "No dead letter is open." : `Open dead letters: ${UNKNOWN}, as some partitions have no owner.`));
    return;
  }
  const link = (row, number, lettersStatus) => {
    const onclick = () => {
      choose({ lettersModel: row.model, lettersCause: row.cause, lettersStatus });
      filtered();
    };
    return number ? h("button", { type: "button", class: "quiet", onclick }, count(number)) : "0";
  };
  show(
    byId("causes"),
    table(
      "Open dead letters by cause",
      CAUSES,
      rows.map((row) => ({
        key: `${row.model} ${row.cause}`,
        cells: [
          row.cause,
          row.model,
          link(row, row.heals, ""),
          h("span", {}, row.needs ? mark("warn", "") : "", link(row, row.needs, "")),
        ],
      })),
    ),
  );
}

const total = (all) => all.reduce((sum, one) => sum + one.count, 0);

async function load(after = "") {
  const asked = JSON.stringify(filter());
  try {
    const page = await askJson("api/deadLetters", { parameters: { ...filter(), limit: PAGE, after, partial: "true" } });
    if (asked !== JSON.stringify(filter())) return;
    letters = after ? [...letters, ...page.deadLetters] : page.deadLetters;
    next = page.next;
    missing = after ? [...new Set([...missing, ...page.missing])] : page.missing;
    error = null;
    failedAt = missing.length ? Date.now() : 0;
  } catch (failure) {
    error = failure;
    failedAt = isPassing(failure) ? Date.now() : 0;
  }
  shownFor = asked;
  for (const id of selected) if (!letters?.some((one) => one.id === id)) selected.delete(id);
  showList();
}

function showList() {
  show(
    byId("letters-list"),
    error ? trouble(error) : "",
    missing.length && !error ? h("p", { class: "waits", role: "alert" }, `The list lacks those of ${missing.join(", ")}: nobody answers for ${missing.length > 1 ? "these partitions" : "this partition"} now.`) : "",
    letters === null && !error ? h("p", { class: "empty" }, "Reading the list …") : "",
    letters?.length === 0 && shownFor === JSON.stringify(filter()) ? h("p", { class: "empty" }, "No dead letter matches, open or closed within seven days.") : "",
    letters?.length
      ? h("div", { class: "scrolls", tabindex: "0", role: "region", "aria-label": "List of dead letters" }, table("Dead letters", LETTERS, letters.map(row), 1))
      : "",
    next ? h("button", { type: "button", onclick: () => load(next) }, "More") : "",
  );
  const number = selected.size;
  for (const decision of ["redrive", "discard"]) {
    // Neither what would be refused nor what is warned of is offered.
    const listed = letters ?? [];
    byId(`${decision}-selected`).hidden = !listed.some((letter) => selected.has(letter.id) && isTaken(decision, letter));
    byId(`${decision}-all`).hidden = !isOffered(decision, listed, next === null ? [] : open.filter(isWanted));
  }
  byId("selected").hidden = !letters?.length;
  byId("selected").textContent = number ? `${count(number)} selected` : "none selected";
}

function row(letter) {
  const { id } = letter;
  const onchange = (event) => {
    if (event.target.checked) selected.add(id);
    else selected.delete(id);
    showList();
  };
  const onclick = async () => {
    choose({ letter: id });
    await showOne();
    byId("letter").scrollIntoView({ block: "nearest" });
  };
  const isUndecided = !["applied", "discarded", "superseded"].includes(letter.status);
  return {
    key: id,
    selected: chosen("letter") === id,
    cells: [
      isUndecided ? h("input", { type: "checkbox", "aria-label": `Select ${id}`, checked: selected.has(id), onchange }) : "",
      h("button", { type: "button", class: "quiet whole", onclick }, id),
      keyOf(letter),
      letter.detail ? [letter.cause, h("span", { class: "reason" }, letter.detail)] : letter.cause,
      mark(KINDS[letter.status], letter.status),
      [moment(new Date(letter.failedAt)), recordOf(letter)],
      String(letter.attempt),
      letter.dueAt ? moment(new Date(letter.dueAt)) : "–",
    ],
  };
}

const recordOf = ({ recordAt }) => h("span", { class: "reason" }, recordAt ? ["record of ", moment(new Date(recordAt))] : "");

const keyOf = (letter) => (letter.keyBase64 !== undefined ? `base64:${letter.keyBase64}` : (letter.key ?? "–"));

// One dead letter with its record, as its producer sent it.
async function showOne() {
  const id = (oneAsked = chosen("letter"));
  if (!id) {
    show(byId("letter"));
    return;
  }
  const path = `api/deadLetters/${encodeURIComponent(id)}`;
  let letter;
  let action;
  try {
    letter = exactJson((await ask(path)).text);
    action = await actionFor(letter.cause);
  } catch (error) {
    show(byId("letter"), trouble(error, `${id}: `));
    return;
  }
  if (id !== chosen("letter")) return;
  const facts = [
    ["Read model", letter.model],
    ["Cause", letter.cause],
    ["Status", mark(KINDS[letter.status], letter.status)],
    ["Record's time", letter.recordAt ? moment(new Date(letter.recordAt)) : UNKNOWN],
    ["Failed", moment(new Date(letter.failedAt))],
    ["Tried", `${text(letter.attempt)} times`],
    ["Next retry", letter.dueAt ? moment(new Date(letter.dueAt)) : "–"],
    ["Key", keyOf(letter)],
  ];
  const close = () => {
    choose({ letter: "" });
    showOne();
    showList();
  };
  const isUndecided = !["applied", "discarded", "superseded"].includes(letter.status);
  show(
    byId("letter"),
    h("div", { class: "title" }, h("h3", { id: "letter-title" }, `Dead letter ${id}`), h("button", { type: "button", onclick: close }, "Close")),
    letter.detail ? h("p", {}, letter.detail) : "",
    h("dl", { class: "facts" }, facts.map(([name, said]) => h("div", {}, h("dt", {}, name), h("dd", {}, said)))),
    isUndecided ? h("p", {}, h("strong", {}, "What to do: "), action, " ", runbookLink(letter.status === "parked" ? "BalanceDeadLettersParked" : "BalanceDeadLetters")) : "",
    isUndecided && letter.redriveRefused ? h("p", { class: "note" }, `A redrive would be refused: ${letter.redriveRefused}.`) : "",
    letter.discardWarning ? h("p", { class: "note" }, `Warning: ${letter.discardWarning}.`) : "",
    h("h4", {}, "Headers"),
    headersOf(letter.headers),
    h("h4", {}, "Value"),
    decodedOf(letter),
    ...valueOf(letter.valueBase64),
    h("h4", {}, "The same by command"),
    command(`curl -i ${quoted(addressOf(path).href)}${tokenOption(hasToken())}`),
    command(`balance-service dead-letters show ${quoted(id)} --url ${location.origin}`),
    isUndecided
      ? h(
          "div",
          { class: "buttons" },
          letter.redriveRefused ? "" : h("button", { type: "button", onclick: () => decide("redrive", { letters: [letter] }) }, "Redrive …"),
          letter.discardWarning ? "" : h("button", { type: "button", class: "danger", onclick: () => decide("discard", { letters: [letter] }) }, "Discard …"),
        )
      : "",
  );
  showList();
}

function headersOf(headers) {
  if (headers === null) return h("p", {}, "Not known: the topic no longer has the record, or a name is not UTF-8.");
  if (!headers.length) return h("p", {}, "None.");
  return h("dl", { class: "headers" }, headers.map(({ name, value, valueBase64 }) => h("div", {}, h("dt", {}, name), h("dd", {}, valueBase64 === undefined ? (value ?? "null") : `base64:${valueBase64}`))));
}

// The value by the schema of its producer, if it can be decoded.
function decodedOf({ decoded, problem }) {
  if (problem) return h("p", {}, `Not decoded: ${problem}.`);
  if (decoded === null) return "";
  const { record, value } = decoded;
  const fields = value !== null && typeof value === "object" && !Array.isArray(value) ? Object.entries(value) : [["value", value]];
  return h(
    "table",
    { class: "value", "aria-label": "Decoded value" },
    h("caption", {}, record),
    h("tbody", {}, fields.map(([name, one]) => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, text(one))))),
  );
}

function valueOf(base64) {
  if (base64 === null) return [h("p", {}, "None, or the topic no longer has the record.")];
  const bytes = Uint8Array.from(atob(base64), (char) => char.charCodeAt(0));
  const framed = bytes.length >= 5 && bytes[0] === 0;
  const id = framed ? new DataView(bytes.buffer).getUint32(1) : null;
  const read = readable(bytes);
  return [
    h("p", {}, `${count(bytes.length)} bytes`, framed ? `, in the registry's frame: schema id ${id}` : ", without the registry's frame", read === null ? "" : "; as text:"),
    read === null ? "" : h("pre", { tabindex: "0", "aria-label": "Value as text" }, read),
    h("pre", { class: "bytes", tabindex: "0", "aria-label": "Bytes of the value" }, dump(bytes.subarray(0, MOST_BYTES))),
    bytes.length > MOST_BYTES ? h("p", {}, `The first ${count(MOST_BYTES)} bytes; the command below prints all.`) : "",
  ];
}

// The bytes as text if they are text; else null.
function readable(bytes) {
  try {
    const found = new TextDecoder("utf-8", { fatal: true }).decode(bytes.subarray(0, MOST_BYTES));
    return bytes.length && /^[\P{Cc}\s]*$/u.test(found) ? found : null;
  } catch {
    return null;
  }
}

function dump(bytes) {
  const lines = [];
  for (let at = 0; at < bytes.length; at += 16) {
    const row = [...bytes.subarray(at, at + 16)];
    const hex = row.map((byte) => byte.toString(16).padStart(2, "0")).join(" ");
    const text = row.map((byte) => (byte >= 32 && byte < 127 ? String.fromCharCode(byte) : ".")).join("");
    lines.push(`${at.toString(16).padStart(6, "0")}  ${hex.padEnd(47)}  ${text}`);
  }
  return lines.join("\n");
}
