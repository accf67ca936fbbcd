"""A headless Chromium for our pages: opened from disk, at any size, with its console log."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # root in a container needs it, and the pages are our own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
    "--no-first-run",
    "--force-color-profile=srgb",
)


@contextmanager
def chrome(width: int = 1280, height: int = 900, dark: bool = False) -> Iterator[Any]:
    """A selenium driver on a fresh headless Chromium with a viewport of `width` × `height` pixels.

    Without a browser the test is skipped; in CI it fails, so that the gap shows.
    """
    browser = next(filter(None, map(shutil.which, NAMES)), None)
    chromedriver = shutil.which("chromedriver")
    if browser is None or chromedriver is None:
        missing("a browser: install chromium and chromium-driver")
    try:
        from selenium import webdriver
    except ModuleNotFoundError:
        missing("the package selenium")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in (*FLAGS, f"--window-size={width},{height}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=chromedriver))
    try:
        view(driver, width, height)
        prefer(driver, dark=dark)
        yield driver
    finally:
        driver.quit()


def missing(what: str) -> None:
    """Skip the test because `what` is missing; fail in CI."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(f"this test needs {what}")


def opened(driver: Any, path: Path) -> None:
    """Open the file at `path`, and clear the console log."""
    driver.get_log("browser")
    driver.get(path.resolve().as_uri())


def view(driver: Any, width: int, height: int) -> None:
    """Set the viewport to exactly `width` × `height` CSS pixels, even as small as a phone's."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    settle(driver)


def prefer(driver: Any, *, dark: bool, still: bool = True) -> None:
    """Set the system preferences: dark or light colours, reduced motion."""
    features = [
        {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
        {"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"},
    ]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    settle(driver)


def settle(driver: Any) -> None:
    """Wait until the page has reacted to a change and redrawn itself."""
    driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")


def complaints(driver: Any) -> list[str]:
    """Warnings, errors and uncaught exceptions on the console since the page was opened."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] in ("WARNING", "SEVERE")]
