"""A headless browser for the page: Debian's chromium and chromedriver, of which nothing is downloaded."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
MISSING = f"needs {CHROMIUM} and {DRIVER}: apt-get install chromium chromium-driver"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
needs_browser = pytest.mark.skipif(not (CHROMIUM.exists() and DRIVER.exists()), reason=MISSING)


@contextmanager
def browser(size: tuple[int, int] = (1400, 900)) -> Generator[Browser]:
    """While open, a browser with an empty profile of its own."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = str(CHROMIUM)
        for flag in (*FLAGS, f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
        try:
            yield Browser(driver)
        finally:
            driver.quit()


class Browser:
    """What the tests do to a page."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, page: Path) -> float:
        """Open a page and wait until its graph is drawn. Returns the seconds from navigation to then."""
        from selenium.webdriver.support.wait import WebDriverWait

        self.driver.get_log("performance")  # forget what was before
        self.driver.get(page.as_uri())
        drawn = "return document.documentElement.dataset.drawn"
        return float(WebDriverWait(self.driver, 60, 0.05).until(lambda d: d.execute_script(drawn))) / 1000

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of a piece of JavaScript."""
        return self.driver.execute_script(script, *arguments)

    def text(self, selector: str) -> str:
        """What a person reads in an element."""
        return str(self.run("return document.querySelector(arguments[0]).textContent", selector))

    def count(self, selector: str) -> int:
        """How many elements there are."""
        return int(self.run("return document.querySelectorAll(arguments[0]).length", selector))

    def click(self, selector: str) -> None:
        """A real click into the middle of what a selector finds."""
        self.driver.find_element("css selector", selector).click()

    def press(self, *keys: str) -> None:
        """Keys for what has the focus."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def choose(self, selector: str, value: str) -> None:
        """Choose an option of a list by its value."""
        self.driver.find_element("css selector", f"{selector} option[value='{value}']").click()

    def downloads(self, folder: Path) -> None:
        """Save into ``folder`` what pages hand out."""
        self.driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(folder)})

    def wait(self, condition: Callable[[], object]) -> None:
        """Wait until a condition holds, at most ten seconds."""
        from selenium.webdriver.support.wait import WebDriverWait

        WebDriverWait(self.driver, 10, 0.05).until(lambda _: condition())

    def search(self, words: str) -> None:
        """Search as a person does: slash, the words, Enter."""
        from selenium.webdriver.common.keys import Keys

        self.run("document.activeElement.blur()")
        self.driver.find_element("css selector", "body").send_keys("/")
        self.press(words, Keys.ENTER)

    def viewport(self, width: int, height: int) -> None:
        """Show pages in so many pixels, whatever the window's frame takes."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def whole_window(self) -> None:
        """Show pages in the window again."""
        self.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

    def colours(self, scheme: str) -> None:
        """Prefer light or dark colours."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def complaints(self) -> list[str]:
        """What the console says, violations of the Content-Security-Policy included."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """What was asked for since the page was opened."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = (e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent")
        return [url for url in sent if not url.startswith(("chrome:", "data:"))]
