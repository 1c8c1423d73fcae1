// Numbers, times and durations as texts. What is unknown is N/A.

import { h } from "./dom.js";

export const UNKNOWN = "N/A";
const GROUPED = new Intl.NumberFormat("en");
const SHORT = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

export const count = (number) => (number === null || number === undefined ? UNKNOWN : GROUPED.format(number));

export const plural = (number, one, many) => `${GROUPED.format(number)} ${number === 1 ? one : many}`;

// Seconds as a text with one or two units.
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return UNKNOWN;
  if (seconds < 0.001) return "0 s";
  if (seconds < 1) return `${SHORT.format(seconds * 1000)} ms`;
  if (seconds < 10) return `${SHORT.format(Math.round(seconds * 10) / 10)} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return parts(whole, 60, "min", "s");
  if (whole < 86400) return parts(Math.round(whole / 60), 60, "h", "min");
  return parts(Math.round(whole / 3600), 24, "d", "h");
}

function parts(whole, size, large, small) {
  const rest = whole % size;
  return `${Math.floor(whole / size)} ${large}${rest ? ` ${rest} ${small}` : ""}`;
}

// Bytes as a text.
export function size(bytes) {
  if (bytes === null || bytes === undefined) return UNKNOWN;
  const exponent = Math.min(4, Math.floor(Math.log2(Math.max(1, bytes)) / 10));
  return `${SHORT.format(bytes / 1024 ** exponent)} ${["B", "KiB", "MiB", "GiB", "TiB"][exponent]}`;
}

export const rate = (number) => (number === null || number === undefined ? UNKNOWN : `${SHORT.format(number)}/s`);

// How far a position is behind, in time; `isLeast`: the lag began earlier than is known.
export const behind = (seconds, isLeast) =>
  seconds === null || seconds === undefined ? UNKNOWN : `${isLeast ? "≥ " : ""}${seconds ? duration(seconds) : "0 s"}`;

// A point in time, relative to now; absolute when the pointer rests on it.
export function moment(date, now = Date.now()) {
  const seconds = (date.getTime() - now) / 1000;
  const text = Math.abs(seconds) < 1 ? "now" : seconds > 0 ? `in ${duration(seconds)}` : `${duration(-seconds)} ago`;
  return h("time", { datetime: date.toISOString(), title: absolute(date) }, text);
}

export const absolute = (date) => `${date.toLocaleString(undefined, { timeZoneName: "short" })} (${date.toISOString()})`;

// A bar with its number and the time left; each is null while it is unknown.
export function progress(label, part, secondsLeft) {
  const known = Math.min(1, part ?? 0);
  const said = part === null ? UNKNOWN : `${Math.floor(100 * known)} %`;
  const left = secondsLeft === null ? `time left ${UNKNOWN}` : `about ${duration(secondsLeft)} left`;
  return h("span", { class: "progress" }, h("progress", { max: "1", value: known.toFixed(3), "aria-label": label }), ` ${said}, ${left}`);
}

// A word with a colour and a shape: ok, info, warn, bad or unknown.
export const mark = (kind, text, title) => h("span", { class: `mark ${kind}`, title }, text);
