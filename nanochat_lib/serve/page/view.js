// Messages as nodes: bubbles, tool cards, code blocks, and the buttons below them.
import { element, markdown } from "./markdown.js";

const CALL = /<\|(python|output)_start\|>((?:(?!<\|)[\s\S])*)(?:<\|\1_end\|>|$)/g;

/** [{kind: "text" | "python" | "output", text, closed}] of an assistant's message; the last one may be unfinished. */
export function partsOf(content) {
  const parts = [];
  let at = 0;
  for (const match of content.matchAll(CALL)) {
    if (match.index > at) parts.push({ kind: "text", text: content.slice(at, match.index) });
    parts.push({ kind: match[1], text: match[2], closed: match[0].endsWith("_end|>") });
    at = match.index + match[0].length;
  }
  if (at < content.length) parts.push({ kind: "text", text: content.slice(at) });
  return parts;
}

/** The nodes of an assistant's message. `going`: more of it may come. */
export function answerNodes(content, going) {
  const out = document.createDocumentFragment();
  const parts = partsOf(content);
  for (let i = 0; i < parts.length; i++) {
    const { kind, text, closed } = parts[i];
    if (kind === "text") {
      out.append(markdown(text, codeBlock));
      continue;
    }
    const result = kind === "output" ? parts[i] : parts[i + 1]?.kind === "output" ? parts[++i] : null;
    const waiting = going && i === parts.length - 1 && !(result && result.closed);
    out.append(toolCard(kind === "python" ? text : null, result && result.text, waiting, closed));
  }
  return out;
}

function toolCard(expression, result, waiting, closed) {
  const card = element("div", { className: "tool", role: "group", "aria-label": "Tool call" });
  card.append(element("span", { className: "tool-name" }, "calculator"));
  if (expression !== null) card.append(element("code", { className: "expression" }, expression));
  if (result !== null) card.append(element("span", { className: "equals" }, "="), element("output", {}, result));
  else if (waiting) card.append(element("span", { className: "dim" }, "…"));
  else card.append(element("span", { className: "dim" }, closed ? "no result" : "not finished"));
  return card;
}

function codeBlock(text, language) {
  const copy = copyButton(() => text, "Copy code");
  return element(
    "div",
    { className: "code" },
    element("div", { className: "code-head" }, element("span", {}, language || "text"), copy),
    element("pre", { tabIndex: 0 }, element("code", {}, text)),
  );
}

export function copyButton(text, label = "Copy") {
  const button = element("button", { type: "button", className: "small", title: label, "aria-label": label }, "Copy");
  button.addEventListener("click", async () => {
    button.textContent = (await copy(text())) ? "Copied" : "Not allowed";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // No clipboard outside of https and localhost: the old way.
  }
  const area = element("textarea", { value: text, className: "offscreen" });
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}

/** One message. `act` has edit(i) and again(i); neither is offered while an answer comes. */
export function messageNode(message, index, act) {
  const node = element("article", { className: `message ${message.role}` });
  node.setAttribute("aria-label", message.role === "user" ? "You" : "nanochat");
  const body = element("div", { className: "body" });
  node.append(body);
  if (message.forgotten) {
    const many = message.forgotten > 1 ? `${message.forgotten} exchanges` : "exchange";
    const fate = message.forgotten > 1 ? "no longer fit and were" : "no longer fits and was";
    node.prepend(element("p", { className: "forgotten dim" }, `The oldest ${many} ${fate} forgotten for this answer.`));
  }
  const bar = element("div", { className: "bar" });
  const button = (name, title, action) => {
    const made = element("button", { type: "button", className: `small ${name.toLowerCase()}`, title }, name);
    made.addEventListener("click", action);
    bar.append(made);
  };
  if (message.role === "user") button("Edit", "Change this message and answer again", () => act.edit(index));
  else button("Regenerate", "Drop this answer and what follows, and answer again", () => act.again(index));
  bar.append(copyButton(() => act.text(index)));
  const facts = element("span", { className: "facts dim" });
  bar.append(facts);
  node.append(bar);
  fill(node, message, false);
  return node;
}

const speed = (rate) => (rate < 10 ? rate.toFixed(1) : Math.round(rate));

/** Puts the message's text, as far as it is there, into its node. */
export function fill(node, message, going) {
  const body = node.querySelector(".body");
  node.classList.toggle("going", going);
  if (message.role === "user") {
    body.textContent = message.content;
    return;
  }
  body.replaceChildren(message.content ? answerNodes(message.content, going) : typing(going));
  node.querySelector(".facts").textContent = going ? "" : facts(message);
}

function typing(going) {
  if (!going) return element("p", { className: "dim" }, "(nothing was written)");
  const dots = element("p", { className: "typing" }, element("i"), element("i"), element("i"));
  dots.setAttribute("aria-label", "nanochat is writing");
  return dots;
}

const ENDS = { length: "cut off at the limit", stopped: "stopped", cancelled: "stopped", error: "failed" };

function facts({ finish, tokens, seconds, seed }) {
  const shown = [];
  if (ENDS[finish]) shown.push(ENDS[finish]);
  if (tokens) shown.push(tokens === 1 ? "1 token" : `${tokens} tokens`);
  if (tokens && seconds) shown.push(`${speed(tokens / seconds)} tokens/s`);
  if (seed !== undefined) shown.push(`seed ${seed}`);
  return shown.join(" · ");
}
