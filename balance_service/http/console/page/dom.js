// Makes elements, and changes a part of the page to new ones in place.

import { isPassing, sentence } from "./api.js";

const SVG = "http://www.w3.org/2000/svg";
const HANDLERS = ["onclick", "onchange", "oninput", "onsubmit", "onkeydown"];

// Makes an element. Attributes that are functions are handlers; those that are null, undefined or false are left out.
// Children are nodes or texts, also in lists.
export const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);

export const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (typeof value === "function") element[name] = value;
    else if (value !== null && value !== undefined && value !== false) {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  element.append(...nodes(children));
  return element;
}

function nodes(children) {
  return children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
}

// Changes the children of a container to the given ones. Elements that stay keep their focus, selection and scroll
// position. `data-key` says which element of a list is the same as before.
export function show(container, ...children) {
  const focused = document.activeElement;
  const fresh = document.createDocumentFragment();
  fresh.append(...nodes(children));
  changeChildren(container, fresh);
  // An element loses the focus when it moves.
  if (focused?.isConnected && focused !== document.activeElement && container.contains(focused)) focused.focus();
}

function changeChildren(old, fresh) {
  const keyed = new Map();
  for (const child of old.children) if (child.dataset.key) keyed.set(child.dataset.key, child);
  let next = old.firstChild;
  for (const node of [...fresh.childNodes]) {
    const key = node.dataset?.key;
    const known = key ? keyed.get(key) : next;
    if (!known || known.nodeName !== node.nodeName || (!key && known.dataset?.key)) {
      old.insertBefore(node, next);
      continue;
    }
    if (known === next) next = next.nextSibling;
    else old.insertBefore(known, next);
    change(known, node);
  }
  while (next) {
    const gone = next;
    next = next.nextSibling;
    gone.remove();
  }
}

function change(old, fresh) {
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue;
    return;
  }
  for (const { name } of [...old.attributes]) {
    // The reader opens details.
    if (!fresh.hasAttribute(name) && !(name === "open" && old.nodeName === "DETAILS")) old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  for (const name of HANDLERS) if (old[name] !== fresh[name]) old[name] = fresh[name];
  if (old.nodeName === "INPUT") old.checked = fresh.hasAttribute("checked");
  else changeChildren(old, fresh);
}

// A link to the console of another instance.
export const consoleLink = (address) => h("a", { href: `${location.protocol}//${address}/`, rel: "noreferrer" }, address);

export const byId = (id) => document.getElementById(id);

// Changes the options of a select, and keeps or sets the chosen one if there is such an option.
export function showOptions(select, options, chosen) {
  const wanted = options.some(([value]) => value === chosen) ? chosen : (options[0]?.[0] ?? "");
  show(
    select,
    options.map(([value, text]) => h("option", { value, "data-key": value || "none" }, text)),
  );
  if (select.value !== wanted) select.value = wanted;
  return wanted;
}

// A table. On a phone, each row is a card whose cells carry the names of their columns.
// `columns` are names with classes; `rows` are `{ key, cells, selected }`; `header` is the column of the rows' names.
export function table(label, columns, rows, header = 0) {
  const cell = (content, n) => {
    const [name, kind] = columns[n];
    const attributes = { class: kind, "data-label": name };
    return n === header
      ? h("th", { ...attributes, scope: "row", role: "rowheader" }, content)
      : h("td", { ...attributes, role: "cell" }, content);
  };
  // The roles say what the elements are even when their style makes them blocks.
  return h(
    "table",
    { class: "cards", role: "table", "aria-label": label },
    h(
      "thead",
      { role: "rowgroup" },
      h("tr", { role: "row" }, columns.map(([name, kind]) => h("th", { scope: "col", role: "columnheader", class: kind }, name))),
    ),
    h(
      "tbody",
      { role: "rowgroup" },
      rows.map(({ key, cells, selected }) =>
        h("tr", { role: "row", "data-key": key, class: selected ? "selected" : null }, cells.map(cell)),
      ),
    ),
  );
}

// A failed request, in words: red only if it does not pass by itself.
export const trouble = (error, before = "") => h("p", { class: isPassing(error) ? "waits" : "problem", role: "alert" }, before, sentence(error));

// A command, as a line that can be copied.
export const command = (text) => h("div", { class: "command" }, h("code", { tabindex: "0" }, text), copyButton(text));

export function copyButton(text) {
  const onclick = async (event) => {
    const button = event.currentTarget;
    button.textContent = (await copied(text)) ? "Copied" : "Select it and copy";
    setTimeout(() => (button.textContent = "Copy"), 2000);
  };
  return h("button", { type: "button", class: "quiet", "aria-label": `Copy: ${text}`, onclick }, "Copy");
}

async function copied(text) {
  try {
    // Browsers have a clipboard for pages of HTTPS and of this machine only.
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}
