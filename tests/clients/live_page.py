"""live_page.py GATEWAY_HOST:PORT OUTPUT_FOLDER PROMPT_FILE: a person watching the live page, in headless Chromium.

Sends one bridged request and demands that its bar appears, goes through prefill, transfer and decode, and ends with
the verdict `complete`; that the page works by keyboard, in the dark, and after a lost connection. The page is reached
through a proxy of this script's own, so that the connection can be cut. Screenshots go to the output folder.
PD_TEST_CHROMIUM names the browser.
"""

import json
import os
import pathlib
import socket
import sys
import threading
import time
import urllib.request

from playwright.sync_api import expect, sync_playwright

gateway, output, prompt_file = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
output.mkdir(parents=True, exist_ok=True)
SEEN_LIMIT_MS = 60_000


class Proxy:
    """Passes bytes between the browser and the gateway until it is cut."""

    def __init__(self, target):
        host, port = target.rsplit(":", 1)
        self.target = (host, int(port))
        self.open = True
        self.sockets = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            near, _ = self.listener.accept()
            if not self.open:
                near.close()
                continue
            far = socket.create_connection(self.target)
            self.sockets += [near, far]
            for a, b in ((near, far), (far, near)):
                threading.Thread(target=self.pump, args=(a, b), daemon=True).start()

    @staticmethod
    def pump(a, b):
        try:
            while data := a.recv(65536):
                b.sendall(data)
        except OSError:
            pass
        for end in (a, b):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def cut(self):
        self.open = False
        for end in self.sockets:
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        self.sockets = []

    def mend(self):
        self.open = True


def ask(prompt, max_tokens, route):
    """Streams a request to its end in a thread; returns the thread and a dict that gets the verdict header."""
    got = {}

    def run():
        body = {"model": model, "messages": [{"role": "user", "content": prompt}], "stream": True,
                "max_tokens": max_tokens, "temperature": 0}
        headers = {"content-type": "application/json", "x-pd-bridge-route": route}
        request = urllib.request.Request(f"http://{gateway}/v1/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as response:
            got["verdict"] = json.loads(response.headers["x-pd-bridge"])
            got["text"] = response.read().decode()

    thread = threading.Thread(target=run)
    thread.start()
    return thread, got


def bars(page, box):
    return page.evaluate(
        "box => [...document.querySelectorAll(`#${box} .bar`)].map(b => [b.dataset.stage, b.dataset.stages])", box)


with urllib.request.urlopen(f"http://{gateway}/v1/models") as response:
    model = json.load(response)["data"][0]["id"]
proxy = Proxy(gateway)
prompt = prompt_file.read_text()

with sync_playwright() as playwright:
    browser = playwright.chromium.launch(
        executable_path=os.environ["PD_TEST_CHROMIUM"],
        args=["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
              "--disable-component-update", "--disable-sync"])
    context = browser.new_context(viewport={"width": 1100, "height": 900}, color_scheme="light")
    page = context.new_page()
    errors, requests = [], []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: requests.append(request.url))
    page.goto(f"http://127.0.0.1:{proxy.port}/")
    expect(page.locator("#link")).to_have_text("live", timeout=10_000)
    expect(page.locator("#model")).to_have_text(model)
    expect(page.locator("#nodes tr")).to_have_count(2, timeout=10_000)

    # A request is sent; its bar appears and moves.
    thread, got = ask(prompt, 48, "bridge")
    seen, reads, deadline = [], set(), time.monotonic() + SEEN_LIMIT_MS / 1000
    while time.monotonic() < deadline:
        now = bars(page, "flight")
        if now:
            stage = now[0][0]
            if stage not in seen:
                seen.append(stage)
                page.screenshot(path=output / f"flight-{len(seen)}-{stage}.png")
            read = page.evaluate("() => document.querySelector('#flight .read')?.getAttribute('width')")
            if read:
                reads.add(float(read))
        elif not thread.is_alive():
            break
        page.wait_for_timeout(40)
    thread.join()
    assert "prefill" in seen and "decode" in seen, f"stages seen in flight: {seen}"
    assert seen.index("prefill") < seen.index("decode"), seen
    assert len(reads) >= 2, f"the bar did not move while the prompt was read: {reads}"
    assert got["verdict"]["verdict"] == "complete", got["verdict"]
    expect(page.locator("#recent .bar")).to_have_count(1, timeout=5_000)
    expect(page.locator("#recent .verdict")).to_have_text("complete")
    assert bars(page, "recent") == [["ended", "plan prefill transfer decode"]], bars(page, "recent")
    expect(page.locator("#in-flight")).to_have_text("0")
    expect(page.locator("#ttft-bridged")).not_to_have_text("–")

    # A native one has its reason beside its name.
    thread, got = ask("What is the capital of France?", 8, "native")
    thread.join()
    expect(page.locator("#recent .bar")).to_have_count(2, timeout=5_000)
    expect(page.locator("#recent .bar").first).to_contain_text("forced")
    page.screenshot(path=output / "recent-light.png", full_page=True)

    # By keyboard alone.
    page.locator("body").press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    detail = page.locator("#recent .bar:focus .detail")
    expect(detail).to_contain_text("bridged tokens")
    page.keyboard.press("ArrowUp")
    expect(page.locator("#recent .bar").first).to_be_focused()
    page.keyboard.press("p")
    expect(page.locator("#pause")).to_have_attribute("aria-pressed", "true")
    page.keyboard.press("p")
    page.select_option("#filter", "native")
    expect(page.locator("#recent .bar")).to_have_count(1)
    page.select_option("#filter", "")

    # In the dark.
    light = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    brightness = lambda color: sum(int(part) for part in color[color.index("(") + 1:-1].split(",")[:3])
    assert brightness(dark) < 150 < 600 < brightness(light), (light, dark)
    page.screenshot(path=output / "recent-dark.png", full_page=True)

    # After a lost connection.
    assert not errors, errors
    proxy.cut()
    expect(page.locator("#link")).to_contain_text("connection lost", timeout=10_000)
    proxy.mend()
    expect(page.locator("#link")).to_have_text("live", timeout=20_000)
    expect(page.locator("#recent .bar")).to_have_count(2)

    origin = f"127.0.0.1:{proxy.port}"
    assert all(origin in url or url.startswith("data:") for url in requests), requests
    browser.close()
print(f"live page: stages {seen}, {len(reads)} positions of the bar, screenshots in {output.name}")
