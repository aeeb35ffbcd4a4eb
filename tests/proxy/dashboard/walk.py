"""Walks through dashboards with Debian's chromium and prints what it saw. Runs in an environment of its own.

Each line of the standard input is a task, a JSON object: the address with its token, what to do, and with what. Its
result is a line too: `{"seen": ...}`, or `{"error": ...}` with the traceback.
"""

import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Dialog, Page, Request, sync_playwright

CHROMIUM = "/usr/bin/chromium"
READY = "#page > .page:not([aria-busy])"
LOADED = f"{READY}:not(:has(button:disabled))"
"""A button that adds rows to a list is disabled until they are there."""
SECONDS = 120_000
MOST_PRESSES = 120
RENAME = """names => {
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) for (const [old, now] of Object.entries(names))
        texts.currentNode.data = texts.currentNode.data.replaceAll(old, now);
}"""
"""Gives places of one machine other names, for pictures that others see."""
IN_SIGHT = """() => {
    const pane = document.querySelector('.pane').getBoundingClientRect();
    const edge = Math.max(pane.top, document.querySelector('.bar').offsetHeight);
    return document.elementFromPoint(pane.left + 40, edge + 20).closest('[data-at]').dataset.at;
}"""
"""Finds the lines of a log below the edge, by their place in it."""
TOO_WIDE = "document.documentElement.scrollWidth > innerWidth"
LOUD = "#page .alarms, #page .badge.bad, #page tr:has(td.alarm)"
"""What is shown in red: alarms, bad states, and rules that were in alarm in some step."""
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}


class Watch:
    """What went wrong in a page, and whom it asked."""

    def __init__(self, page: Page, address: str):
        self.troubles: list[str] = []
        self.elsewhere: list[str] = []
        self._host = urlsplit(address).netloc
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.troubles.append(str(error)[:400]))
        page.on("dialog", self._asked)
        page.on("request", self._requested)

    def _said(self, said: ConsoleMessage) -> None:
        if said.type in ("error", "warning"):
            self.troubles.append(said.text[:400])

    def _asked(self, dialog: Dialog) -> None:
        self.troubles.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _requested(self, asked: Request) -> None:
        if urlsplit(asked.url).netloc not in (self._host, ""):
            self.elsewhere.append(asked.url)


def opened(browser: Browser, task: dict[str, Any], size: str = "desktop", dark: bool = False) -> BrowserContext:
    width, height = SIZES[size]
    return browser.new_context(viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light")


def go(page: Page, task: dict[str, Any], where: str) -> None:
    """Open a page of the dashboard and wait until it is drawn."""
    base = "{0.scheme}://{0.netloc}/".format(urlsplit(task["address"]))
    page.goto(f"{base}#{where}")
    page.wait_for_selector(READY, timeout=SECONDS)
    page.wait_for_timeout(task.get("settle", 700))


def look(browser: Browser, task: dict[str, Any]) -> list[dict[str, Any]]:
    """Open every page in every size and scheme; say of each what is wrong with it."""
    seen = []
    axe = Path(task["axe"]).read_text() if task.get("axe") else None
    for size, dark in task.get("looks", [["desktop", False]]):
        context = opened(browser, task, size, dark)
        page = context.new_page()
        watch = Watch(page, task["address"])
        page.goto(task["address"])
        for where in task["pages"]:
            watch.troubles.clear()
            go(page, task, where)
            entry = {
                "page": where, "size": size, "dark": dark, "title": page.title(), "troubles": list(watch.troubles),
                "elsewhere": list(watch.elsewhere), "url": page.url,
                "too_wide": page.evaluate(TOO_WIDE),
                "alerts": page.locator("#page [role=alert]").all_inner_texts(),
                "scripts": page.evaluate("document.querySelectorAll('#page script, #page img, #page iframe').length"),
                "text": page.locator("#page").inner_text()[:20_000],
                "loud": page.locator(LOUD).all_inner_texts(),
                "inside": {inner: page.locator(inner).all_inner_texts() for inner in task.get("inside", [])},
            }  # fmt: skip
            if axe:
                page.evaluate(axe)
                entry["axe"] = serious(page)
            seen.append(entry)
        context.close()
    return seen


def serious(page: Page) -> list[str]:
    """What axe-core, which the page has, finds and calls serious."""
    found = page.evaluate("axe.run({resultTypes: ['violations']})")
    return [
        f"{each['id']}: {each['nodes'][0]['html'][:200]}"
        for each in found["violations"]
        if each["impact"] in ("serious", "critical")
    ]


def reach(page: Page, key: str, selector: str) -> None:
    """Press a key until the element that has the focus matches the selector."""
    for _ in range(MOST_PRESSES):
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            return
        page.keyboard.press(key)
    raise AssertionError(f"{MOST_PRESSES} times {key} do not lead to {selector} at {page.url}")


def titled(page: Page, title: str) -> None:
    """Wait for the page with this title."""
    page.wait_for_selector(f"h1:has-text('{title}')", timeout=SECONDS)
    page.wait_for_selector(READY, timeout=SECONDS)


def keyboard(browser: Browser, task: dict[str, Any]) -> dict[str, Any]:
    """Go from the list of runs to the figures of a token, and through the other pages, without a pointer."""
    with visited(browser, task) as (page, watch):
        page.wait_for_selector(READY, timeout=SECONDS)
        page.keyboard.press("Tab")
        seen = {"first": page.evaluate("document.activeElement.textContent")}
        page.keyboard.press("?")
        seen["help"] = page.locator("#help").inner_text()
        page.keyboard.press("Escape")
        seen["closed"] = not page.locator("#help").is_visible()
        seen |= to_a_token(page, task) | searched(page) | behaved(page, task)
        seen["troubles"] = watch.troubles
    return seen


def to_a_token(page: Page, task: dict[str, Any]) -> dict[str, str]:
    """From the list of runs by way of a group to a token of one member, then to the next member."""
    seen = {}
    reach(page, "j", f"#page table a[href='#/run/{task['run']}']")
    page.keyboard.press("Enter")
    titled(page, task["run"])
    seen["run"] = page.url
    page.wait_for_selector("#page table a[href^='#/group/']", timeout=SECONDS)
    reach(page, "j", f"#page table a[href='#/group/{task['group']}']")
    page.keyboard.press("Enter")
    page.wait_for_selector("article a", timeout=SECONDS)
    reach(page, "j", "article a")
    page.keyboard.press("Enter")
    page.wait_for_selector("[role=treeitem]", timeout=SECONDS)
    page.wait_for_timeout(500)
    seen["rollout"] = page.url
    page.keyboard.press("p")
    page.wait_for_timeout(500)
    seen["call"] = page.url
    reach(page, "Tab", "[role=tree]")
    page.keyboard.press("ArrowUp")
    page.wait_for_timeout(500)
    seen["tree"] = page.url
    page.keyboard.press("t")
    page.wait_for_selector(".tokens [data-at]", timeout=SECONDS)
    reach(page, "Tab", ".tokens")
    page.keyboard.press("ArrowRight")
    seen["token"] = page.locator(".tip").inner_text()
    page.keyboard.press("]")
    page.wait_for_timeout(800)
    seen["next"] = page.url
    return seen


def searched(page: Page) -> dict[str, str]:
    """From the field in the bar to a usual question and a rollout that it finds."""
    seen = {}
    page.keyboard.press("/")
    page.keyboard.type("parser")
    page.keyboard.press("Enter")
    titled(page, "Search")
    seen["search"] = page.url
    reach(page, "Tab", "#page a.chip[href*='event=retry_loop'][href*='most_reward=0']")
    page.keyboard.press("Enter")
    page.wait_for_selector("#page table a[href^='#/rollout/']", timeout=SECONDS)
    seen["question"] = page.url
    reach(page, "j", "#page table a[href^='#/rollout/']")
    page.keyboard.press("Enter")
    page.wait_for_selector("[role=treeitem]", timeout=SECONDS)
    seen["looped"] = page.url
    return seen


def behaved(page: Page, task: dict[str, Any]) -> dict[str, str]:
    """From anywhere to the behaviour of two runs, an event of one, and by way of the machines back to the run."""
    seen = {}
    page.keyboard.press("b")
    titled(page, "Behaviour of")
    reach(page, "Tab", "#page input[aria-label='another run']")
    page.keyboard.type(task["other"])
    page.keyboard.press("Enter")
    titled(page, task["other"])
    seen["other"] = page.url
    page.keyboard.press("b")
    titled(page, task["run"])
    page.wait_for_selector("#page table a[href*='event=retry_loop']", timeout=SECONDS)
    reach(page, "j", "#page table a[href*='event=retry_loop']")
    page.keyboard.press("Enter")
    titled(page, "Search")
    seen["event"] = page.url
    page.keyboard.press("m")
    titled(page, "Machines")
    reach(page, "Tab", f"#page figcaption a[href='#/run/{task['run']}']")
    page.keyboard.press("Enter")
    titled(page, task["run"])
    seen["machines"] = page.url
    return seen


@contextmanager
def visited(browser: Browser, task: dict[str, Any], size: str = "desktop") -> Iterator[tuple[Page, Watch]]:
    """Yield a page of the dashboard, opened with the token, and what is watched of it."""
    context = opened(browser, task, size)
    page = context.new_page()
    watch = Watch(page, task["address"])
    page.goto(task["address"])
    yield page, watch
    context.close()


def live(browser: Browser, task: dict[str, Any]) -> dict[str, Any]:
    """Wait until a page shows a text that is not there yet; say how the line is meanwhile."""
    context = opened(browser, task)
    page = context.new_page()
    page.goto(task["address"])
    go(page, task, task["where"])
    before = page.locator("#page").inner_text()
    page.wait_for_selector("#live[data-state=live]", timeout=SECONDS)
    print("listening", flush=True)
    page.wait_for_function(
        "text => document.getElementById('page').innerText.includes(text)", arg=task["text"], timeout=SECONDS
    )
    context.close()
    return {"before": before}


def lay(browser: Browser, task: dict[str, Any]) -> dict[str, Any]:
    """Find a run by a part of its name and lay it over another one."""
    with visited(browser, task) as (page, watch):
        go(page, task, f"/run/{task['run']}")
        field = page.get_by_label("lay a run over it")
        field.press_sequentially(task["part"])
        page.wait_for_selector(f"datalist option[value='{task['name']}']", state="attached", timeout=SECONDS)
        field.fill(task["name"])
        field.press("Enter")
        page.wait_for_selector(f"button.chip:has-text('{task['name']}')", timeout=SECONDS)
        page.wait_for_selector(f".legend li:has-text('{task['name']}')", timeout=SECONDS)
        charts = page.locator("figure.chart")
        legends = {
            figure.locator(".title").inner_text(): figure.locator(".legend li").all_inner_texts()
            for figure in charts.all()
        }
        seen = {"url": page.url, "legends": legends, "troubles": watch.troubles}
    return seen


def places(browser: Browser, task: dict[str, Any]) -> dict[str, Any]:
    """Choose kinds of events and scroll through a log; load each of the addresses that came of it again."""
    with visited(browser, task, task["size"]) as (page, watch):
        go(page, task, f"{task['rollout']}&view=events")
        page.locator(".pane .chip", has_text="retry loop").click()
        seen = {"events": page.url}
        page.reload()
        page.wait_for_selector(".events li", timeout=SECONDS)
        seen["kinds"] = page.locator(".events .badge").all_inner_texts()
        seen["pressed"] = page.locator(".pane .chip[aria-pressed=true]").all_inner_texts()
        go(page, task, f"{task['rollout']}&view=log")
        page.get_by_role("button", name="earlier").click()
        page.wait_for_selector(".log [data-at='0']", timeout=SECONDS)
        page.evaluate("document.querySelector('.pane').scrollTop = 30000; window.scrollBy(0, 30000)")
        page.wait_for_timeout(800)
        seen["log"] = page.url
        page.reload()
        page.wait_for_selector(".log [data-at]", timeout=SECONDS)
        page.wait_for_timeout(1000)
        seen["log again"], seen["place"] = page.url, page.evaluate(IN_SIGHT)
        seen["troubles"] = watch.troubles
    return seen


def names(browser: Browser, task: dict[str, Any]) -> dict[str, Any]:
    """How a rollout's page names calls, each with its title: findings, the tree, events, a token of an earlier call."""
    with visited(browser, task) as (page, watch):
        titled_texts = "found => found.map(each => [each.textContent.trim(), each.title])"
        go(page, task, f"{task['rollout']}&view=events")
        seen = {
            "findings": page.locator("#page details li > span[title]").evaluate_all(titled_texts),
            "severities": page.locator("#page details li > .badge").evaluate_all(
                "found => found.map(each => [each.textContent, each.classList.contains('bad')])"
            ),
            "tree": page.locator("[role=treeitem]").evaluate_all("found => found.map(each => each.title)"),
            "events": page.locator(".events a").evaluate_all(titled_texts),
            "text": page.locator("#page").inner_text(),
        }
        page.locator(".events a").last.click()
        page.wait_for_selector(".turns .own", timeout=SECONDS)
        seen["event"] = page.url
        seen["turn"] = page.locator(".turns .own h3 a").evaluate_all(titled_texts)
        go(page, task, f"{task['rollout']}&view=tokens")
        page.locator(".tokens .earlier").last.hover()
        seen["token"] = page.locator(".tip span", has_text="sampled by").evaluate_all(titled_texts)
        seen["troubles"] = watch.troubles
    return seen


def folds(browser: Browser, task: dict[str, Any]) -> dict[str, Any]:
    """The tool calls of a page as they are drawn, then after keys alone have opened or closed each."""
    with visited(browser, task) as (page, watch):
        go(page, task, task["where"])
        uses = page.locator("details.use")
        drawn = "found => found.map(each => [each.open, each.firstChild.innerText, each.innerText])"
        seen = {"first": uses.evaluate_all(drawn), "scripts": page.locator("#page script, #page img").count()}
        for number in range(uses.count()):
            reach(page, "Tab", f".turns .own > details:nth-of-type({number + 1}) > summary")
            page.keyboard.press("Enter")
        seen |= {"then": uses.evaluate_all(drawn), "troubles": watch.troubles}
        if task.get("axe"):
            page.evaluate(Path(task["axe"]).read_text())
            seen["axe"] = serious(page)
    return seen


def hostile(browser: Browser, task: dict[str, Any]) -> dict[str, Any]:
    """Results of tools, the end of what an agent printed and its beginning; then go on by a key."""
    with visited(browser, task) as (page, watch):
        go(page, task, task["rollout"])
        seen: dict[str, Any] = {"results": page.locator(".turns > .tool pre").all_text_contents()}
        made = "() => document.querySelectorAll('#page :is(script, img, iframe, b b)').length"
        seen["made"] = [page.evaluate(made)]
        go(page, task, f"{task['rollout']}&view=log")
        page.get_by_role("button", name="earlier").click()
        page.wait_for_function("() => document.querySelectorAll('.log span').length > 2", timeout=SECONDS)
        ends = page.locator(".log").text_content() or ""
        go(page, task, f"{task['rollout']}&view=log&log=0")
        begins = page.locator(".log").text_content() or ""
        seen |= {"begins": begins[:400], "ends": ends[-200:], "sizes": [len(begins), len(ends)]}
        seen["wide"] = page.evaluate(TOO_WIDE)
        seen["made"].append(page.evaluate(made))
        page.keyboard.press("e")
        page.wait_for_selector(".events li", timeout=SECONDS)
        seen |= {"title": page.title(), "troubles": watch.troubles, "elsewhere": watch.elsewhere, "url": page.url}
    return seen


def stranger(browser: Browser, task: dict[str, Any]) -> list[dict[str, Any]]:
    """Open addresses as somebody without the token, each with nothing from before."""
    seen = []
    for where in task["pages"]:
        context = opened(browser, task)
        page = context.new_page()
        asked: list[str] = []
        page.on("request", lambda request, asked=asked: asked.append(request.resource_type))
        answer = page.goto("{0.scheme}://{0.netloc}/".format(urlsplit(task["address"])) + where)
        page.wait_for_timeout(500)
        assert answer is not None
        entry = {
            "status": answer.status, "text": page.locator("body").inner_text(), "asked": asked,
            "type": answer.header_value("content-type"), "cookies": context.cookies(), "title": page.title(),
            "elements": page.evaluate("document.querySelectorAll('script, link, img, style, a, [id]').length"),
        }  # fmt: skip
        seen.append(entry)
        context.close()
    return seen


def act(browser: Browser, task: dict[str, Any]) -> list[dict[str, Any]]:
    """Open a page, then do one thing after another: [what, selector, ...]; say after each what the page shows."""
    with visited(browser, task) as (page, watch):
        go(page, task, task["page"])
        seen = [shown(page, watch, task)]
        for what, *given in task.get("acts", []):
            if what == "go":
                go(page, task, *given)
            elif what == "reload":
                page.reload()
                page.wait_for_selector(READY, timeout=SECONDS)
            else:
                selector, *rest = given
                getattr(page.locator(selector).first, what)(*rest)
            page.wait_for_timeout(task.get("settle", 700))
            page.wait_for_selector(LOADED, timeout=SECONDS)
            seen.append(shown(page, watch, task))
    return seen


def shown(page: Page, watch: Watch, task: dict[str, Any]) -> dict[str, Any]:
    """What a page shows, with the texts of everything that a selector of the task finds."""
    found = {name: page.locator(selector).all_inner_texts() for name, selector in task.get("find", {}).items()}
    return {"url": page.url, "text": page.locator("#page").inner_text(), "troubles": list(watch.troubles), **found}


def pictures(browser: Browser, task: dict[str, Any]) -> dict[str, Any]:
    """Take a picture of each page: {file: [address, size, dark, height, clicks]}."""
    for file, (where, size, dark, height, clicks) in task["pictures"].items():
        context = opened(browser, task, size, dark)
        page = context.new_page()
        page.goto(task["address"])
        page.set_viewport_size({"width": SIZES[size][0], "height": height})
        go(page, task, where)
        page.wait_for_timeout(1500)
        for click in clicks:
            page.locator(click).first.hover() if click.startswith(".tokens") else page.locator(click).first.click()
            page.wait_for_timeout(500)
        page.evaluate(RENAME, task.get("renamed", {}))
        page.screenshot(path=file)
        context.close()
    return {}


DOES: dict[str, Callable[[Browser, dict[str, Any]], Any]] = {
    "look": look, "keyboard": keyboard, "live": live, "lay": lay, "places": places, "names": names, "folds": folds,
    "hostile": hostile, "stranger": stranger, "act": act, "pictures": pictures,
}  # fmt: skip


def done(browser: Browser, task: dict[str, Any]) -> dict[str, Any]:
    """Do a task; nothing of it stays in the browser."""
    try:
        return {"seen": DOES[task["do"]](browser, task)}
    except Exception:
        return {"error": traceback.format_exc()}
    finally:
        for context in browser.contexts:
            context.close()


if __name__ == "__main__":
    with sync_playwright() as playwright:
        start = partial(playwright.chromium.launch, executable_path=CHROMIUM, args=["--no-sandbox"])
        browser = start()
        for line in sys.stdin:
            if not browser.is_connected():  # it broke down in the walk before
                browser = start()
            print(json.dumps(done(browser, json.loads(line))), flush=True)
        browser.close()
