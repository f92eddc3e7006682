"""The viewer in a real browser: what a person does, with mouse and keys, in light and dark, wide and narrow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import trajstore
from tests.support.browser import Browser, chromium
from tests.support.servers.process import NotInstalledError
from tests.support.viewed import HOSTILE, SCHEMA, episode, fill, metadata
from trajstore.viewer import Viewer, export_page

ROWS = ".episodes tbody tr"
CONTRAST = """
const light = (c) => { c /= 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
const luminance = (rgb) => 0.2126 * light(rgb[0]) + 0.7152 * light(rgb[1]) + 0.0722 * light(rgb[2]);
const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
const behind = (e) => {
  for (; e; e = e.parentElement) {
    const rgb = numbers(getComputedStyle(e).backgroundColor);
    if (rgb.length < 4 || rgb[3] === 1) return rgb;
  }
  return [255, 255, 255];
};
return [...document.querySelectorAll("main *, header *")]
  .filter((e) => e.checkVisibility() && [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))
  .filter((e) => !e.closest(":disabled, .off, .sr, select"))
  .map((e) => {
    const [a, b] = [luminance(numbers(getComputedStyle(e).color)), luminance(behind(e))];
    return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), e.className, e.textContent.slice(0, 40)];
  })
  .filter(([ratio]) => ratio < 4.5);
"""

GRAPHICS = (
    CONTRAST.partition("const behind")[0]
    + """
const rgb = (name) => viewer.colour(name).match(/[0-9a-f]{2}/gi).map((digits) => parseInt(digits, 16));
const surface = luminance(rgb("surface"));
const lines = [0, 1, 2, 3, 4, 5].map((i) => `line${i}`);
const ends = ["terminated", "truncated", "cut", "aborted", "open"].map((end) => `end-${end}`);
return ["bar", "edge", "cursor", "accent", ...lines, ...ends].filter((name) => {
  const own = luminance(rgb(name));
  return (Math.max(own, surface) + 0.05) / (Math.min(own, surface) + 0.05) < 3;
});
"""
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    try:
        with chromium() as browser:
            yield browser
    except NotInstalledError as error:
        pytest.skip(f"no browser: {error}")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> trajstore.Store:
    return fill(str(tmp_path_factory.mktemp("viewed") / "walker"), 60)


@pytest.fixture(scope="module")
def viewer(store: trajstore.Store) -> Iterator[Viewer]:
    with Viewer(store) as viewer:
        yield viewer


@pytest.fixture(autouse=True)
def _wide(browser: Browser) -> Iterator[None]:
    browser.shape(1280)
    browser.leave()
    browser.complaints()
    browser.requested()
    yield
    assert browser.complaints() == []


def test_from_the_overview_to_a_step_of_an_episode(browser: Browser, viewer: Viewer) -> None:
    browser.open(viewer.url)
    browser.wait("document.querySelectorAll('.tile').length === 6")
    assert browser.text(".tile dd") == "60"
    browser.wait("document.querySelectorAll('.node').length === 4")
    browser.wait("document.querySelector('.chart canvas').height > 0")
    assert "Overview · walker" in browser.driver.title

    browser.click("header nav a:nth-child(2)")
    browser.wait(f"document.querySelectorAll('{ROWS}').length === 50")
    browser.click("button[data-column=return]")
    browser.wait("document.querySelector('th[aria-sort=descending]')")
    best = max(range(60), key=lambda i: i * (20 + i % 10))
    browser.wait(f"document.querySelector('{ROWS}').innerText.includes('{best * (20 + best % 10):,}')")

    browser.press("/")  # the filter has the focus now
    browser.press("length == 25 and end == terminated", "ENTER")
    browser.wait("document.querySelector('.found')?.innerText === '4 of 60 episodes'")
    browser.press("ESCAPE")
    browser.run("document.activeElement.blur()")
    browser.press("ARROW_DOWN", "ARROW_DOWN", "ENTER")

    browser.wait("document.querySelector('.frame')?.dataset.step === '0'")
    browser.press("ARROW_RIGHT", "ARROW_RIGHT", "ARROW_RIGHT", "ARROW_LEFT")
    browser.wait("document.querySelector('.frame').dataset.step === '2'")
    assert browser.run("return document.querySelector('.scrubber').value") == "2"
    assert (
        browser.run("return document.querySelector('.scrubber').getAttribute('aria-valuetext')") == "step 2 of 25"
    )
    browser.press("END")
    browser.wait("document.querySelector('.frame').dataset.step === '25'")
    red = """
      const image = document.querySelector(".frame");
      const canvas = document.createElement("canvas");
      canvas.getContext("2d").drawImage(image, 0, 0);
      return image.complete && canvas.getContext("2d").getImageData(1, 1, 1, 1).data[0];
    """
    assert browser.run(red) == 25  # the frame of that step, not another
    browser.wait("document.querySelectorAll('.field-chart canvas').length === 5")
    browser.press("n")
    browser.wait("document.querySelector('h1').innerText.startsWith('Episode')")
    origin = viewer.url.partition("/?")[0]
    assert all(url.startswith((origin, "data:", "blob:", "about:")) for url in browser.requested())


def test_an_unknown_address_leads_to_the_overview(browser: Browser, viewer: Viewer) -> None:
    browser.open(f"{viewer.url}#/constructor")
    browser.wait("location.hash === '#/overview' && document.querySelectorAll('.tile').length === 6")


def test_charts_zoom_and_play(browser: Browser, viewer: Viewer) -> None:
    browser.open(f"{viewer.url}#/episodes?sort=-length")
    browser.click(f"{ROWS} a")
    browser.wait("document.querySelectorAll('.field-chart canvas').length >= 3")
    browser.press("PAGE_DOWN", "HOME", "+")
    browser.wait("!document.querySelector('.chart-tools button').hidden")
    browser.run("document.querySelector('.overlay-choice select').value = 'priority'")
    browser.run("document.querySelector('.overlay-choice select').dispatchEvent(new Event('change'))")
    drawn = "document.querySelector('.field-chart canvas').toDataURL()"
    before = browser.run(f"return {drawn}")
    browser.press("+")
    browser.wait(f"{drawn} !== {before!r}")
    browser.press("ESCAPE")
    browser.wait("document.querySelector('.chart-tools button').hidden")
    browser.press(" ")
    browser.wait("document.querySelector('.scrubber').value === '29'")
    browser.wait("document.querySelector('.play').innerText === '▶'")
    browser.run("document.querySelector('.values summary').click()")
    browser.wait("document.querySelector('.values').innerText.includes('observation/state')")


def test_the_page_follows_a_run(browser: Browser, tmp_path: Path) -> None:
    store = trajstore.create(tmp_path / "run", SCHEMA, fsync=False)
    with Viewer(trajstore.open(store.url)) as viewer, store.writer(commit_seconds=None) as writer:
        viewer.view.refresh_s = 0
        browser.open(f"{viewer.url}#/episodes")
        browser.wait("document.body.innerText.includes('No episodes yet')")
        writer.append_episode(episode(1, 20), terminated=True, metadata=metadata(1))
        writer.commit()
        browser.wait(f"document.querySelectorAll('{ROWS} a').length === 1")
        assert browser.text(".chip") == "writing"
        browser.click(f"{ROWS} a")
        browser.wait("document.querySelector('.frame')?.dataset.step === '0'")
    browser.wait("document.querySelector('#banner').innerText.includes('has stopped')")
    assert all("net::ERR_" in said for said in browser.complaints())


def test_text_of_a_store_stays_text(browser: Browser, viewer: Viewer) -> None:
    browser.open(f"{viewer.url}#/episodes?filter=task+contains+%22onerror%22")
    browser.wait(f"document.querySelectorAll('{ROWS} a').length === 1")
    assert HOSTILE[:50] in browser.text(ROWS)
    browser.click(f"{ROWS} a")
    browser.wait("document.querySelector('.metadata .tree')")
    assert HOSTILE in browser.text(".metadata")
    assert browser.run("return document.querySelectorAll('main img:not(.frame), main script').length") == 0


def test_a_damaged_field_leaves_the_others(browser: Browser, tmp_path: Path) -> None:
    with Viewer(fill(str(tmp_path / "store"), 8)) as viewer:
        for path in (tmp_path / "store" / "streams").glob("*/steps/reward/c*"):
            path.write_bytes(b"\0" + path.read_bytes()[1:-5] + b"damag")
        browser.open(f"{viewer.url}#/episodes")
        browser.click(f"{ROWS} a")
        browser.wait("document.querySelectorAll('.field-chart canvas').length >= 2")
        browser.wait("document.querySelector('.field-chart .problem.damaged')?.innerText.includes('reward')")
        browser.leave()
        assert all("422" in said for said in browser.complaints())


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_has_contrast(browser: Browser, viewer: Viewer, dark: bool) -> None:
    browser.shape(1280, dark=dark)
    browser.open(viewer.url)
    browser.wait("document.querySelectorAll('.node').length === 4 && document.querySelectorAll('.sizes li').length")
    background = browser.run("return getComputedStyle(document.documentElement).backgroundColor")
    assert (sum(map(int, background.strip("rgba()").split(",")[:3])) < 200) == dark
    assert browser.run(CONTRAST) == []
    assert browser.run(GRAPHICS) == []
    browser.run("location.hash = '#/episodes'")
    browser.wait(f"document.querySelectorAll('{ROWS}').length === 50")
    assert browser.run(CONTRAST) == []
    browser.click(f"{ROWS} a")
    browser.wait("document.querySelectorAll('.field-chart canvas').length >= 2")
    assert browser.run(CONTRAST) == []


def test_a_narrow_screen_needs_no_scrolling_sideways(browser: Browser, viewer: Viewer) -> None:
    browser.shape(360, 740, is_touch=True)
    fits = "return document.documentElement.scrollWidth <= innerWidth"
    browser.open(viewer.url)
    browser.wait("document.querySelectorAll('.sizes li').length === 5")
    assert browser.run(fits)
    assert browser.run("return document.querySelector('header').offsetHeight") < 60  # one line
    browser.run("location.hash = '#/episodes'")
    browser.wait(f"document.querySelectorAll('{ROWS}').length === 50")
    assert browser.run(fits)
    browser.run("document.querySelector('.episodes tbody a').click()")
    browser.wait("document.querySelector('.frame')?.dataset.step === '0'")
    assert browser.run(fits)
    tops = (
        "return ['.stage', '.charts', '.about'].map((s) => document.querySelector(s).getBoundingClientRect().top)"
    )
    assert sorted(browser.run(tops)) == browser.run(tops)


def test_the_focus_can_be_seen_and_everything_has_a_name(browser: Browser, viewer: Viewer) -> None:
    browser.open(f"{viewer.url}#/episodes")
    browser.wait(f"document.querySelectorAll('{ROWS}').length === 50")
    browser.press("TAB", "TAB", "TAB")
    assert browser.run("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
    browser.click(f"{ROWS} a")
    browser.wait("document.querySelectorAll('.field-chart canvas').length >= 2")
    nameless = """
      return [...document.querySelectorAll("button, a, input, select, canvas, img")].filter((e) =>
        e.checkVisibility() && !(e.innerText?.trim() || e.ariaLabel || e.alt || e.labels?.length)
      ).map((e) => e.outerHTML);
    """
    assert browser.run(nameless) == []
    browser.press("?")
    browser.wait("document.querySelector('dialog').open")


def test_an_exported_page_works_from_its_file(browser: Browser, store: trajstore.Store, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    export_page(store, page, episodes=[3, 10])
    browser.open(page.as_uri())
    browser.wait("document.querySelectorAll('.tile').length === 6")
    assert "60 of 60 episodes. 2 have series" in browser.text("footer")
    browser.click("header nav a:nth-child(2)")
    browser.wait(f"document.querySelectorAll('{ROWS}').length === 50")
    browser.press("/", "onerror", "ENTER")
    browser.wait(f"document.querySelectorAll('{ROWS} a').length === 1")
    browser.click(f"{ROWS} a")
    browser.wait("document.querySelector('.frame')?.dataset.step === '0'")
    browser.wait("document.querySelectorAll('.field-chart canvas').length >= 3")
    browser.press("END")
    browser.wait("document.querySelector('.scrubber').value === '23'")
    browser.press("n")
    browser.wait("document.querySelector('.problem')?.innerText.includes('some episodes only')")
    assert all(url.startswith(("file:", "data:", "about:")) for url in browser.requested())
