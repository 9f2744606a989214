"""The HTML page: complete, self-contained, small enough, and fit to be read by eye, pointer and keyboard."""

from html.parser import HTMLParser
from pathlib import Path

import browser
import made_up
import pytest

from draftconf.conformance.report.changes import changes
from draftconf.conformance.report.html.charts import BINS, bin_of
from draftconf.conformance.report.html.page import LIMIT, html
from draftconf.conformance.report.html.pipeline import flow
from draftconf.conformance.report.html.placing import place
from draftconf.conformance.report.html.ratios import shade

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Checker(HTMLParser):
    """Balanced tags, unique ids, no link into nowhere, nothing fetched."""

    def __init__(self, page: str):
        super().__init__()
        self.open, self.ids, self.links, self.texts = [], [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, name, attributes):
        if name not in VOID:
            self.open.append(name)
        for key, value in attributes:
            if key == "id":
                self.ids.append(value)
            if key in ("src", "href"):
                assert value.startswith(("#", "data:")), value
            if key == "href" and value.startswith("#"):
                self.links.append(value[1:])

    def handle_endtag(self, name):
        assert self.open.pop() == name

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture(scope="module")
def page() -> str:
    return html(made_up.everything())


def test_page_is_well_formed_and_fetches_nothing(page):
    checker = Checker(page)
    assert len(set(checker.ids)) == len(checker.ids)
    for word in ("http://", "@import", "url(", "fetch(", "XMLHttpRequest"):
        assert word not in page


def test_links_lead_somewhere_where_the_stage_was_walked(page):
    checker = Checker(page)
    dangling = {link for link in checker.links if link not in checker.ids}
    assert all(link.startswith("row-") for link in dangling)  # boxes of stages that were not recorded
    assert "row-float32-mtp-attention" in checker.ids


def test_names_and_messages_cannot_inject_markup(page):
    assert "<script>alert" not in page
    assert "made &lt;b&gt;up&lt;/b&gt; &amp; Co" in page


def test_every_number_of_the_worst_element_is_there_in_hexadecimal(page):
    for value in (0.1, -0.2, 0.3, 1e-3):
        assert value.hex() in page


def test_statuses_are_counted_and_no_rate_is_given(page):
    words = "".join(Checker(page).texts).partition("About this run")[0]
    for status in ("passed", "failed", "undecided", "not offered", "errors", "lost"):
        assert status in words
    assert "%" not in words.rpartition("}")[2]


def test_first_divergence_is_marked_in_the_drawing(page):
    assert page.count('class="flag"') == 2  # once in the drawing, once in the list for narrow screens
    assert "first fault, step 3" in page


def test_undecided_width_and_growth_are_shown(page):
    assert "undecided, 3 wide" in page
    assert "above its bound at step 3, 4, 5, 6, 7" in page


def test_same_results_give_the_same_page(page):
    assert html(made_up.everything()) == page


@pytest.mark.parametrize("count", [0, 1, 6000])
def test_page_stays_small(count):
    page = html(made_up.many(count))
    assert len(page.encode()) < LIMIT
    Checker(page)


def test_changes_are_shown():
    old = made_up.build([(made_up.entry("attention"), made_up.PASS), (made_up.entry("embed"), made_up.PASS)])
    new = made_up.build([(made_up.entry("attention"), made_up.FAIL)])
    page = html(new, changes(old, new))
    assert "Newly failing" in page
    assert "Checks removed" in page
    assert "Nothing has changed" in html(new, changes(new, new))


@pytest.mark.parametrize("layout", ["mtp", "eagle3"])
def test_boxes_stand_in_data_order_and_overlap_nowhere(layout):
    names, edges, onward = flow({}, layout)
    x, layer, _ = place(names, edges)
    assert all(layer[a] < layer[b] for a, b in edges)
    assert ("layer_output", "draft_input.hnorm") in onward
    for a in names:
        assert all(abs(x[a] - x[b]) > 0.999 for b in names if b != a and layer[a] == layer[b])


def test_ratio_classes_and_bins_cover_everything():
    assert [shade(r) for r in (None, 0, 0.05, 1, 1.001, 1e9, "nan", "inf")] == [
        "rn", "r0", "r1", "r3", "r4", "r6", "r6", "r6",
    ]  # fmt: skip
    assert [bin_of(v) for v in (0.0, 1e-9, 1.0, 1.01, 99.0, float("inf"), float("nan"))] == [
        0, 1, 16, 17, BINS, BINS + 1, BINS + 1,
    ]  # fmt: skip


# -- in a browser ------------------------------------------------------------------------------------------------------

needs_browser = pytest.mark.skipif(browser.executable() is None, reason="no Chromium on this machine")


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with browser.Browser(tmp_path_factory.mktemp("profile")) as one:
        yield one


@pytest.fixture(scope="module")
def file(tmp_path_factory, page) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


@needs_browser
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_page_fits_both_widths_and_themes(chromium, file, tmp_path, width, theme):
    chromium.open(file, width, theme)
    chromium.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").read_bytes()[:4] == b"\x89PNG"
    assert chromium.messages == []
    assert chromium.evaluate("document.documentElement.scrollWidth") <= width
    shown = "getComputedStyle(document.querySelector('{}')).display"
    assert (chromium.evaluate(shown.format(".stack")) == "none") == (width > 760)
    ground = chromium.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) > 384) == (theme == "light")
    assert least_contrast(chromium) >= 4.5


def least_contrast(chromium) -> float:
    """Of the text that is read most against what lies behind it (WCAG 2)."""
    return chromium.evaluate("""(() => {
      const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
      const rgb = (colour) => {
        canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data];
      };
      const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
        .map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
      const behind = (at) => {
        for (; at; at = at.parentElement) {
          const colour = rgb(getComputedStyle(at).backgroundColor);
          if (colour[3] === 255) return colour;
        }
        return [255, 255, 255];
      };
      const read = [...document.querySelectorAll("h1, h2, p, summary, small, th, td, dt, dd, a, button, figcaption")];
      return Math.min(...read.filter((at) => at.offsetParent && at.textContent.trim()).map((at) => {
        const pair = [light(rgb(getComputedStyle(at).color)), light(behind(at))].sort((a, b) => a - b);
        return (pair[1] + 0.05) / (pair[0] + 0.05);
      }));
    })()""")


@needs_browser
def test_everything_that_reacts_is_reachable_by_keyboard(chromium, file):
    chromium.open(file, 1280, "light")
    wanted = chromium.evaluate("""[...document.querySelectorAll("a[href], button, summary, .scroll")]
        .filter((at) => (at.checkVisibility ? at.checkVisibility() : true) && at.tabIndex >= 0).length""")
    seen = set()
    for _ in range(wanted + 40):
        chromium.press("Tab", 9)
        seen.add(
            chromium.evaluate("""(() => {
            const all = [...document.querySelectorAll("a[href], button, summary, .scroll")];
            return all.indexOf(document.activeElement);
        })()""")
        )
    assert len(seen - {-1}) == wanted


@needs_browser
def test_theme_tabs_and_boxes_work_by_keyboard(chromium, file):
    chromium.open(file, 1280, "light")
    theme = "document.documentElement.dataset.theme"
    chromium.evaluate("document.getElementById('theme').focus()")
    for wanted in ("light", "dark", None):
        chromium.press("Enter", 13)
        assert chromium.evaluate(f"{theme} || null") == wanted
    chromium.evaluate("document.querySelector('[role=tab][aria-selected=true]').focus()")
    before = chromium.evaluate("document.querySelector('[role=tabpanel]:not([hidden])').id")
    chromium.press("ArrowRight", 39)
    after = chromium.evaluate("document.querySelector('[role=tabpanel]:not([hidden])').id")
    assert before != after
    chromium.open(file, 1280, "light", fragment="#row-float32-mtp-attention")
    assert chromium.evaluate("document.getElementById('row-float32-mtp-attention').closest('details').open")
    assert chromium.messages == []


@needs_browser
def test_findings_open_down_to_their_numbers(chromium, file):
    chromium.open(file, 1280, "light")
    chromium.evaluate("document.querySelectorAll('details').forEach((at) => { at.open = false; })")
    chromium.evaluate("document.querySelector('.group > summary').focus()")
    chromium.press("Enter", 13)
    chromium.evaluate("document.querySelector('.group .finding > summary').focus()")
    chromium.press("Enter", 13)
    told = chromium.evaluate("document.querySelector('.finding[open]').innerText")
    assert (0.1).hex() in told
    assert "float32 0x3dcccccd" in told
    assert "--adapter 'my file.py:adapter'" in told
    assert (1.5).hex() not in told
    chromium.evaluate("document.querySelector('.finding[open] .operands > summary').focus()")
    chromium.press("Enter", 13)
    told = chromium.evaluate("document.querySelector('.finding[open] .operands').innerText")
    for part in ("3/attn_gate, the 2 decisive of 80 entries", "[0, 4, 7]", (1.5).hex(), "tokens <i>", "17"):
        assert part in told
