// Redrives and discards dead letters: shows first which ones, and confirms what cannot be undone.

import { ask, askJson, sentence } from "./api.js";
import { isCurrent, open, state, tell } from "./decision.js";
import { h, trouble } from "./dom.js";
import { count, plural } from "./format.js";
import { quoted } from "./shell.js";

const NAMES = { redrive: "Redrive", discard: "Discard" };
// The statuses that a filter selects for a decision, as in the command line.
const STATUSES = { redrive: ["scheduled", "waiting", "parked"], discard: ["scheduled", "waiting", "parked", "behind"] };
const EFFECTS = {
  redrive: "Records are applied again at once. One that fails again stays a dead letter.",
  discard: "Records will never be applied, not even by a rebuild. This cannot be undone.",
};
const MOST = 10_000;
const MOST_NAMED = 10;
const PAGE = "500";
const MOST_IDS = 500;
// A request's body may have 16 KiB, including the reason.
const MOST_ID_BYTES = 12 << 10;

const decided = new Set();

// By decision, the field of a dead letter that says why it is not offered.
const AGAINST = { redrive: "redriveRefused", discard: "discardWarning" };

// Whether a decision about a dead letter is offered: it is not refused, and nothing warns of it.
export const isTaken = (verb, letter) => STATUSES[verb].includes(letter.status) && !letter[AGAINST[verb]];

// Whether a decision is offered for any dead letter that matches a filter, as far as the page knows: from the listed ones
// and, if there are more, from the status's counts of open ones, `{ cause, status }`. What is said against a decision
// about one holds for all with its cause.
export function isOffered(verb, listed, more) {
  const against = AGAINST[verb];
  const without = new Set(listed.filter((one) => STATUSES.redrive.includes(one.status) && one[against]).map((one) => one.cause));
  return [...listed, ...more.map((one) => ({ ...one, [against]: without.has(one.cause) }))].some((one) => isTaken(verb, one));
}

// Calls back when a decision was carried out.
export function onDecided(callback) {
  decided.add(callback);
}

// Opens the dialog for some dead letters, or for all that match a filter.
export async function decide(verb, { letters = [], filter }) {
  const chosen = { verb, filter, letters, isCut: false };
  const decision = {
    title: `${NAMES[verb]} dead letters`,
    panel: "letters",
    sure: verb === "discard" ? "I know that discarded records never count, and that this cannot be undone." : "",
    isDanger: verb === "discard",
    commandOf: (reason) => `balance-service dead-letters ${verb} ${wordsOf(chosen)} --reason ${quoted(reason)}`,
    carryOut: (reason) => carryOut(decision, chosen, reason),
  };
  open(decision);
  state(decision, h("p", {}, "Counting …"));
  try {
    if (filter) await collect(decision, chosen);
  } catch (error) {
    state(decision, trouble(error));
    return;
  }
  state(decision, previewOf(chosen), chosen.letters.length ? `${NAMES[verb]} ${numberOf(chosen)}` : "");
}

// Reads all dead letters that match, page by page.
async function collect(decision, chosen) {
  let after = "";
  do {
    const page = await askJson("api/deadLetters", { parameters: { ...chosen.filter, limit: PAGE, after } });
    chosen.letters.push(...page.deadLetters.filter((letter) => isTaken(chosen.verb, letter)));
    after = page.next;
    chosen.isCut = after !== null && chosen.letters.length >= MOST;
  } while (after !== null && !chosen.isCut && isCurrent(decision));
}

const numberOf = ({ letters }) => plural(letters.length, "dead letter", "dead letters");

function previewOf(chosen) {
  const { verb, letters, filter, isCut } = chosen;
  const matching = filter ? " that match" : "";
  const isWide = filter && !Object.values(filter).some(Boolean);
  const groups = [...Map.groupBy(letters, ({ model, cause, status }) => `${model}: ${cause}, ${status}`)];
  return [
    h("p", {}, h("strong", {}, `${numberOf(chosen)}${matching}`), isCut ? " so far; there are more, for which the command below is made. " : ". ", letters.length ? EFFECTS[verb] : "There is nothing to do."),
    isWide ? h("p", { class: "problem" }, "No filter is chosen: these are all open dead letters of the read models hosted here.") : "",
    h("ul", {}, groups.map(([group, all]) => h("li", {}, `${group}: ${count(all.length)}`, all.length > MOST_NAMED ? "" : ` (${all.map(({ id, key }) => (key ? `${id}, key ${key}` : id)).join("; ")})`))),
  ];
}

// Which ones, as words of a command line.
function wordsOf({ filter, letters }) {
  const options = Object.entries(filter ?? {}).filter(([, value]) => value).map(([name, value]) => `--${name} ${quoted(value)}`);
  return options.length ? options.join(" ") : letters.map(({ id }) => quoted(id)).join(" ");
}

function batchesOf(ids) {
  const batches = [[]];
  let bytes = 0;
  for (const id of ids) {
    bytes += id.length + 4;
    if (batches.at(-1).length === MOST_IDS || bytes > MOST_ID_BYTES) {
      batches.push([]);
      bytes = id.length + 4;
    }
    batches.at(-1).push(id);
  }
  return batches;
}

async function carryOut(decision, { verb, letters }, reason) {
  let accepted = 0;
  const refused = [];
  for (const ids of batchesOf(letters.map(({ id }) => id))) {
    tell(decision, h("p", { role: "status" }, `${count(accepted)} of ${count(letters.length)} …`));
    try {
      const answer = JSON.parse((await ask(`api/deadLetters.${verb}`, { body: { ids, reason } })).text);
      accepted += answer.accepted.length;
      refused.push(...answer.refused.map((one) => `${one.id}: ${one.reason}`));
    } catch (error) {
      refused.push(ids.length === 1 ? sentence(error) : `None of ${count(ids.length)}: ${sentence(error)}`);
    }
  }
  for (const callback of decided) callback();
  const done = verb === "redrive" ? "tried again within a second or two" : "discarded";
  return [
    h("p", { role: "status" }, h("strong", {}, `${count(accepted)} ${done}`), refused.length ? "; not done:" : "."),
    h("ul", {}, refused.map((one) => h("li", {}, one))),
  ];
}
