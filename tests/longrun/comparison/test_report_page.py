"""report.html as a reader meets it: whole, on its own, on a phone and on paper; opened where a browser is."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from megatron_ce_adaptor import cli

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
PHONE = 360  # CSS pixels, a small phone held upright
VOID = {"meta", "br", "wbr", "path", "line", "rect"}  # without an end tag in HTML, or closed in themselves
FETCHING = {"script", "link", "img", "iframe", "object", "embed", "base", "video", "audio", "image", "use"}


@pytest.fixture
def page(run_dir, maker, capsys):
    """The report of a run with everything in it: noise floor, notes, long names, a tool's wide table."""
    maker(factor=1.0005, norm_factor=1.02).write(run_dir, "noise_floor.log")
    table = "\n".join(["| " + "x" * 150 + " |"] * 4)
    variables = {"PYTORCH_A_VERY_LONG_NAME_OF_A_VARIABLE_THAT_WILL_NOT_BREAK": "y" * 300}
    (run_dir / "env.json").write_text(json.dumps({"npu-smi": table, "variables": variables}))
    assert cli.main(["compare", str(run_dir)]) == 0
    capsys.readouterr()
    return (run_dir / "report.html").read_text()


class Outline(HTMLParser):
    """Fails at a tag that closes what is not open; keeps the tags and attributes it met."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.attributes = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"


def test_it_is_whole_and_fetches_nothing(page):
    outline = Outline()
    outline.feed(page)
    outline.close()
    assert outline.open == [] and outline.tags.count("svg") == 6
    assert not FETCHING & set(outline.tags)
    assert not [
        a for a in outline.attributes if a[0] in ("src", "href", "srcset", "style") or a[0][:2] == "on"
    ]
    assert not re.search(r"https?:|url\(|@import", page)


def test_the_verdict_stands_before_everything(page):
    body = page[page.index("<main>") :]
    order = ["PASS", "loss MAPE"]
    for title in ("Gates", "Loss", "Relative error of the loss", "Gradient norm", "Step time", "Peak memory"):
        order.append(f"<h2>{title}")
    order += ["<h2>The runs", "<h2>Environment"]
    places = [body.index(text) for text in order]
    assert places == sorted(places)


def test_the_noise_floor_is_beside_both_errors(page):
    assert page.count('class="line floor"') == 2
    assert "perturbed by one ulp, mean 0.05&nbsp;%" in page and "noise floor, loss MAPE" in page


def test_memory_is_a_bar_for_each_rank_and_run(page):
    figure = page[page.index("<h2>Peak memory") :]
    bars = re.findall(r'<rect class="area (\w+)"', figure)
    assert bars == ["native"] * 4 + ["te"] * 4


def test_the_spread_of_step_times_is_told(page):
    row = re.search(r"95 % of steps within, ms</td><td[^>]*>([\d.]+)</td><td[^>]*>([\d.]+)", page)
    assert 180 < float(row[1]) < 190 and 170 < float(row[2]) < 180


def browser() -> str:
    for name in BROWSERS:
        if found := shutil.which(name):
            return found
    pytest.skip("no browser on this machine; the page was parsed instead")


def dump(tmp_path, page: str) -> str:
    """The page's DOM after a headless browser has run it."""
    (tmp_path / "page.html").write_text(page)
    command = [
        browser(),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path}/profile",
    ]
    command += ["--virtual-time-budget=2000", "--dump-dom", (tmp_path / "page.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if "</html>" not in done.stdout:
        pytest.skip(f"the browser does not start here: {done.stderr[-300:]}")
    return done.stdout


def test_a_browser_shows_it_on_a_phone_without_sideways_scrolling(page, tmp_path):
    """In a frame as wide as a phone, because a headless window may not be that narrow."""
    measure = """<script>onload = () => {
      const inner = document.getElementById("phone").contentDocument, root = inner.documentElement;
      const box = element => element.getBoundingClientRect(), mayScroll = "pre, svg, .wide table";
      const beyond = [...inner.querySelectorAll("main *")].filter(
        element => box(element).right > root.clientWidth + 1 && !element.closest(mayScroll));
      document.getElementById("result").textContent = JSON.stringify({
        width: root.clientWidth, scroll: root.scrollWidth,
        beyond: beyond.slice(0, 5).map(element => element.tagName + " " + element.textContent),
        verdict: box(inner.querySelector(".verdict .word")).bottom,
        drawn: [...inner.querySelectorAll("svg")].filter(chart => box(chart).height > 100).length});
    }</script>"""
    assert ">te.log<" in page  # in a cell that does not break
    page = page.replace(">te.log<", f">{'a_long_name_' * 8}.log<")
    frame = f'<iframe id="phone" width="{PHONE}" height="800" style="border:0" srcdoc="{html.escape(page)}">'
    outer = f'<!DOCTYPE html><html><body>{frame}</iframe><pre id="result"></pre>{measure}</body></html>'
    shown = dump(tmp_path, outer)
    result = json.loads(html.unescape(re.search(r'<pre id="result">(.*?)</pre>', shown, re.DOTALL)[1]))
    assert result["scroll"] <= result["width"] <= PHONE and result["beyond"] == [], result
    assert result["drawn"] == 6 and result["verdict"] < 300
