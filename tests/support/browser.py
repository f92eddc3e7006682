"""A real browser without a window: Debian's Chromium, driven through ChromeDriver."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.servers.process import NotInstalledError

# Without these, Chromium looks up hosts of its maker at every start.
_QUIET = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-sync",
)


class Browser:
    """What tests need of a browser.

    Attributes:
        driver: Selenium's driver.
    """

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def open(self, url: str) -> None:
        self.leave()  # so that an address that differs in its fragment is loaded again
        self.driver.get(url)

    def leave(self) -> None:
        """Close the page, which may still ask for something."""
        self.driver.get("about:blank")

    def wait(self, condition: str, seconds: float = 30) -> Any:
        """Wait until a JavaScript expression is true; returns its value. An error means that it is not yet."""
        from selenium.common.exceptions import TimeoutException
        from selenium.webdriver.support.ui import WebDriverWait

        try:
            return WebDriverWait(self.driver, seconds, 0.03).until(
                lambda _: self.run(f"try {{ return {condition}; }} catch {{ return null; }}")
            )
        except TimeoutException:
            text = self.run("return document.body.innerText")
            raise AssertionError(f"not true after {seconds} s: {condition}; the page says:\n{text}") from None

    def press(self, *keys: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains
        from selenium.webdriver.common.keys import Keys

        chain = ActionChains(self.driver, duration=0)
        for key in keys:
            chain.send_keys(getattr(Keys, key, key))
        chain.perform()

    def click(self, selector: str) -> None:
        self.wait(f"document.querySelector({json.dumps(selector)})")
        self.driver.find_element("css selector", selector).click()

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def texts(self, selector: str) -> list[str]:
        return list(
            self.run("return [...document.querySelectorAll(arguments[0])].map((e) => e.innerText)", selector)
        )

    def shape(self, width: int, height: int = 900, *, dark: bool = False, is_touch: bool = False) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": is_touch}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def complaints(self) -> list[str]:
        """What the console said since the last call that is no remark."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] != "INFO"]

    def requested(self) -> set[str]:
        """The addresses that pages asked for since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
        return {event["request"]["url"] for event in sent}


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser with an empty profile.

    Raises:
        NotInstalledError: Chromium, ChromeDriver or selenium are not installed.
    """
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    service = shutil.which("chromedriver")
    if browser is None or service is None:
        raise NotInstalledError("chromium and chromedriver (Debian's packages chromium and chromium-driver)")
    try:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service
    except ImportError:
        raise NotInstalledError("selenium") from None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = browser
        for flag in (*_QUIET, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(service))
        try:
            yield Browser(driver)
        finally:
            driver.quit()
