// Talking to the server. The token, if there is one, comes with the address (#token=…) or is typed in, and stays in this tab.

const fragment = new URLSearchParams(location.hash.slice(1));
let token = "";
try {
  token = sessionStorage.getItem("nanochat.token") || "";
} catch {
  // No storage: the token lives as long as the page.
}
if (fragment.get("token")) {
  setToken(fragment.get("token"));
  history.replaceState(null, "", location.pathname + location.search);
}

export function setToken(value) {
  token = value.trim();
  try {
    sessionStorage.setItem("nanochat.token", token);
  } catch {
    // See above.
  }
}

export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** The response to a GET, or to a POST of `body` as JSON. Throws ServerError with the server's own words. */
export async function call(path, body, signal) {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const options = { headers, signal, cache: "no-store" };
  if (body !== undefined) {
    headers["Content-Type"] = "application/json";
    Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached. Is `nanochat serve` still running?", 0);
  }
  if (response.ok) return response;
  const text = await response.text();
  let detail = text;
  try {
    detail = JSON.parse(text).detail ?? text;
    if (Array.isArray(detail)) detail = detail.map((problem) => problem.msg).join("; ");
  } catch {
    // Not JSON: shown as it is.
  }
  const wait = response.headers.get("Retry-After");
  throw new ServerError(String(detail).slice(0, 500) + (wait ? ` (in about ${wait} s)` : ""), response.status);
}

/**
 * The JSON objects of a stream of server-sent events. `chunks` are byte arrays cut anywhere, inside characters too.
 */
export async function* events(chunks) {
  const decoder = new TextDecoder();
  let rest = "";
  function* lines(text) {
    rest += text;
    let end;
    while ((end = rest.indexOf("\n")) >= 0) {
      const line = rest.slice(0, end).replace(/\r$/, "");
      rest = rest.slice(end + 1);
      if (line.startsWith("data:")) yield JSON.parse(line.slice(5));
    }
  }
  for await (const chunk of chunks) yield* lines(decoder.decode(chunk, { stream: true }));
  yield* lines(decoder.decode() + "\n");
}

/** Byte arrays of a response as they come (not every browser can iterate over a body). */
export async function* chunks(response) {
  const reader = response.body.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
