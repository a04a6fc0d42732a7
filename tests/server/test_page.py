"""The status page in a real browser, over a scripted engine. Skipped where there is no Chromium with its driver."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from mlxcel_paged.server.config import ServerConfig

from .running_server import RunningServer, wait_until
from .scripted_engine import ScriptedEngine

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="no chromium with chromedriver (Debian: chromium chromium-driver)"
)
ASSETS = {asset.name: asset.read_text() for asset in (files("mlxcel_paged.server.status") / "assets").iterdir()}


class Page:
    """The page of one server, as a visitor sees it."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, server: RunningServer) -> Page:
        self.driver.get(f"http://{server.host}:{server.port}/")
        return self

    def text(self, element_id: str) -> str:
        return str(self.driver.execute_script("return document.getElementById(arguments[0]).innerText", element_id))

    def is_shown(self, element_id: str) -> bool:
        return self.driver.find_element("id", element_id).is_displayed()

    def wait_for(self, element_id: str, pattern: str) -> str:
        def matches() -> bool:
            return re.search(pattern, self.text(element_id)) is not None

        try:
            wait_until(matches, f"#{element_id} shows {pattern!r}", timeout_s=30)
        except AssertionError as error:
            raise AssertionError(f"{error}; it shows {self.text(element_id)!r}") from None
        return self.text(element_id)

    def fill(self, element_id: str, value: str) -> None:
        element = self.driver.find_element("id", element_id)
        element.clear()
        element.send_keys(value)

    def choose_plain_text(self) -> None:
        self.driver.find_element("css selector", "#mode option[value=completion]").click()

    def click(self, element_id: str) -> None:
        wait_until(self.driver.find_element("id", element_id).is_enabled, f"#{element_id} can be clicked", timeout_s=30)
        self.driver.find_element("id", element_id).click()

    def complaints(self) -> list[str]:
        """What the browser logged: script errors, and loads that the policy or the server refused."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    """Chromium protects itself as any user but root, so root lets another one run it."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        switches = ("headless=new", "disable-gpu", "disable-dev-shm-usage", "window-size=1280,1000")
        for switch in (*switches, "no-proxy-server", f"user-data-dir={profile}"):
            options.add_argument(f"--{switch}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        other_user: dict[str, Any] = {}
        if os.geteuid() == 0:
            shutil.chown(profile, "nobody")
            other_user = {"user": "nobody", "extra_groups": []}
        service = Service(str(DRIVER), env={**os.environ, "HOME": profile}, popen_kw=other_user)
        driver = webdriver.Chrome(options=options, service=service)
        yield driver
        driver.quit()


@pytest.fixture
def page(browser: webdriver.Chrome, start: Callable[..., RunningServer]) -> Iterator[Page]:
    # It asks for `start` so that the page is left before the servers end and their leak check runs.
    browser.get_log("browser")
    yield Page(browser)
    browser.get("about:blank")


def test_policy_allows_nothing_from_elsewhere(server: RunningServer) -> None:
    response = server.client.get("/")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().partition(" ")[::2] for part in response.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "img-src", "connect-src")} == {"'self'"}
    assert {policy[name] for name in ("base-uri", "form-action", "frame-ancestors")} == {"'none'"}
    assert policy["require-trusted-types-for"] == "'script'"
    assert response.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", sorted(ASSETS))
def test_assets_are_served_and_name_no_other_host(name: str, server: RunningServer) -> None:
    response = server.client.get("/" if name == "index.html" else f"/assets/{name}")
    assert response.text == ASSETS[name]
    assert "content-security-policy" in response.headers
    hosts = set(re.findall(r"https?://[^\s\"'`]+", ASSETS[name]))
    assert hosts <= {"http://www.w3.org/2000/svg"}  # the name of a language, never loaded
    assert len(ASSETS[name].splitlines()) < 400


def test_page_has_nothing_inline() -> None:
    html = ASSETS["index.html"]
    assert re.findall(r"<script(?![^>]*\ssrc=)", html) == []
    assert re.findall(r"<style|\sstyle=|\son\w+=|javascript:", html) == []
    scripts = "".join(text for name, text in ASSETS.items() if name.endswith(".js"))
    assert re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", scripts) == []


@pytest.mark.parametrize(
    "path", ["/assets/", "/assets/../endpoint.py", "/assets/%2e%2e/page.py", "/assets/endpoint.py"]
)
def test_no_other_file_is_served(path: str, server: RunningServer) -> None:
    with server.send_raw(path, b"", method="GET", headers="Connection: close\r\n") as connection:
        assert connection.recv(4096).startswith(b"HTTP/1.1 404 ")


@needs_browser
def test_live_numbers(page: Page, start: Callable[..., RunningServer]) -> None:
    server = start(parallel=2)
    page.open(server).wait_for("state", "ready")
    assert page.text("model") == "scripted/echo"
    assert "paged storage · up to 2 at a time · 512 tokens of context" in page.text("facts")
    page.wait_for("batch", r"0\s*running\s*0\s*waiting")
    page.wait_for("paths", "Nothing has been decoded yet")
    server.engine.step_s = 0.05
    server.engine.hold()
    connections = [server.send_raw("/v1/completions", b'{"prompt": "abc", "max_tokens": 60}') for _ in range(5)]
    page.wait_for("batch", r"0\s*running\s*5\s*waiting")
    server.engine.go_on()
    page.wait_for("batch", r"2\s*running\s*\d\s*waiting")
    page.wait_for("pages", r"used\s+[1-9]\d*\s")
    page.wait_for("throughput", r"[1-9][\d.]*\s*generated")
    page.wait_for("itl", r"\d ms\s*median\s*[\d.]+ (ms|s)\s*p99")
    page.wait_for("totals", "5 length")
    server.engine.decode_launches["gather:kill_switch"] = server.engine.decode_launches["fused"]
    page.wait_for("paths", r"50 %\s*of all launches were fused[\s\S]*gather:kill_switch\s+\d+\s+50 %")
    label = page.driver.find_element("css selector", "#batch svg").get_attribute("aria-label")
    assert label.startswith("Last 2 minutes; now: running ")
    assert page.complaints() == []
    for connection in connections:
        connection.close()


@needs_browser
def test_prompt_is_streamed_and_shown_as_text(page: Page, start: Callable[..., RunningServer]) -> None:
    server = start()
    page.open(server)
    page.choose_plain_text()
    # The scripted engine answers with the prompt's own tokens.
    prompt = "<img src=x onerror=alert(1)><b>& ünïcödé 🦉</b>"
    page.driver.execute_script("document.getElementById('prompt').value = arguments[0]", prompt)
    page.fill("max-tokens", str(len(prompt.encode())))
    page.click("send")
    outcome = page.wait_for("outcome", "tokens/s")
    num_tokens = len(prompt.encode())
    assert f"{num_tokens} + {num_tokens} tokens" in outcome
    assert page.text("answer") == prompt
    assert page.driver.find_elements("css selector", "#answer *") == []
    assert page.complaints() == []


@needs_browser
def test_chat_is_the_default(page: Page, start: Callable[..., RunningServer]) -> None:
    server = start()
    page.open(server)
    page.fill("prompt", "hello there")
    page.fill("temperature", "0.5")
    page.click("send")
    page.wait_for("outcome", "tokens")
    (request,) = server.engine.last_requests
    assert "<|turn|>user\nhello there" in server.engine.tokenizer.decode(request.prompt_token_ids)
    assert (request.sampling.temperature, request.sampling.max_tokens) == (0.5, 128)


@needs_browser
def test_stop_ends_the_request(page: Page, start: Callable[..., RunningServer]) -> None:
    server = start(step_s=0.1)
    page.open(server)
    page.choose_plain_text()
    page.fill("max-tokens", "400")
    page.click("send")
    page.wait_for("answer", r"\w{3}")
    assert not page.driver.find_element("id", "send").is_enabled()
    page.click("stop")
    page.wait_for("outcome", "stopped")
    server.wait_idle()
    assert server.engine.num_aborts == 1
    assert page.driver.find_element("id", "send").is_enabled()


@needs_browser
def test_errors_are_told_and_the_box_goes_on(page: Page, start: Callable[..., RunningServer]) -> None:
    server = start(step_s=0.05)
    page.open(server)
    page.choose_plain_text()
    page.fill("prompt", "x" * 600)
    page.click("send")
    page.wait_for("outcome", "512 tokens")
    page.fill("prompt", "abc")
    page.click("send")
    page.wait_for("answer", "abc")
    server.engine.fail_next_step(RuntimeError("a secret of the machine"))
    assert "secret" not in page.wait_for("outcome", "the engine failed while it ran this request")
    page.fill("max-tokens", "3")
    page.click("send")
    page.wait_for("outcome", r"3 \+ 3 tokens")


@needs_browser
def test_states_of_the_engine(page: Page, start: Callable[..., RunningServer]) -> None:
    server = start(state="loading")
    page.open(server).wait_for("state", "loading")
    assert page.text("model") == "The model is loading"
    assert page.text("message") == "the model is still loading"
    assert not page.driver.find_element("id", "send").is_enabled()
    server.engine.state = "ready"
    page.wait_for("state", "ready")
    assert not page.is_shown("message")
    assert page.driver.find_element("id", "send").is_enabled()
    server.engine.die(RuntimeError("a secret of the machine"))
    page.wait_for("state", "failed")
    assert "the engine has failed" in page.text("message")
    assert not page.driver.find_element("id", "send").is_enabled()


@needs_browser
def test_key_is_asked_for_and_used(page: Page, start: Callable[..., RunningServer]) -> None:
    server = start(config=ServerConfig(api_keys=("sesame",)))
    page.open(server).wait_for("state", "locked")
    assert page.text("key-form").startswith("This server asks for an API key")
    time.sleep(1.5)
    # Once, not every second: refusals are counted, and a page that is left open should not count.
    assert server.service.metrics.exposition().count(b'reason="missing_api_key"} 1.0') == 1
    page.fill("key", "wrong")
    page.driver.find_element("css selector", "#key-form button").click()
    page.wait_for("key-form", "does not know that API key")
    page.fill("key", "sesame")
    page.driver.find_element("css selector", "#key-form button").click()
    page.wait_for("state", "ready")
    assert not page.is_shown("key-form")
    page.choose_plain_text()
    page.fill("prompt", "abc")
    page.fill("max-tokens", "3")
    page.click("send")
    page.wait_for("outcome", r"3 \+ 3 tokens")
    assert page.driver.execute_script("return [localStorage.length, sessionStorage.length]") == [0, 0]


@needs_browser
def test_server_that_is_gone_and_back(page: Page, start: Callable[..., RunningServer]) -> None:
    first = start()
    first.complete(prompt="abc", max_tokens=3)
    page.open(first).wait_for("totals", "1 length")
    first.close()
    page.wait_for("state", "unreachable")
    assert page.text("model") == "scripted/echo"  # what was known stays
    second = RunningServer(ScriptedEngine(), port=first.port)
    try:
        page.wait_for("state", "ready")
        page.wait_for("totals", r"Requests finished\s+0")
        page.driver.get("about:blank")
    finally:
        second.close()
        second.engine.stop()


@needs_browser
def test_dense_storage_has_no_pages(page: Page, start: Callable[..., RunningServer]) -> None:
    server = start(max_pool_tokens=0)
    server.engine.model.storage.storage = "dense"
    page.open(server).wait_for("pages", "Dense storage has no pages: scripted")
    assert "mlx-lm's own" in page.text("paths")


@needs_browser
def test_percentiles_are_interpolated_in_buckets(page: Page, start: Callable[..., RunningServer]) -> None:
    page.open(start())
    script = (
        "const done = arguments[arguments.length - 1];"
        "import('/assets/history.js').then(({ interpolate: i }) => done(["
        "i([1, 2, 4, null], [0, 10, 20, 20], 0.5), i([1, 2, 4, null], [0, 10, 20, 20], 0.75),"
        "i([1, 2, 4, null], [4, 4, 4, 4], 0.25), i([1, 2, 4, null], [0, 0, 0, 5], 0.5), i([1, null], [0, 0], 0.5)]))"
    )
    assert page.driver.execute_async_script(script) == [2, 3, 0.25, 4, None]


@needs_browser
@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_nothing_is_wider_than_the_window(width: int, page: Page, start: Callable[..., RunningServer]) -> None:
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 700}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        page.open(start()).wait_for("state", "ready")
        page.wait_for("totals", "Steps")
        widths: Any = page.driver.execute_script(
            "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        assert widths[0] <= widths[1]
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@needs_browser
def test_every_field_has_a_name(page: Page, start: Callable[..., RunningServer]) -> None:
    page.open(start()).wait_for("state", "ready")
    for element in page.driver.find_elements("css selector", "input, select, textarea, button"):
        labels = page.driver.execute_script("return [...arguments[0].labels].map((l) => l.textContent).join()", element)
        assert labels or element.text or element.get_attribute("type") == "submit", element.get_attribute("id")
    for element in page.driver.find_elements("css selector", "main svg"):
        assert element.get_attribute("aria-label")


@needs_browser
def test_hidden_page_does_not_poll(page: Page, start: Callable[..., RunningServer]) -> None:
    server = start()
    page.open(server).wait_for("state", "ready")
    hide = (
        "Object.defineProperty(document, 'hidden', { value: arguments[0], configurable: true });"
        "document.dispatchEvent(new Event('visibilitychange'));"
    )
    page.driver.execute_script(hide, True)
    time.sleep(0.5)  # for a look that is under way
    server.engine.state = "loading"
    time.sleep(2)
    assert page.text("state") == "ready"
    page.driver.execute_script(hide, False)
    page.wait_for("state", "loading")
    server.engine.state = "ready"
