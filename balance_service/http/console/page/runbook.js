// Shows a section of the runbook that the instance serves. Nothing is fetched from elsewhere: at such an hour there may
// be no way to the internet.

import { ask, sentence } from "./api.js";
import { byId, h, show } from "./dom.js";

let text = "";

// A link to a section, such as `BalanceTaskHalted`.
export function runbookLink(section, label = "runbook") {
  const link = h("a", { href: `console/runbook.md#${section.toLowerCase()}`, class: "runbook" }, label);
  link.setAttribute("aria-label", `Runbook: ${section}`);
  link.onclick = (event) => {
    event.preventDefault();
    open(section);
  };
  return link;
}

async function open(section) {
  const dialog = byId("runbook");
  show(byId("runbook-title"), section);
  show(byId("runbook-text"), h("p", {}, "Reading the runbook …"));
  if (!dialog.open) dialog.showModal();
  try {
    await read();
    show(byId("runbook-text"), ...blocks(sectionOf(section)));
  } catch (error) {
    show(byId("runbook-text"), h("p", {}, sentence(error)));
  }
}

async function read() {
  text ||= (await ask("console/runbook.md")).text;
}

// What to do about dead letters with a cause: the row of the runbook's tables that names it; empty if none does.
export async function actionFor(cause) {
  await read();
  const rows = sectionOf("BalanceDeadLetters").split("\n").filter((line) => line.startsWith("| ")).map(cellsOf);
  const general = rows.findIndex(([causes]) => causes === "the causes below");
  const names = ([causes]) => causes.includes(`\`${cause}\``) || (cause.endsWith("-overflow") && causes.includes("-overflow"));
  const row = rows.find(names);
  if (!row) return [];
  return inline(rows.indexOf(row) > general ? `The record ${row[1]}. ${rows[general][1]}.` : `${row[1]}.`);
}

const cellsOf = (line) => line.slice(1, -1).split("|").map((cell) => cell.trim());

function sectionOf(name) {
  const lines = text.split("\n");
  const start = lines.indexOf(`## ${name}`);
  if (start < 0) return `The runbook has no section ${name}.`;
  const length = lines.slice(start + 1).findIndex((line) => line.startsWith("## "));
  return lines.slice(start + 1, length < 0 ? undefined : start + 1 + length).join("\n");
}

// Paragraphs, lists and tables of Markdown, as far as the runbook uses them.
function blocks(markdown) {
  return markdown
    .trim()
    .split(/\n{2,}/)
    .map((block) => {
      if (block.startsWith("|")) return tableOf(block);
      if (block.startsWith("#")) return h("h3", {}, block.replace(/^#+ /, ""));
      const list = /^(-|\d+\.) /.exec(block);
      if (list) return listOf(list[1] === "-" ? "ul" : "ol", block);
      return h("p", {}, inline(block));
    });
}

const listOf = (tag, block) => h(tag, {}, block.split(/^(?:-|\d+\.) /m).slice(1).map((item) => h("li", {}, inline(item))));

function tableOf(block) {
  const rows = block.split("\n").map(cellsOf);
  const [head, , ...body] = rows;
  return h(
    "table",
    {},
    h("thead", {}, h("tr", {}, head.map((cell) => h("th", { scope: "col" }, inline(cell))))),
    h("tbody", {}, body.map((cells) => h("tr", {}, cells.map((cell) => h("td", {}, inline(cell)))))),
  );
}

function inline(markdown) {
  return markdown.split(/(`[^`]+`|\*\*[^*]+\*\*|\[[^\]]+\]\([^)]+\))/).map((part) => {
    if (part.startsWith("`")) return h("code", {}, part.slice(1, -1));
    if (part.startsWith("**")) return h("strong", {}, part.slice(2, -2));
    const link = /^\[([^\]]+)\]\(#(\w+)\)$/.exec(part);
    const section = link && text.split("\n").find((line) => line.toLowerCase() === `## ${link[2]}`)?.slice(3);
    if (section) return runbookLink(section, link[1].replaceAll("`", ""));
    return part.startsWith("[") ? part.slice(1, part.indexOf("]")) : part.replaceAll("\n", " ");
  });
}

export function start() {
  byId("runbook-close").onclick = () => byId("runbook").close();
}
