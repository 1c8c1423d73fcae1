// What operators did about dead letters and generations, and what the service did by itself.

import { addressOf, askJson, hasToken } from "./api.js";
import { onDecided } from "./decide.js";
import { byId, command, h, show, table, trouble } from "./dom.js";
import { moment } from "./format.js";
import { live } from "./live.js";
import { quoted, tokenOption } from "./shell.js";
import { onStep } from "./steps.js";
import { isOpen } from "./tabs.js";

const PATH = "api/history";
// The instance may read a whole topic for it.
const EVERY_MS = 30_000;
const COLUMNS = [
  ["Time", ""],
  ["Who", ""],
  ["Did", ""],
  ["About", "key"],
  ["Reason", "key"],
];

let actions = null;
let error = null;
let askedAt = 0;
// Of the token: an answer to the one before is not shown.
let run = 0;

export function start() {
  onDecided(again);
  onStep(again);
}

// Starts over with another token.
export function forget() {
  actions = error = null;
  run++;
  again();
}

function again() {
  askedAt = 0;
}

export function showHistory() {
  if (!isOpen("history") || !live.status) return;
  if (live.state === "live" && Date.now() - askedAt >= EVERY_MS) look();
  show(
    byId("history-list"),
    error ? trouble(error) : "",
    actions === null ? (error ? "" : h("p", { class: "empty" }, "Reading the history …")) : "",
    actions?.length === 0 ? h("p", { class: "empty" }, "Nothing was done yet.") : "",
    actions?.length ? h("div", { class: "scrolls", tabindex: "0", role: "region", "aria-label": "History" }, table("History", COLUMNS, actions.map(row))) : "",
    h("h4", {}, "The same by command"),
    command(`curl -i ${quoted(addressOf(PATH).href)}${tokenOption(hasToken())}`),
  );
}

async function look() {
  askedAt = Date.now();
  const asked = run;
  let answer = { actions, error: null };
  try {
    answer = { ...(await askJson(PATH)), error: null };
  } catch (failure) {
    answer.error = failure;
  }
  if (asked !== run) return;
  ({ actions, error } = answer);
  showHistory();
}

function row({ at, by, action, about, detail, reason }) {
  return {
    key: `${at} ${action} ${about}`,
    cells: [moment(new Date(at)), by, action, [about, h("span", { class: "reason" }, detail)], reason || "–"],
  };
}
