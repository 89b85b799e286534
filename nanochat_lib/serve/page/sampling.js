// The panel of sampling settings: the server's defaults until the user moves something.
import { checked, loadSettings, saveSettings } from "./store.js";

const NAMES = ["temperature", "top_k", "top_p", "max_tokens", "seed"];
const fields = Object.fromEntries(NAMES.map((name) => [name, document.getElementById(name)]));
let changed = loadSettings();
let defaults = { temperature: 0.8, top_k: 50, top_p: 1, max_tokens: 512 };

/** What a request says about sampling. */
export function options() {
  const all = { ...defaults, ...changed };
  if (all.top_p === 1) delete all.top_p; // an engine without it need not hear of it
  return all;
}

export function follow(server) {
  defaults = server;
  draw();
}

/** Sets a setting from a command's text; returns the line that says what it is now. */
export function set(name, text) {
  if (text !== undefined) {
    const value = checked(name, text);
    if (name === "seed" && text === "random") delete changed.seed;
    else if (value === null) return `${name} cannot be ${text}`;
    else changed[name] = value;
    saveSettings(changed);
    draw();
  }
  return `${name} ${changed[name] ?? defaults[name] ?? "random"}`;
}

function draw() {
  for (const name of NAMES) {
    const value = changed[name] ?? defaults[name];
    if (fields[name] !== document.activeElement || fields[name].type === "range") fields[name].value = value ?? "";
    const output = document.querySelector(`output[for=${name}]`);
    if (output) output.value = name === "top_k" && value === 0 ? "all" : String(value);
    fields[name].classList.toggle("changed", name in changed);
  }
}

for (const name of NAMES) {
  fields[name].addEventListener("input", () => {
    const value = checked(name, fields[name].value);
    if (value === null) delete changed[name];
    else changed[name] = value;
    saveSettings(changed);
    draw();
  });
  fields[name].addEventListener("change", () => fields[name].blur === undefined || draw());
}
document.getElementById("reset").addEventListener("click", () => {
  changed = {};
  saveSettings(changed);
  draw();
});
draw();
