// A small Markdown, built as DOM nodes. Text only ever becomes text nodes: whatever it says, it is never read as HTML.

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const DEEPEST = 8;

export function element(name, properties = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key in node && key !== "list") node[key] = value;
    else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

/** `text` as a fragment of blocks. `code(text, language)` makes the node of a fenced block. */
export function markdown(text, code = codeBlock, depth = 0) {
  const out = document.createDocumentFragment();
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  let at = 0;
  const take = (test) => {
    const from = at;
    while (at < lines.length && test(lines[at])) at++;
    return lines.slice(from, at);
  };
  while (at < lines.length) {
    const line = lines[at];
    const fence = line.match(FENCE);
    if (!line.trim()) {
      at++;
    } else if (fence) {
      at++;
      const close = (other) => other.trim().startsWith(fence[1]) && /^(`+|~+)$/.test(other.trim());
      const body = take((other) => !close(other));
      at++;
      out.append(code(body.join("\n"), fence[2]));
    } else if (HEADING.test(line)) {
      const [, marks, title] = line.match(HEADING);
      at++;
      out.append(element(`h${Math.min(marks.length + 2, 6)}`, {}, inline(title)));
    } else if (RULE.test(line)) {
      at++;
      out.append(element("hr"));
    } else if (/^ {0,3}>/.test(line) && depth < DEEPEST) {
      const quoted = take((other) => /^ {0,3}>/.test(other)).map((other) => other.replace(/^ {0,3}> ?/, ""));
      out.append(element("blockquote", {}, markdown(quoted.join("\n"), code, depth + 1)));
    } else if (ITEM.test(line) && depth < DEEPEST) {
      out.append(list());
    } else if (line.includes("|") && at + 1 < lines.length && lines[at + 1].includes("-") && DIVIDER.test(lines[at + 1])) {
      out.append(table());
    } else {
      out.append(paragraph());
    }
  }
  return out;

  function list() {
    const [, indent, mark] = lines[at].match(ITEM);
    const ordered = /\d/.test(mark);
    const node = element(ordered ? "ol" : "ul");
    if (ordered && parseInt(mark) !== 1) node.start = parseInt(mark);
    let loose;
    while (at < lines.length && (loose = lines[at].match(ITEM)) && loose[1].length <= indent.length + 1) {
      if (/\d/.test(loose[2]) !== ordered) break;
      const inner = loose[1].length + loose[2].length + 1;
      at++;
      const body = [loose[3]];
      while (at < lines.length) {
        const next = lines[at];
        const nested = next.length - next.trimStart().length > loose[1].length + 1;
        if (!next.trim() && at + 1 < lines.length && /^\s{2,}\S/.test(lines[at + 1])) body.push("");
        else if (next.trim() && (nested || (!ITEM.test(next) && lines[at - 1].trim() && !starts(next)))) {
          body.push(nested ? next.slice(Math.min(inner, next.length - next.trimStart().length)) : next);
        } else break;
        at++;
      }
      node.append(element("li", {}, markdown(body.join("\n"), code, depth + 1)));
      if (at + 1 < lines.length && !lines[at].trim() && ITEM.test(lines[at + 1])) at++;
    }
    return node;
  }

  function table() {
    const cells = (row) => row.trim().replace(/^\|/, "").replace(/\|$/, "").split("|");
    const head = cells(lines[at]);
    at += 2;
    const rows = take((row) => row.includes("|")).map(cells);
    const line = (row, name) =>
      element("tr", {}, ...head.map((_, i) => element(name, {}, inline((row[i] ?? "").trim()))));
    return element(
      "div",
      { className: "table" },
      element("table", {}, element("thead", {}, line(head, "th")), element("tbody", {}, ...rows.map((row) => line(row, "td")))),
    );
  }

  function paragraph() {
    const node = element("p");
    const first = at;
    for (const row of take((other) => at === first || (other.trim() && !starts(other)))) {
      if (node.hasChildNodes()) node.append(element("br"));
      node.append(inline(row.trim()));
    }
    return node;
  }

  function starts(line) {
    const block = FENCE.test(line) || HEADING.test(line) || RULE.test(line);
    return block || (depth < DEEPEST && (/^ {0,3}>/.test(line) || ITEM.test(line)));
  }
}

function codeBlock(text, language) {
  return element("pre", {}, element("code", { className: language ? `language-${language}` : "" }, text));
}

const MARKS = [
  ["**", "strong"],
  ["__", "strong"],
  ["~~", "del"],
  ["*", "em"],
  ["_", "em"],
];

/** Emphasis, code and links of one line. Looks for a closing mark at most once where there is none: linear time. */
export function inline(text, depth = 0) {
  const out = document.createDocumentFragment();
  const missing = new Set();
  let plain = "";
  let at = 0;
  const flush = () => {
    if (plain) out.append(plain);
    plain = "";
  };
  const find = (mark, from) => {
    if (missing.has(mark)) return -1;
    const found = text.indexOf(mark, from);
    if (found < 0) missing.add(mark);
    return found;
  };
  while (at < text.length) {
    const char = text[at];
    if (char === "\\" && /[\\`*_~[\]()#+\-.!|<>]/.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
      continue;
    }
    if (char === "`") {
      const ticks = text.slice(at).match(/^`+/)[0];
      const end = find(ticks, at + ticks.length);
      if (end > 0) {
        flush();
        const body = text.slice(at + ticks.length, end);
        out.append(element("code", {}, /^ .* $/.test(body) && body.trim() ? body.slice(1, -1) : body));
        at = end + ticks.length;
      } else {
        plain += ticks;
        at += ticks.length;
      }
      continue;
    }
    if (char === "[" || (char === "!" && text[at + 1] === "[")) {
      const open = char === "[" ? at : at + 1;
      const middle = find("](", open);
      const end = middle > 0 ? find(")", middle) : -1;
      const url = end > 0 ? address(text.slice(middle + 2, end)) : null;
      if (url && depth < DEEPEST) {
        flush();
        out.append(link(url, inline(text.slice(open + 1, middle), DEEPEST)));
        at = end + 1;
        continue;
      }
    }
    if (char === "h" && /^https?:\/\//.test(text.slice(at, at + 8)) && !/\w/.test(text[at - 1] ?? "") && depth < DEEPEST) {
      const found = text.slice(at).match(/^[^\s<>"'`]+/)[0].replace(/[.,;:!?)\]}*_]+$/, "");
      const url = address(found);
      if (url) {
        flush();
        out.append(link(url, found));
        at += found.length;
        continue;
      }
    }
    const [mark, name] = MARKS.find(([mark]) => text.startsWith(mark, at)) ?? [];
    if (mark && depth < DEEPEST) {
      const inWord = mark[0] === "_" && /\w/.test(text[at - 1] ?? "");
      const end = inWord || /\s/.test(text[at + mark.length] ?? " ") ? -1 : find(mark, at + mark.length + 1);
      const open = end > 0 && !/\s/.test(text[end - 1]) && !(mark[0] === "_" && /\w/.test(text[end + mark.length] ?? ""));
      if (open) {
        flush();
        out.append(element(name, {}, inline(text.slice(at + mark.length, end), depth + 1)));
        at = end + mark.length;
        continue;
      }
      plain += mark;
      at += mark.length;
      continue;
    }
    plain += char;
    at++;
  }
  flush();
  return out;
}

function link(url, label) {
  return element("a", { href: url, target: "_blank", rel: "noopener noreferrer nofollow" }, label);
}

/** `text` if it is a web or mail address, else null: no other scheme (javascript:, data:) becomes a link. */
function address(text) {
  try {
    const url = new URL(text.trim());
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}
