"""The page in headless Chromium: it draws, zooms, answers clicks, loads nothing, has no error.

Debian's packages chromium and chromium-driver, and the extra `docs`, are needed: where they are
absent these tests fail.
"""

import json
import shutil

import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

from moe_compile.report.page import page_of, write_page
from moe_compile.report.process_report import report_of
from moe_compile.schedule.timeline_data import unpacked
from tests.report.test_page import HOSTILE, one_launch
from tests.test_visible import LAYER, explained

pytestmark = pytest.mark.browser
LEAST_CONTRAST = 4.5
"""WCAG 2.2, 1.4.3, level AA."""
CONTRAST = """
const channels = text => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
const light = colour => channels(colour).map(c => c / 255)
  .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const contrast = (a, b) => {
  const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
  return (x + 0.05) / (y + 0.05);
};
const style = node => getComputedStyle(node);
const back = style(document.body).backgroundColor;
const behind = node => {
  for (let n = node; n; n = n.parentElement) {
    const colour = style(n).backgroundColor;
    if (!/^rgba\\(0, 0, 0, 0\\)|transparent/.test(colour)) return colour;
  }
  return back;
};
const found = [];
for (const label of document.querySelectorAll("rect.span + text")) {
  if (!/product|other|link|host/.test(label.getAttribute("class"))) continue;
  const bar = style(label.previousElementSibling);
  found.push([label.textContent, contrast(style(label).fill, bar.fill)]);
}
const texts = "h1, h2, h3, p, td, th, button, a, .dim, #text div, #text .place";
for (const node of document.querySelectorAll(texts))
  if (node.textContent.trim())
    found.push([node.textContent.slice(0, 40), contrast(style(node).color, behind(node))]);
return found;
"""
WHEEL = """
const wheel = {deltaY: -200, clientX: 600, ctrlKey: true, cancelable: true};
arguments[0].dispatchEvent(new WheelEvent("wheel", wheel));
"""
CUT = """
const outside = [];
for (const label of document.querySelectorAll("rect.span + text")) {
  if (!/product|other|link|host/.test(label.getAttribute("class"))) continue;
  const a = label.previousElementSibling.getBoundingClientRect();
  const b = label.getBoundingClientRect();
  if (b.left < a.left - 1 || b.right > a.right + 1) outside.push(label.textContent);
}
return outside;
"""


@pytest.fixture(scope="module")
def browser():
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    assert chromium and driver, "apt-get install chromium chromium-driver"
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1400,1000"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = webdriver.Chrome(options, webdriver.ChromeService(driver))
    yield found
    found.quit()


@pytest.fixture(scope="module")
def explanation(fake_ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("layer")
    return explained(LAYER, fake_ranks, folder, chunks=2, hardware="h100")


@pytest.fixture
def opened(browser, explanation, tmp_path):
    explanation.html(tmp_path / "page.html")
    browser.get_log("browser"), browser.get_log("performance")
    browser.get(f"file://{tmp_path}/page.html")
    yield browser
    said = [entry["message"] for entry in browser.get_log("browser")]
    assert said == []


def requests(browser):
    events = (json.loads(entry["message"])["message"] for entry in browser.get_log("performance"))
    return [
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    ]


def chart(browser, number=0):
    return browser.find_element(By.ID, f"chart-{number}")


def spans(figure, kind="span"):
    return figure.find_elements(By.CSS_SELECTOR, f"rect.span.{kind}")


def ticks(figure):
    return [e.text for e in figure.find_elements(By.CSS_SELECTOR, "text.tick")]


def press(figure, name):
    figure.find_element(By.CSS_SELECTOR, f"button[aria-label='{name}']").click()


def test_a_page_asks_for_nothing_but_itself(opened, tmp_path):
    asked = [url for url in requests(opened) if not url.startswith("data:")]
    assert asked == [f"file://{tmp_path}/page.html"]
    assert opened.execute_script("return performance.getEntriesByType('resource').length") == 0


def test_streams_before_and_after_are_drawn_with_their_names(opened):
    for number in (0, 1):
        figure = chart(opened, number)
        titles = [e.text for e in figure.find_elements(By.CSS_SELECTOR, "svg text.title")]
        assert [t.split(":")[0] for t in titles] == ["before", "after"]
        lanes = [e.text for e in figure.find_elements(By.CSS_SELECTOR, "svg > text")]
        assert all(lanes.count(name) == 2 for name in ("host", "compute", "link 0", "live bytes"))
        assert all(spans(figure, kind) for kind in ("product", "other", "link", "host"))
        assert len(figure.find_elements(By.CSS_SELECTOR, "polygon.memory")) == 2
    press(figure, "show the rewritten graph in its own order, too")
    assert len(figure.find_elements(By.CSS_SELECTOR, "svg text.title")) == 3


def test_labels_are_inside_their_bars_and_can_be_read_in_light_and_in_dark(opened):
    for _ in ("light", "dark"):
        for _ in range(4):
            assert opened.execute_script(CUT) == []
            found = opened.execute_script(CONTRAST)
            assert len(found) > 60
            assert [one for one in found if one[1] < LEAST_CONTRAST] == []
            press(chart(opened), "zoom in")
        press(chart(opened), "show all of it")
        opened.find_element(By.ID, "theme").click()


def test_a_chart_zooms_and_moves(opened):
    figure = chart(opened)
    whole = ticks(figure)
    svg = figure.find_element(By.TAG_NAME, "svg")
    widest = max(span.size["width"] for span in spans(figure))
    press(figure, "zoom in")
    near = ticks(figure)
    assert near != whole and max(span.size["width"] for span in spans(figure)) > widest
    press(figure, "later")
    assert ticks(figure) != near
    moved = ticks(figure)
    ActionChains(opened).drag_and_drop_by_offset(svg, 300, 0).perform()
    assert ticks(figure) != moved
    press(figure, "show all of it")
    assert ticks(figure) == whole
    svg.send_keys("+")
    assert ticks(figure) != whole
    svg.send_keys(Keys.ARROW_RIGHT, "0")
    assert ticks(figure) == whole
    opened.execute_script(WHEEL, svg)
    assert ticks(figure) != whole


def test_a_bar_tells_its_node_time_and_line(opened):
    figure = chart(opened)
    bar = max(spans(figure, "link"), key=lambda span: span.size["width"])
    ActionChains(opened).move_to_element(bar).perform()
    tip = opened.find_element(By.ID, "tip")
    assert tip.is_displayed() and "collective: " in tip.text and "visible.py:" in tip.text
    ActionChains(opened).move_to_element(bar).click().perform()
    chosen = figure.find_elements(By.CSS_SELECTOR, "rect.chosen")
    assert chosen and "all_to_all" in figure.find_element(By.CSS_SELECTOR, ".detail").text
    figure.find_element(By.XPATH, ".//button[text()='show in the graph']").click()
    (line,) = opened.find_elements(By.CSS_SELECTOR, "#text .chosen")
    assert "all_to_all_single" in line.text and "# visible.py:" in line.text
    memory = figure.find_elements(By.CSS_SELECTOR, "rect[data-memory]")[0]
    ActionChains(opened).move_to_element(memory).perform()
    assert "B at " in tip.text


def test_a_collective_in_the_table_shows_its_bar(opened):
    rows = opened.find_elements(By.CSS_SELECTOR, "#collectives tr.choice")
    assert len(rows) == 9
    rows[-1].click()
    assert chart(opened, 1).find_elements(By.CSS_SELECTOR, "rect.link.chosen")


def test_a_graph_is_shown_step_by_step(opened, explanation):
    texts = unpacked(explanation.report["graph_texts"])
    number = next(i for i, text in enumerate(texts) if text["graph"] == "dynamo")
    Select(opened.find_element(By.CSS_SELECTOR, "#graphs select")).select_by_value(str(number))
    (change,) = texts[number]["steps"]

    def lines(kind):
        return [e.text for e in opened.find_elements(By.CSS_SELECTOR, f"#text .{kind}")]

    added = [line for _, _, others in change["changes"] for line in others]
    assert [line.removeprefix("+ ") for line in lines("added")] == added
    assert len(lines("removed")) == sum(end - begin for begin, end, _ in change["changes"])
    assert lines("gap")
    opened.find_element(By.XPATH, "//button[text()='whole graph']").click()
    after = len(opened.find_elements(By.CSS_SELECTOR, "#text div"))
    assert after == len(texts[number]["lines"]) + len(added) - sum(
        end - begin for begin, end, _ in change["changes"]
    )
    opened.find_element(By.XPATH, "//button[text()='as it came']").click()
    shown = [e.text.strip() for e in opened.find_elements(By.CSS_SELECTOR, "#text div")]
    assert shown == texts[number]["lines"]


@pytest.mark.parametrize("width", [1400, 800])
def test_nothing_is_cut_off_at_the_right(opened, width):
    opened.set_window_size(width, 1000)
    try:
        script = (
            "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        assert opened.execute_script(script) <= 0
    finally:
        opened.set_window_size(1400, 1000)


def test_text_of_the_model_is_shown_as_text(browser, tmp_path):
    write_page(report_of([], one_launch(), hardware="cpu"), tmp_path / "page.html")
    browser.get(f"file://{tmp_path}/page.html")
    assert HOSTILE in browser.find_element(By.ID, "collectives").text
    assert not browser.find_elements(By.TAG_NAME, "img")


def test_a_page_without_graphs_says_why(browser, tmp_path):
    (tmp_path / "page.html").write_text(page_of(report_of([], [], hardware="cpu")))
    browser.get(f"file://{tmp_path}/page.html")
    text = browser.find_element(By.TAG_NAME, "body").text
    assert "no all-to-all is in any graph" in text and "This report has no text of graphs" in text
    assert [entry["message"] for entry in browser.get_log("browser")] == []
