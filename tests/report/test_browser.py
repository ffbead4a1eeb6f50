"""Pages in a real browser without a window: at the widths of a phone, a tablet and a desk nothing is cut and no label overlaps.

Skipped without Playwright or a browser (``pip install playwright``; Chromium of the system).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import scenarios
from test_comparison import comparison

import bpfed
from bpfed.comparison.page import write as write_comparison
from bpfed.methods import FedAvg
from bpfed.report import index

BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed (pip install playwright).")
if BROWSER is None:
    pytest.skip("There is no Chromium or Chrome to look at pages with.", allow_module_level=True)

FLAGS = (
    "--no-sandbox",
    "--headless",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WIDTHS = (390, 768, 1280)
NAMES = ("Krankenhaus der Barmherzigen Schwestern", "North-Eastern-District-General", "c", "d", "e")

#: Everything that is wrong with the page that is open, as sentences.
LOOK = """
() => {
  const width = innerWidth, found = [];
  const page = document.documentElement.scrollWidth;
  if (page > width) found.push(`the page is ${page} px wide`);
  const scrolls = one => one.closest(".scroll, .fits, pre");
  for (const one of document.querySelectorAll("body *")) {
    const box = one.getBoundingClientRect();
    if (box.width && !scrolls(one) && (box.right > width + 1 || box.left < -1))
      found.push(`<${one.tagName} class="${one.getAttribute("class")}"> ends at ${box.right}: ${one.textContent.slice(0, 40)}`);
  }
  for (const one of document.querySelectorAll(".tile, .tile *, .verdicts li, .verdicts li *, .card *, figcaption, h1, h2, h3"))
    if (one.scrollWidth > one.clientWidth + 1 && one.clientWidth)
      found.push(`text is cut in <${one.tagName}>: ${one.textContent.slice(0, 40)}`);
  for (const drawing of document.querySelectorAll("svg.plot")) {
    if (!drawing.getBoundingClientRect().width) continue;
    const words = [...drawing.querySelectorAll("text")].map(one => [one.getBoundingClientRect(), one.textContent]);
    words.forEach(([a, one], i) => words.slice(i + 1).forEach(([b, two]) => {
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (across > 2 && down > 4) found.push(`labels overlap: ${one} and ${two}`);
    }));
  }
  return found;
}
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, untraced: None) -> dict[str, Path]:
    """A report of each kind of run, a comparison, and the index of all."""
    place = tmp_path_factory.mktemp("runs")
    kinds: dict[str, Any] = {
        "binary": scenarios.classification(sizes=(30, 20, 25, 20, 22), classes=2, test=25, names=NAMES),
        "classes": scenarios.classification(sizes=(30, 20, 25, 20, 22), test=25, names=NAMES),
        "regression": scenarios.regression(sizes=(20, 30), test=20),
        "survival": scenarios.survival(sizes=(20, 30), test=20),
        "images": scenarios.images(),
    }
    asked = {"rounds": 2, "epochs": 1, "device": "cpu", "progress": False, "say": lambda sentence: None}
    found = {}
    for name, data in kinds.items():
        held = {"calibration": 0.3} if name != "images" else {}
        bpfed.fit(FedAvg(), data, out=place / name, **asked, **held)
        found[name] = place / name / "report.html"
    found["comparison"] = write_comparison(comparison(6, 2), place / "comparison.html")
    found["index"] = index.write(place, place / "index.html")
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as started:
        made = started.chromium.launch(executable_path=BROWSER, args=list(FLAGS))
        yield made
        made.close()


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_cut_and_no_label_overlaps(pages: dict[str, Path], browser: Any, width: int) -> None:
    wrong: list[str] = []
    tab = browser.new_page(viewport={"width": width, "height": 900})
    tab.on("console", lambda message: wrong.append(f"console: {message.text}"))
    tab.on("request", lambda asked: wrong.append(asked.url) if not asked.url.startswith("file:") else None)
    for name, path in pages.items():
        tab.goto(path.as_uri())
        wrong += [f"{name}: {sentence}" for sentence in tab.evaluate(LOOK)]
    tab.close()
    assert wrong == []


def test_a_field_picks_clients_by_name(pages: dict[str, Path], browser: Any, tmp_path: Path) -> None:
    from pages import record

    from bpfed.report import write

    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    tab.goto(write(record(9), tmp_path / "report.html").as_uri())
    tab.fill("label.filter input", "site-3")
    assert (
        tab.evaluate(
            "[...document.querySelectorAll('.verdicts li, table.sortable tbody tr')].filter(one => !one.hidden).map(one => one.dataset.name)"
        )
        == ["site-3"] * 2
    )
    tab.close()
