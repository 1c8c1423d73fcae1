// Filters and selections, kept in the fragment of the page's address: they survive a reload and can be sent to others.

const watchers = new Set();
let state = new URLSearchParams(location.hash.slice(1));

export const chosen = (name) => state.get(name) ?? "";

// Changes some of them; an empty text removes one.
export function choose(changes) {
  for (const [name, value] of Object.entries(changes)) {
    if (value) state.set(name, value);
    else state.delete(name);
  }
  history.replaceState(history.state, "", `#${state}`);
}

// Calls back when the reader has changed the address, or followed a link within the page.
export function onChosen(callback) {
  watchers.add(callback);
}

// The address of the page with other choices.
export function linkTo(changes) {
  const other = new URLSearchParams(state);
  for (const [name, value] of Object.entries(changes)) {
    if (value) other.set(name, value);
    else other.delete(name);
  }
  return `#${other}`;
}

addEventListener("hashchange", () => {
  state = new URLSearchParams(location.hash.slice(1));
  for (const callback of watchers) callback();
});
