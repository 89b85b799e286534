// What the browser keeps: the conversation, the sampling settings, the theme. All of it survives without storage too.

function read(key) {
  try {
    return JSON.parse(localStorage.getItem(`nanochat.${key}`));
  } catch {
    return null;
  }
}

function write(key, value) {
  try {
    localStorage.setItem(`nanochat.${key}`, JSON.stringify(value));
  } catch {
    // Full or forbidden: the page goes on without.
  }
}

/** Messages {role, content, …} of the last visit; anything else that stands there is dropped. */
export function loadConversation() {
  const kept = read("conversation");
  const good = (m) => (m?.role === "user" || m?.role === "assistant") && typeof m.content === "string";
  return Array.isArray(kept) && kept.every(good) ? kept : [];
}

/**
 * What of a conversation can be sent, and how many of its oldest exchanges cannot, as the server takes only so many
 * messages and characters. The last exchange is always there; if that is too long, the server says so.
 */
export function sendable(messages, limits) {
  const said = messages.filter(({ content }) => content).map(({ role, content }) => ({ role, content }));
  const starts = said.map((_, i) => i).filter((i) => i === 0 || said[i].role === "user");
  let first = said.length;
  let kept = 0;
  let characters = 0;
  for (const start of starts.toReversed()) {
    const lengths = said.slice(start, first).map(({ content }) => [...content].length);
    characters += lengths.reduce((sum, length) => sum + length, 0);
    const much = said.length - start > limits.messages || characters > limits.characters_in_all;
    if (kept && (much || Math.max(...lengths) > limits.characters)) break;
    first = start;
    kept++;
  }
  return { said: said.slice(first), dropped: starts.length - kept };
}

export const saveConversation = (messages) => write("conversation", messages);

const RANGES = { temperature: [0, 2], top_k: [0, 200], top_p: [0.05, 1], max_tokens: [1, 4096], seed: [0, 2 ** 31 - 1] };
const WHOLE = ["top_k", "max_tokens", "seed"];

/** `value` if the setting `name` may be that, else null. */
export function checked(name, value) {
  const number = typeof value === "number" ? value : value?.trim?.() ? Number(value) : NaN;
  const [least, most] = RANGES[name];
  if (!(number >= least && number <= most) || (WHOLE.includes(name) && !Number.isInteger(number))) return null;
  return number;
}

/** What the user has changed; a setting that is missing follows the server. */
export function loadSettings() {
  const kept = read("settings") ?? {};
  const good = Object.keys(RANGES).filter((name) => checked(name, kept[name]) !== null);
  return Object.fromEntries(good.map((name) => [name, kept[name]]));
}

export const saveSettings = (settings) => write("settings", settings);

export function saveTheme(theme) {
  try {
    localStorage.setItem("nanochat.theme", theme);
  } catch {
    // See above.
  }
}
