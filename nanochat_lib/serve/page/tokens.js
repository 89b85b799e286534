// The panel for learners: every token of the conversation, and what the model expected after it.
import { call } from "./api.js";
import { element } from "./markdown.js";
import { sendable } from "./store.js";

const panel = document.querySelector("#tokens");
const chips = panel.querySelector("#chips");
const detail = panel.querySelector("#detail");
const colours = panel.querySelector("#colours");
const hint = detail.firstElementChild;
let rows = [];
let active = -1;
let asking = null;

export const isOpen = () => !panel.hidden;

/** Asks for the tokens of `messages` and shows them; a newer call overtakes an older one. */
export async function show(messages, limits) {
  asking?.abort();
  asking = new AbortController();
  const { signal } = asking;
  panel.setAttribute("aria-busy", "true");
  try {
    const { said, dropped } = sendable(messages, limits);
    const body = { messages: said, top: 10, forget_oldest: true };
    const response = await call("tokens", body, signal);
    const { tokens, forgotten } = await response.json();
    if (signal.aborted) return;
    rows = tokens;
    draw(dropped + forgotten);
  } catch (error) {
    if (error.name === "AbortError") return;
    rows = [];
    chips.replaceChildren(element("p", { className: "error", role: "alert" }, error.message));
    detail.replaceChildren(hint);
  }
  panel.removeAttribute("aria-busy");
}

function draw(forgotten) {
  panel.querySelector("#count").textContent = rows.length ? String(rows.length) : "";
  const nodes = rows.map((row, i) => {
    const node = element("span", { className: "chip", id: `t${i}`, role: "option" });
    node.dataset.i = i;
    node.classList.add(row.special ? "special" : row.mask ? "one" : "zero");
    node.append(element("b", {}, visible(row.text)), element("small", {}, String(row.id)));
    if (row.p !== undefined) node.style.setProperty("--p", Math.sqrt(row.p));
    node.setAttribute("aria-label", `${row.text} ${row.id}`);
    return node;
  });
  const out = [];
  nodes.forEach((node, i) => {
    const name = rows[i].text;
    if (i && (name === "<|user_start|>" || name === "<|assistant_start|>") && rows[i].special) out.push(element("hr"));
    out.push(node);
    if (!rows[i].special && name.includes("\n")) out.push(element("br"));
  });
  if (forgotten) out.unshift(element("p", { className: "forgotten dim" }, "The oldest exchanges no longer fit and are not shown."));
  chips.replaceChildren(...out);
  active = -1;
  detail.replaceChildren(hint);
}

/** Blanks and line breaks made visible. */
function visible(text) {
  return text.replace(/ /g, "·").replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/\r/g, "␍");
}

function choose(i) {
  if (i === active || !rows[i]) return;
  chips.querySelector(".active")?.classList.remove("active");
  active = i;
  const node = chips.querySelector(`#t${i}`);
  node.classList.add("active");
  chips.setAttribute("aria-activedescendant", node.id);
  const row = rows[i];
  const who = row.mask ? "written by the model" : "read by the model";
  const head = element("p", { className: "chosen" }, element("b", {}, visible(row.text)), ` token ${row.id}, ${who}`);
  const nodes = [head];
  if (row.p !== undefined) nodes.push(element("p", { className: "dim" }, `Its probability, given all before it: ${percent(row.p)}`));
  if (row.next) {
    const following = rows[i + 1]?.id;
    nodes.push(element("h3", {}, "Expected next"), ...row.next.map(([id, text, p]) => bar(id, text, p, id === following)));
    const after = rows[i + 1];
    if (after && !row.next.some(([id]) => id === after.id)) nodes.push(bar(after.id, after.text, after.p, true));
  } else {
    nodes.push(element("p", { className: "dim" }, "This server shows no probabilities."));
  }
  detail.replaceChildren(...nodes);
}

function bar(id, text, p, came) {
  const node = element("div", { className: came ? "next came" : "next", title: `token ${id}${came ? ", which came" : ""}` });
  const fill = element("i");
  fill.style.setProperty("--p", p);
  node.append(element("b", {}, visible(text)), element("span", { className: "track" }, fill), element("small", {}, percent(p)));
  return node;
}

function percent(p) {
  return p >= 0.0995 ? `${(100 * p).toFixed(0)} %` : p >= 0.00095 ? `${(100 * p).toFixed(1)} %` : "< 0.1 %";
}

for (const kind of ["pointerover", "click"]) {
  chips.addEventListener(kind, (event) => {
    const chip = event.target.closest(".chip");
    if (chip) choose(Number(chip.dataset.i));
  });
}
chips.addEventListener("focus", () => active < 0 && rows.length && choose(rows.length - 1));
chips.addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  const to = step ? active + step : { Home: 0, End: rows.length - 1 }[event.key];
  if (to === undefined || !rows.length) return;
  event.preventDefault();
  choose(Math.max(0, Math.min(rows.length - 1, to)));
  chips.querySelector(`#t${active}`).scrollIntoView({ block: "nearest" });
});
colours.addEventListener("change", () => {
  panel.dataset.colours = colours.value;
  for (const legend of panel.querySelectorAll(".legend")) legend.hidden = legend.dataset.for !== colours.value;
});
