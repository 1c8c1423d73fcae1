// Requests to the API of the instance that served the page. The token is kept in memory only.

// A stream of the server sends at least a comment every 15 s.
const SILENT_MS = 20_000;
// Longer than the server's own deadlines, unless they were raised to more.
const LATE_MS = 60_000;

let token = "";
const needing = new Set();

export const hasToken = () => token !== "";

// Sets the token of all further requests; an empty text removes it.
export function setToken(value) {
  token = value;
}

// Calls back when the API has refused a request for want of a valid token.
export function onTokenNeeded(callback) {
  needing.add(callback);
}

// The API's answer with an error status. `message` is its `detail`.
export class Refusal extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

// A number of the API with its digits as sent: JavaScript's own numbers would lose digits of money.
export class Digits {
  constructor(text) {
    this.text = text;
  }
}

const NUMBERS_AND_TEXTS = /"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?/g;
const MARK = "\u0000digits";

// Parses JSON. Numbers become `Digits`.
export function exactJson(text) {
  const marked = text.replace(NUMBERS_AND_TEXTS, (found) =>
    found[0] === '"' ? found : `{${JSON.stringify(MARK)}:"${found}"}`,
  );
  return JSON.parse(marked, (_, value) => (value && typeof value === "object" && MARK in value ? new Digits(value[MARK]) : value));
}

// A value of the API as a text.
export function text(value) {
  if (value instanceof Digits) return value.text;
  if (value === null || value === undefined) return "null";
  if (typeof value === "string") return value;
  if (typeof value !== "object") return String(value);
  return exactText(value);
}

function exactText(value) {
  if (value instanceof Digits) return value.text;
  if (Array.isArray(value)) return `[${value.map(exactText).join(", ")}]`;
  if (value === null || typeof value !== "object") return JSON.stringify(value);
  return `{${Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${exactText(one)}`).join(", ")}}`;
}

// The address of a path of the API, relative to the page: a proxy may serve it below another path.
export function addressOf(path, parameters = {}) {
  const address = new URL(path, document.baseURI);
  for (const [name, value] of Object.entries(parameters)) if (value !== "") address.searchParams.set(name, value);
  return address;
}

async function send(path, { parameters, headers, body, signal } = {}) {
  const given = { ...headers };
  if (token) given.Authorization = `Bearer ${token}`;
  if (body !== undefined) given["Content-Type"] = "application/json";
  const response = await fetch(addressOf(path, parameters), {
    method: body === undefined ? "GET" : "POST",
    headers: given,
    body: body === undefined ? undefined : JSON.stringify(body),
    cache: "no-store",
    credentials: "omit",
    signal,
  });
  if (response.ok) return response;
  const refusal = new Refusal(response.status, await detailOf(response));
  if (response.status === 401) for (const callback of needing) callback(refusal.message);
  throw refusal;
}

async function detailOf(response) {
  try {
    return (await response.json()).detail ?? response.statusText;
  } catch {
    return response.statusText || `status ${response.status}`;
  }
}

// Sends a request; returns the body as text and the headers. Raises `Refusal`, or another error if there is no answer.
// A change is not given up: nobody would know whether it was made.
export async function ask(path, { signal, ...options } = {}) {
  const late = options.body === undefined ? [AbortSignal.timeout(LATE_MS)] : [];
  const response = await send(path, { ...options, signal: AbortSignal.any([...(signal ? [signal] : []), ...late]) });
  return { text: await response.text(), headers: response.headers };
}

export const askJson = async (path, options) => JSON.parse((await ask(path, options)).text);

// Yields the events of a stream as `{ event, id, data, comment }` until it ends. Raises as `ask`, and if it is
// silent: a connection that has broken unseen would never end. `options` has a `signal`.
// `EventSource` cannot send a token, so the stream is read by `fetch`.
export async function* events(path, options) {
  const headers = { ...options.headers, Accept: "text/event-stream" };
  const ended = new AbortController();
  let timer;
  const heard = () => {
    clearTimeout(timer);
    timer = setTimeout(() => ended.abort(), SILENT_MS);
  };
  try {
    heard();
    const response = await send(path, { ...options, headers, signal: AbortSignal.any([options.signal, ended.signal]) });
    for await (const event of parsed(response.body.pipeThrough(new TextDecoderStream()).getReader())) {
      heard();
      yield event;
    }
  } finally {
    clearTimeout(timer);
    ended.abort();
  }
}

async function* parsed(reader) {
  let rest = "";
  let event = {};
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "") {
        if (event.data !== undefined) yield event;
        event = {};
      } else if (line.startsWith(":")) yield { comment: line.slice(1).trim() };
      else {
        const [, name, content] = /^([^:]*):? ?(.*)$/.exec(line);
        event[name] = name === "data" && event.data !== undefined ? `${event.data}\n${content}` : content;
      }
    }
  }
}

// Whether a failure passes by itself: an instance is busy or away, or a partition is moving.
export const isPassing = (error) => !(error instanceof Refusal) || error.status >= 500;

// A sentence may also begin with a name, which keeps its case.
const FIRST_WORD = /^(a|an|another|generation|it|no|some|the|there|this) /;

// A sentence about a failed request, for the panel that made it.
export function sentence(error) {
  if (error instanceof Refusal) {
    if (error.status === 403) return `Not permitted: ${error.message}.`;
    if (error.status === 401) return "A token is needed: see the top of the page.";
    return `${error.message.replace(FIRST_WORD, (word) => word[0].toUpperCase() + word.slice(1))}.`;
  }
  return "This instance does not answer.";
}

export const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));
