// The conversation: what was said, what is being written, and every way to act on it.
import { call, chunks, events, setToken } from "./api.js";
import { element } from "./markdown.js";
import * as sampling from "./sampling.js";
import { loadConversation, saveConversation, saveTheme, sendable } from "./store.js";
import * as tokens from "./tokens.js";
import { fill, messageNode } from "./view.js";

const $ = (id) => document.getElementById(id);
const input = $("input");
const list = $("messages");
const scroll = $("scroll");
const IDEAS = ["Hello! Who are you?", "What is 12 + 30?", "How many r are in strawberry?"];

let messages = loadConversation();
let writing = null; // the AbortController of the answer that is coming
let editing = -1; // index of the message that is being changed
let draft = ""; // what stood in the box before
let limits = { messages: 500, characters: 8000, characters_in_all: 32000 }; // the server's

// What is seen ---------------------------------------------------------------------------------------------------------

const act = { edit, again, text: (i) => messages[i].content };

function redraw(follow = true) {
  const near = nearBottom();
  list.replaceChildren(...messages.map((message, i) => messageNode(message, i, act)));
  if (messages.at(-1)?.role === "user" && !writing) list.append(unanswered());
  $("welcome").hidden = messages.length > 0 || $("notes").hasChildNodes();
  markEditing();
  toBottom(follow || near);
}

function unanswered() {
  const button = element("button", { type: "button", className: "small retry" }, "Answer this");
  button.addEventListener("click", () => answer());
  return element("div", { className: "bar shown" }, button);
}

/** Whether the end is in sight. Asked before something is added: whoever has scrolled up stays there. */
function nearBottom() {
  return scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 80;
}

function toBottom(follow) {
  if (follow) scroll.scrollTop = scroll.scrollHeight;
}

function note(text, kind = "note") {
  const node = element("pre", { className: kind }, text);
  if (kind === "error") node.setAttribute("role", "alert");
  $("notes").append(node);
  $("welcome").hidden = true;
  toBottom(true);
}

function clearNotes() {
  $("notes").replaceChildren();
}

function buttons() {
  $("send").hidden = Boolean(writing);
  $("stop").hidden = !writing;
  $("send").disabled = !input.value.trim();
  $("new").disabled = Boolean(writing);
  document.body.classList.toggle("writing", Boolean(writing));
  list.setAttribute("aria-busy", String(Boolean(writing)));
}

function grow() {
  input.style.height = "auto";
  input.style.height = `${Math.min(input.scrollHeight, 200)}px`;
  buttons();
}

function keep() {
  saveConversation(messages);
  showTokens();
}

function showTokens() {
  if (tokens.isOpen()) tokens.show(messages, limits);
}

// Saying something -----------------------------------------------------------------------------------------------------

function submit() {
  const text = input.value.trim();
  if (!text || writing) return;
  clearNotes();
  if (text.startsWith("/") && command(text)) {
    setInput("");
    return;
  }
  if (editing >= 0) messages = messages.slice(0, editing);
  editing = -1;
  messages.push({ role: "user", content: input.value.toWellFormed?.() ?? input.value });
  setInput("");
  answer();
}

function setInput(text) {
  input.value = text;
  grow();
}

/** Asks for the answer to the last message and shows it as it comes. */
async function answer() {
  if (writing) return;
  clearNotes();
  const control = (writing = new AbortController());
  const { said, dropped } = sendable(messages, limits);
  const message = { role: "assistant", content: "" };
  saveConversation(messages);
  messages.push(message);
  redraw();
  buttons();
  const node = list.lastElementChild;
  fill(node, message, true);
  let frame = 0;
  const paint = () => {
    frame = 0;
    const near = nearBottom();
    fill(node, message, true);
    toBottom(near);
  };
  try {
    const body = { messages: said, ...sampling.options(), forget_oldest: true, details: true };
    const response = await call("chat/completions", body, control.signal);
    for await (const event of events(chunks(response))) {
      if (event.start) Object.assign(message, { seed: event.start.seed, forgotten: dropped + event.start.forgotten });
      if (event.token) {
        message.content += event.token;
        frame ||= requestAnimationFrame(paint);
      }
      if (event.error) note(event.error, "error");
      if (event.done) Object.assign(message, { finish: event.finish, tokens: event.tokens, seconds: event.seconds });
    }
    if (!message.finish) throw new Error("The connection ended before the answer did.");
  } catch (error) {
    if (error.name === "AbortError") message.finish = "stopped";
    else if (error.status === 401) askForToken();
    else note(error.message, "error");
    message.finish ??= "error";
  }
  cancelAnimationFrame(frame);
  writing = null;
  if (!message.content && message.finish !== "end") messages.pop();
  redraw(false);
  buttons();
  keep();
}

function stop() {
  writing?.abort();
}

function again(index) {
  if (writing) return;
  leaveEditing();
  messages = messages.slice(0, index);
  answer();
}

function newConversation() {
  if (writing) return;
  leaveEditing();
  messages = [];
  clearNotes();
  redraw();
  keep();
  input.focus();
}

// Changing an earlier message ------------------------------------------------------------------------------------------

function edit(index) {
  if (writing) return;
  if (editing < 0) draft = input.value;
  editing = index;
  setInput(messages[index].content);
  markEditing();
  input.focus();
}

function leaveEditing() {
  if (editing < 0) return;
  editing = -1;
  setInput(draft);
  markEditing();
}

function markEditing() {
  $("editing").hidden = editing < 0;
  [...list.children].forEach((node, i) => node.classList.toggle("replaced", editing >= 0 && i >= editing));
}

// Commands -------------------------------------------------------------------------------------------------------------

// What a command does stands below it, in lines that fit a phone: two columns would be torn apart there.
const HELP = `/temperature [0 to 2]
    0: always the likeliest token
/topk [0 to 200]
    draw among so many; 0: all
/topp [0.05 to 1]
    draw within so much probability
/seed [number or random]
    same seed, same answer
/clear
    new conversation
/help
    this list
A setting without a value shows it.`;

/** Does what `text` asks for; false if it is no command. */
function command(text) {
  const [name, value] = text.split(/\s+/);
  const setting = { "/temperature": "temperature", "/topk": "top_k", "/topp": "top_p", "/seed": "seed" }[name];
  if (setting) note(sampling.set(setting, value));
  else if (name === "/clear") newConversation();
  else if (name === "/help") note(HELP);
  else return false;
  return true;
}

// The server -----------------------------------------------------------------------------------------------------------

async function meet() {
  try {
    const info = await (await call("info")).json();
    $("title").textContent = info.title;
    $("facts").textContent = `${info.title} · reads and writes up to ${info.context.toLocaleString("en")} tokens`;
    sampling.follow(info.defaults);
    limits = info.limits;
    showTokens();
  } catch (error) {
    if (error.status === 401) askForToken();
    else note(error.message, "error");
  }
}

function askForToken() {
  if (!$("ask-token").open) $("ask-token").showModal();
}

$("ask-token").addEventListener("close", () => {
  setToken($("token").value);
  $("token").value = "";
  clearNotes();
  redraw();
  meet();
});

// Buttons and keys -----------------------------------------------------------------------------------------------------

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
$("stop").addEventListener("click", stop);
$("new").addEventListener("click", newConversation);
$("cancel-edit").addEventListener("click", leaveEditing);
input.addEventListener("input", grow);
input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey && event.shiftKey && event.key.toLowerCase() === "n") {
    event.preventDefault();
    newConversation();
  } else if (event.key === "Escape" && !$("ask-token").open) {
    if (writing) stop();
    else if (editing >= 0) leaveEditing();
    else if (!$("settings").hidden) toggle("settings", false);
    else if (tokens.isOpen()) toggle("tokens", false);
    else return;
    event.preventDefault();
    input.focus();
  }
});

function toggle(id, open = $(id).hidden) {
  $(id).hidden = !open;
  $(`show-${id}`).setAttribute("aria-expanded", String(open));
  document.body.classList.toggle(`with-${id}`, open);
}

$("show-settings").addEventListener("click", () => toggle("settings"));
for (const id of ["show-tokens", "hide-tokens"]) {
  $(id).addEventListener("click", () => {
    toggle("tokens");
    showTokens();
  });
}
$("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const other = (root.dataset.theme || system) === "dark" ? "light" : "dark";
  root.dataset.theme = other;
  saveTheme(other);
});

for (const idea of IDEAS) {
  const button = element("button", { type: "button" }, idea);
  button.addEventListener("click", () => {
    setInput(idea);
    submit();
  });
  $("ideas").append(button);
}
redraw();
grow();
meet();
