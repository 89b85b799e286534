"""The page in a real browser: every button and key, what is kept, and that no text ever becomes anything but text.

Pictures of it are written to the folder that $NANOCHAT_PICTURES names, for somebody to look at.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import chromium
import numpy as np
import pytest
from serving import TOKENIZER, FakeBatching, said, site

pytestmark = pytest.mark.skipif(not chromium.path(), reason="no Chromium here: install it or name it in $CHROMIUM")

TOOL = ["The sum is ", "<|python_start|>12+30<|python_end|>", "<|output_start|>42<|output_end|>", " so 42."]
CODE = """A **small** `example` of *much*, snake_case and 2 * 3:

```python
print("<b>&amp;</b>")
```

1. one
2. two
   - nested

> quoted

| a | b |
|---|---|
| 1 | 2 |

See [here](https://example.org/a?b=c) and https://example.org/."""
EVIL = [
    "<img src=x onerror=\"window.broken=1\">", "<script>window.broken=1</script>", "<b>bold</b>&amp;<!-- x",
    "[x](javascript:window.broken=1)", "![x](https://example.org/x.png)",
    "```html\n<svg onload='window.broken=1'>\n```", "| <i>a</i> | b |\n|---|---|\n| <u>c</u> | d |",
    "<|python_start|><img src=x onerror='window.broken=1'><|python_end|>",
    "[<b>y</b>](data:text/html,<script>window.broken=1</script>)", "# <h1>t</h1>\n> <b>q</b>\n- <b>l</b>",
]  # fmt: skip
IDLE = "!document.body.classList.contains('writing')"


def script(request) -> list[str]:
    asked = TOKENIZER.decode(request.tokens).rpartition("<|user_start|>")[2].partition("<|user_end|>")[0]
    if asked == "slow":
        return list("abc" * 1000)
    if asked.startswith("evil"):
        return [EVIL[int(asked[4:])]]
    if asked == "nothing":
        return []
    if asked == "fail":
        return ["half", "\0error: <b>no</b> memory"]
    return {"sum": TOOL, "code": [CODE[i : i + 7] for i in range(0, len(CODE), 7)]}.get(asked, ["You said: ", asked])


def next_tokens(ids: list[int]):
    """Always `A` with 75 %, then 19 others."""
    rows = np.arange(len(ids))[:, None]
    return 65 + np.arange(20) + 0 * rows, np.array([0.75, *[0.01] * 19]) + 0 * rows, np.full(len(ids), 0.75)


@pytest.fixture(scope="module")
def window():
    with chromium.browser() as page:
        yield page


@pytest.fixture
def here():
    # Words come so slowly that a click lands in the middle of them.
    with site(FakeBatching(script, pause=0.003), next_tokens, title="runs/cpu · rl", model="cpu-rl") as here:
        yield here


@pytest.fixture
def page(window, here):
    """The page as a new visitor meets it (each server is an origin of its own)."""
    window.size(1100, 760)
    window.scheme("light")
    window.events.clear()
    window.open(here.url + "/")
    yield window
    assert window.problems() == []
    assert window.run("window.broken") is None


def ask(page: chromium.Page, text: str, wait: bool = True) -> None:
    page.run("document.querySelector('#input').focus()")
    page.type(text)
    page.press("Enter")
    if wait:
        page.until(IDLE)


def shown(page: chromium.Page) -> list[str]:
    return page.run("[...document.querySelectorAll('.message .body')].map(e => e.textContent)")


def picture(page: chromium.Page, name: str) -> None:
    if folder := os.environ.get("NANOCHAT_PICTURES"):
        page.picture(Path(folder) / f"{name}.png")


def test_a_conversation_streams_and_is_kept(page, here) -> None:
    picture(page, "welcome")
    assert page.run("document.querySelector('#send').disabled")
    ask(page, "Hi é🐕")
    assert shown(page) == ["Hi é🐕", "You said: Hi é🐕"]
    ask(page, "again")
    assert here.batching.requests[-1].tokens == said(
        *(256, 257, "Hi é🐕", 258, 259, "You said: Hi é🐕", 260, 257, "again", 258, 259)
    )
    page.open(here.url + "/")
    assert shown(page) == ["Hi é🐕", "You said: Hi é🐕", "again", "You said: again"]
    assert page.run("document.querySelector('#title').textContent") == "runs/cpu · rl"
    page.click("#new")
    assert shown(page) == [] and not page.run("document.querySelector('#welcome').hidden")
    page.open(here.url + "/")
    assert shown(page) == []
    page.click("#ideas button", 1)  # a suggestion is sent at once
    page.until(IDLE + " && document.querySelectorAll('.message').length == 2")
    page.press("N", modifiers=2 + 8)
    assert shown(page) == []


def test_stop_keeps_what_came_and_frees_the_row(page, here) -> None:
    here.batching.pause = 0.02
    for press in (lambda: page.click("#stop"), lambda: page.press("Escape")):
        ask(page, "slow", wait=False)
        page.until("document.querySelector('.message.going .body')?.textContent.includes('abc')")
        assert page.run("document.querySelector('#send').hidden && document.querySelector('#new').disabled")
        press()
        page.until(IDLE)
        here.until(here.idle)
        text = shown(page)[-1]
        assert text.startswith("abc") and len(text) < 3000
        assert "stopped" in page.run("document.querySelector('.message:last-child .facts').textContent")
    assert here.batching.told < 4000


def test_regenerate_and_edit(page, here) -> None:
    ask(page, "one")
    ask(page, "two")
    page.click(".message.assistant .regenerate", 0)
    page.until(IDLE)
    assert shown(page) == ["one", "You said: one"] and len(here.batching.requests) == 3
    assert here.batching.requests[2].tokens == here.batching.requests[0].tokens
    ask(page, "three")
    page.run("document.querySelector('#input').focus()")
    page.type("a draft")
    page.click(".message.user .edit", 0)
    assert page.run("document.querySelector('#input').value") == "one"
    assert page.run("[...document.querySelectorAll('.replaced')].length") == 4
    page.press("Escape")
    assert page.run("document.querySelector('#input').value") == "a draft" and len(shown(page)) == 4
    page.click(".message.user .edit", 0)
    page.run("document.querySelector('#input').select()")
    page.type("changed")
    page.click("#send")
    page.until(IDLE)
    assert shown(page) == ["changed", "You said: changed"]


def test_copy(page) -> None:
    page.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    ask(page, "code")
    page.click(".message.assistant > .bar button[aria-label=Copy]")
    page.until("document.querySelector('.message.assistant > .bar').textContent.includes('Copied')")
    assert page.run("navigator.clipboard.readText()") == CODE
    page.click(".code-head button")
    page.until("document.querySelector('.code-head').textContent.includes('Copied')")
    assert page.run("navigator.clipboard.readText()") == 'print("<b>&amp;</b>")'


def test_markdown_and_tool_cards(page) -> None:
    ask(page, "code")
    body = "document.querySelector('.message.assistant .body')"
    tags = page.run(f"[...{body}.querySelectorAll('*')].map(e => e.localName)")
    for tag in ("strong", "em", "code", "pre", "ol", "ul", "blockquote", "table", "td", "a"):
        assert tag in tags, tag
    assert page.run(f"{body}.querySelector('pre').textContent") == 'print("<b>&amp;</b>")'
    assert page.run(f"{body}.querySelector('em').textContent") == "much" and tags.count("em") == 1
    links = page.run(f"[...{body}.querySelectorAll('a')].map(e => [e.href, e.rel, e.textContent])")
    assert links == [
        ["https://example.org/a?b=c", "noopener noreferrer nofollow", "here"],
        ["https://example.org/", "noopener noreferrer nofollow", "https://example.org/"],
    ]
    picture(page, "code")
    ask(page, "sum")
    card = "document.querySelector('.tool')"
    assert page.run(f"[{card}.querySelector('code').textContent, {card}.querySelector('output').textContent]") == [
        "12+30", "42"
    ]  # fmt: skip
    picture(page, "tool")


def test_text_stays_text(page, here) -> None:
    for i, text in enumerate(EVIL):
        ask(page, f"evil{i}")
        kinds = page.run(
            "[...new Set([...document.querySelectorAll('.message:last-child .body *')].map(e => e.localName))]"
        )
        assert not {"img", "script", "b", "i", "u", "svg", "h1", "iframe"} & set(kinds), text
    ask(page, EVIL[0])  # from the user, and again as an echo
    assert shown(page)[-2] == EVIL[0] and EVIL[0] in shown(page)[-1]
    hrefs = page.run("[...document.querySelectorAll('.body a')].map(e => e.protocol)")
    assert set(hrefs) <= {"https:"}
    page.click("#show-tokens")
    page.until("document.querySelector('.chip')")
    ask(page, "fail")  # an error with HTML in it
    error = "document.querySelector('.error')"
    assert page.run(f"[{error}.textContent, {error}.childElementCount]") == ["<b>no</b> memory", 0]
    assert page.run("[...document.querySelectorAll('b')].every(e => e.closest('#tokens'))")


def test_errors_are_shown_and_can_be_tried_again(page, here) -> None:
    here.desk.queue = -2  # everything is refused
    ask(page, "hello")
    assert "try again later (in about" in page.run("document.querySelector('.error').textContent")
    assert shown(page) == ["hello"]
    here.desk.queue = 5
    page.click(".retry")
    page.until("document.querySelectorAll('.message').length == 2 && " + IDLE)
    assert shown(page) == ["hello", "You said: hello"] and page.run("document.querySelector('.error')") is None
    page.run("window.real = window.fetch; window.fetch = () => Promise.reject(new TypeError('x'))")
    ask(page, "lost")
    assert "cannot be reached" in page.run("document.querySelector('.error').textContent")
    page.events.clear()  # the browser's own line about the refused request


def test_a_long_conversation_goes_on(page, here) -> None:
    sendable = "import('./page/store.js').then(({{ sendable }}) => sendable({}, {{messages: 4, characters: 5,"
    sendable += " characters_in_all: 9}})).then(({{ said, dropped }}) => [said.map((m) => m.content).join(), dropped])"
    kept = {
        "a A b B": ["a,A,b,B", 0],
        "a A b B c": ["b,B,c", 1],  # as many messages
        "a A b B c C d": ["c,C,d", 2],
        "a A bbb 🐕🐕🐕🐕 cc": ["bbb,🐕🐕🐕🐕,cc", 1],  # as many characters together
        "a A bbb 🐕🐕🐕🐕 ccc": ["ccc", 2],
        "a AAAAAA b B c": ["b,B,c", 1],  # as many in one
        "a bbbbbb": ["a,bbbbbb", 0],  # the last exchange, whatever it is
        "": ["", 0],
    }
    for texts, expected in kept.items():
        turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts.split())]
        assert page.run(sendable.format(json.dumps(turns))) == expected, texts
    turns = [{"role": ("user", "assistant")[i % 2], "content": "hi"} for i in range(60)]
    turns[51]["content"] = "x" * 8001  # an answer of more characters than a message may have
    page.run(f"localStorage.setItem('nanochat.conversation', JSON.stringify({json.dumps(turns)}))")
    page.open(here.url + "/")
    here.batching.context = 10**6
    here.app.state.served.context = 10**6
    ask(page, "and now?")
    assert shown(page)[-1] == "You said: and now?" and len(shown(page)) == 62
    assert here.batching.requests[-1].tokens.count(257) == 5  # exchanges 26 to 29, and the new one
    assert "The oldest 26 exchanges no longer fit" in page.run("document.querySelector('.forgotten').textContent")
    page.click("#show-tokens")
    page.until("document.querySelector('#chips .forgotten')")
    ask(page, "x" * 8001)  # the last one is never dropped in silence
    assert "8,001 characters" in page.run("document.querySelector('.error').textContent")
    page.until("document.querySelector('#chips .error')")
    page.events.clear()


def test_an_answer_without_a_word(page, here) -> None:
    ask(page, "nothing")
    assert shown(page) == ["nothing", "(nothing was written)"]
    page.click("#show-tokens")
    page.until("document.querySelectorAll('.chip').length == 11")
    ask(page, "more")
    assert here.batching.requests[-1].tokens == said(256, 257, "nothing", 258, 257, "more", 258, 259)
    page.press("Escape")
    assert page.run("document.querySelector('#tokens').hidden")


def test_who_has_scrolled_up_stays_there(page, here) -> None:
    ask(page, "code")
    ask(page, "code")
    top, end = "document.querySelector('#scroll').scrollTop", "(e => e.scrollHeight - e.clientHeight - e.scrollTop < 2)"
    assert page.run(f"{end}(document.querySelector('#scroll'))")
    ask(page, "slow", wait=False)
    page.until("document.querySelector('.message.going .body')?.textContent.includes('abc')")
    page.run(f"{top} = 40")
    page.until("document.querySelector('.message.going .body')?.textContent.length > 60")
    page.click("#stop")
    page.until(IDLE)
    assert page.run(top) == 40
    ask(page, "code")
    assert page.run(f"{end}(document.querySelector('#scroll'))")


def test_the_sampling_panel_and_the_commands(page, here) -> None:
    ask(page, "a")
    first = here.batching.requests[-1]
    assert (first.temperature, first.top_k, first.top_p, first.max_tokens) == (0.8, 50, None, 512)
    page.click("#show-settings")
    picture(page, "settings")
    for name, value in {"temperature": "0", "top_k": "7", "top_p": "0.5", "max_tokens": "5", "seed": "3"}.items():
        page.run(
            f"(f => {{ f.value = {value!r}; f.dispatchEvent(new Event('input')); }})(document.getElementById({name!r}))"
        )
    ask(page, "b")
    request = here.batching.requests[-1]
    assert (request.temperature, request.top_k, request.top_p, request.max_tokens) == (0, 7, 0.5, 5)
    assert request.seed == 3
    page.open(here.url + "/")  # kept
    ask(page, "/temperature 1.5")
    ask(page, "/topk 0")
    ask(page, "/topp 1")
    ask(page, "/seed random")
    ask(page, "c")
    request = here.batching.requests[-1]
    assert (request.temperature, request.top_k, request.top_p, request.max_tokens) == (1.5, None, None, 5)
    asked = len(here.batching.requests)
    ask(page, "/temperature 3")
    assert page.run("document.querySelector('.note').textContent") == "temperature cannot be 3"
    ask(page, "/help")
    assert "/clear" in page.run("document.querySelector('.note').textContent")
    ask(page, "/clear")
    assert shown(page) == [] and len(here.batching.requests) == asked
    page.click("#show-settings")
    page.click("#reset")
    ask(page, "d")
    assert here.batching.requests[-1].temperature == 0.8
    page.press("Escape")
    assert page.run("document.querySelector('#settings').hidden")


def test_the_tokens_of_the_conversation(page) -> None:
    ask(page, "Hi")
    page.click("#show-tokens")
    page.until("document.querySelectorAll('.chip').length")
    chips = page.run(
        "[...document.querySelectorAll('.chip')].map(e => [e.querySelector('small').textContent, e.className])"
    )
    expected = said(256, 257, "Hi", 258, 259, "You said: Hi", 260)
    assert [int(number) for number, _ in chips] == expected
    assert [kind for _, kind in chips[:6]] == [
        f"chip {kind}" for kind in "special special zero zero special special".split()
    ]
    assert {kind for _, kind in chips[6:-1]} == {"chip one"}
    page.point(".chip", 6)
    page.until("document.querySelector('.next')")
    detail = page.run("document.querySelector('#detail').innerText")
    assert "token 89, written by the model" in detail and "75 %" in detail
    assert page.run("document.querySelectorAll('.next').length") == 11  # ten, and the one that came
    assert page.run("document.querySelector('.next.came b').textContent") == "o"
    picture(page, "tokens")
    page.run("document.querySelector('#chips').focus()")
    page.press("End")
    assert "token 260" in page.run("document.querySelector('.chosen').innerText")
    page.press("ArrowLeft")
    assert "token 105" in page.run("document.querySelector('.chosen').innerText")
    page.run("(c => { c.value = 'p'; c.dispatchEvent(new Event('change')); })(document.querySelector('#colours'))")
    picture(page, "tokens-likely")
    ask(page, "more")
    page.until("document.querySelectorAll('.chip').length > 30")  # follows the conversation
    page.click("#hide-tokens")
    assert page.run("document.querySelector('#tokens').hidden")


def test_light_and_dark(page, here) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.run(background)
    page.scheme("dark")
    dark = page.run(background)
    assert light != dark
    page.click("#theme")
    assert page.run(background) == light
    page.open(here.url + "/")
    assert page.run(background) == light  # kept, against the system's
    page.click("#theme")
    ask(page, "code")
    ask(page, "sum")
    assert page.run(background) == dark
    picture(page, "dark")


def test_a_phone(page) -> None:
    page.size(360, 740, mobile=True)
    ask(page, "code")
    ask(page, "x" * 300)
    ask(page, "sum")
    picture(page, "phone")
    ask(page, "/help")
    picture(page, "phone-help")
    seen, meant = page.run(
        "(r => { const e = document.querySelector('.note'); r.selectNodeContents(e);"
        " return [new Set([...r.getClientRects()].map(b => b.top)).size, e.textContent.split('\\n').length]; })"
        "(document.createRange())"
    )
    assert seen == meant, "a line of /help does not fit a phone"
    wide = "[...document.querySelectorAll('*')].filter(e => e.getBoundingClientRect().right > innerWidth + 1" \
        " && !e.closest('.code, .table')).map(e => e.outerHTML.slice(0, 80))"  # fmt: skip
    for button in (None, "#show-settings", "#show-settings", "#show-tokens"):
        if button:
            page.click(button)
        assert page.run("document.documentElement.scrollWidth <= innerWidth"), button
        assert page.run(wide) == [], button
    page.until("document.querySelectorAll('.chip').length")
    assert page.run("document.documentElement.scrollWidth <= innerWidth") and page.run(wide) == []
    picture(page, "phone-tokens")


def test_everything_has_a_name_and_shows_its_focus(page) -> None:
    ask(page, "code")
    nameless = page.run(
        "[...document.querySelectorAll('button, input, textarea, select, [role]')].filter("
        "e => !(e.textContent.trim() || e.getAttribute('aria-label') || e.title || e.closest('label')))"
        ".map(e => e.outerHTML)"
    )
    assert nameless == []
    outlines = []
    page.run("document.activeElement.blur()")
    for _ in range(8):
        page.press("Tab")
        outlines.append(
            page.run(
                "(e => [e.id || e.className || e.localName, getComputedStyle(e).outlineStyle])(document.activeElement)"
            )
        )
    assert {"new", "show-settings", "show-tokens", "theme"} <= {name for name, _ in outlines}
    assert all(style != "none" for name, style in outlines if name not in ("input", "body")), outlines


def test_a_server_with_a_token(window) -> None:
    window.events.clear()
    with site(FakeBatching(script), token="s3 cret") as here:
        window.open(here.url + "/#token=s3%20cret")
        assert window.run("location.hash") == ""
        ask(window, "Hi")
        assert shown(window) == ["Hi", "You said: Hi"] and window.problems() == []
        window.run("sessionStorage.clear()")
        window.call("Page.reload")
        window.until("document.querySelector('#ask-token')?.open")
        window.type("s3 cret")
        window.press("Enter")
        window.until("document.querySelector('#facts').textContent")
        window.events.clear()  # the browser's own line about the 401
        ask(window, "again")
        assert shown(window)[-1] == "You said: again" and window.problems() == []


def test_the_reader_of_events_takes_chunks_cut_anywhere(page) -> None:
    texts = ["é", "🐕 a: b", 'quote " and \\n', "data: {", "日本"]
    stream = "".join(f"data: {json.dumps({'token': text}, ensure_ascii=False)}\n\n" for text in texts)
    stream += ": note\r\n\r\n" + 'data: {"done": true}'  # the last line without its end
    for cut in (1, 2, 3, 5):
        code = f"""import('./page/api.js').then(async ({{ events }}) => {{
            const bytes = new TextEncoder().encode({json.dumps(stream)});
            async function* chunks() {{
                for (let i = 0; i < bytes.length; i += {cut}) yield bytes.slice(i, i + {cut});
            }}
            const found = [];
            for await (const event of events(chunks())) found.push(event);
            return found;
        }})"""
        assert page.run(code) == [*({"token": text} for text in texts), {"done": True}]


HOSTILE = "* [ ` _a_ > - |- **a ![]( 1. http:// # a*b_c \\\\ ~~a~~ (](".split()


def test_hostile_markdown_takes_no_time(page) -> None:
    for part in [*HOSTILE, *(part + " " for part in HOSTILE), *(part + "\n" for part in HOSTILE)]:
        text = json.dumps(part * (8000 // len(part)))
        took, length = page.run(
            "import('./page/markdown.js').then(({ markdown }) => { const began = performance.now();"
            f" const node = markdown({text}); return [performance.now() - began, node.textContent.length] }})"
        )
        assert took < 2000 and length <= len(text), part
