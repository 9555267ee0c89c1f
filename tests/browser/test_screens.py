"""Each screen as a person meets it: a real browser, the real server, data of a real run.

`--update-pictures` draws the handbook's pictures anew (docs/images), from the same pages.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from served_shop import HOSTILE, shop

import tidegate as tg

pytestmark = pytest.mark.browser
PICTURES = Path(__file__).parents[2] / "docs" / "images"
SCREENS = {
    "overview": "/", "topic": "/topics/orders?partition=1", "records": "/topics/orders/records?key=customer-7&limit=12",
    "integrity": "/topics/orders/integrity", "table": "/tables/shop:per-minute?key=customer-7", "app": "/apps/shop",
    "explain": "/tables/shop:per-minute/explain?key=customer-7&start=1767261600000", "stopped": "/apps/strict",
    "faults": "/apps/shop/faults",
}  # fmt: skip


@pytest.fixture
def picture(request: pytest.FixtureRequest) -> Any:
    """Keep a picture of the page, when asked to; never larger than the handbook wants them."""

    def keep(page: Any, name: str, height: int = 800) -> None:
        if request.config.getoption("--update-pictures"):
            PICTURES.mkdir(exist_ok=True)
            path = PICTURES / f"page-{name}.png"
            page.set_viewport_size({"width": 1280, "height": height})
            page.evaluate("scrollTo(0, 0)")
            page.screenshot(path=path)
            assert path.stat().st_size < 150_000, f"{path} is too large for the repository"

    return keep


def legend(page: Any, chart: str) -> str:
    """What a chart says in words: the values under the pointer, or the newest."""
    page.locator(f"#chart-{chart} canvas").wait_for()
    page.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done)))")
    rows = "rows => rows.map(row => `${row.querySelector('th').innerText}: ${row.querySelector('td').innerText}`)"
    return " ".join(page.locator(f"#chart-{chart} .u-legend tr").evaluate_all(rows))


def point(page: Any, chart: str, share: float) -> None:
    """Put the pointer into a chart, so far from its left edge."""
    over = page.locator(f"#chart-{chart} .u-over")
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    page.mouse.move(box["x"] + max(3, box["width"] * share), box["y"] + box["height"] / 2)


def test_the_overview_says_how_things_are_and_what_to_do(page: Any, picture: Any) -> None:
    page.goto("/")
    assert page.locator(".sentence").inner_text() == "App strict is stopped by a fault: it needs a decision."
    steps = page.locator(".steps").inner_text()
    assert "strict: see which partition stopped, and resume it" in steps
    assert "shop: 41 records came too late or too early" in steps
    assert "50 records late or ahead of time" in page.locator(".figures").inner_text()
    row = page.locator("tr", has=page.get_by_role("link", name="orders", exact=True)).inner_text()
    assert "101,010" in row and "10.1 MiB" in row
    assert page.locator(".meter").count() == 3
    picture(page, "overview")


def test_a_topic_shows_its_partitions_and_when_its_log_segments_go(page: Any, picture: Any) -> None:
    page.goto("/topics/orders")
    page.get_by_role("link", name=re.compile("^1 ")).click()
    assert "Evenly spread" in page.inner_text("main")
    assert "Nobody runs retention on this log now" in page.inner_text("main")
    bars = page.locator("rect.life")
    assert (
        bars.count() == 2
    )  # both inside of the picture, though one record of the second is dated ten years ahead
    assert all(float(bars.nth(place).get_attribute("x")) < 1000 for place in range(2))
    assert "16809 … " in page.inner_text("main") and "active" in page.inner_text("main")
    settings = page.locator(
        "section", has=page.get_by_role("heading", name=re.compile("Settings"))
    ).inner_text()
    assert re.search(r"retention\.ms\s+604800000\s+7d\s+DEFAULT_CONFIG", settings)
    picture(page, "topic")


def test_records_are_found_opened_and_exported(page: Any, picture: Any) -> None:
    page.goto("/topics/orders/records")
    page.get_by_label("Key has").fill("customer-7")
    page.get_by_label("Value has").fill('"o-1478"')
    page.get_by_role("button", name="Find").click()
    rows, looked = page.locator("tbody tr"), 0
    while True:  # a slow machine looks at fewer records in the time a page has, and offers to go on
        status = page.get_by_role("status").inner_text()
        looked += int(re.findall(r"looked at ([\d,]+) records", status)[0].replace(",", ""))
        if rows.count() or "stopped there" not in status:
            break
        page.get_by_role("link", name="Older records").click()
    assert looked == 100_998 or "stopped there" in status
    assert rows.count() == 1 and '"order_id":"o-1478"' in rows.first.inner_text()
    with page.expect_download() as coming:
        page.get_by_role("link", name="Export JSONL").click()
    assert b'"offset":765' in Path(coming.value.path()).read_bytes()
    rows.first.get_by_role("link").first.click()
    assert page.url.endswith("/topics/orders/records/1/765")  # a permalink
    text = page.inner_text("main")
    assert "What its producer said" in text and "put, number" in text and "How long it stays" in text
    page.goto("/topics/orders/records?key=customer-7&limit=12")
    picture(page, "records")


def test_windowed_keys_are_read_and_older_pages_follow(page: Any) -> None:
    page.goto("/topics/orders-per-minute/records?limit=20")
    assert "windowed keys (changelog)" in page.get_by_role("status").inner_text()
    first = page.locator("tbody tr").first.inner_text()
    page.get_by_role("link", name="Older records").click()
    assert page.locator("tbody tr").count() == 20 and page.locator("tbody tr").first.inner_text() != first


def test_new_records_appear_while_one_follows(page: Any, data: Path) -> None:
    with tg.Log(data / "log", durability="os") as log:
        log.create_topic("live", 1, if_not_exists=True)
        page.goto("/topics/live/records")
        page.get_by_role("button", name="Follow").click()
        page.wait_for_timeout(1500)
        log.writer("live").write(pa.table({"key": ["k"], "value": ["it happened <b>just</b> now"]}))
        page.get_by_text("it happened <b>just</b> now").wait_for(timeout=120_000)
        page.get_by_role("button", name="Following: stop").click()


def test_integrity_shows_each_fault_and_leads_to_its_records(page: Any, picture: Any) -> None:
    page.goto("/topics/orders/integrity")
    page.get_by_text("All 101,010 records were checked: 3 faults and 1 duplicate.").wait_for(timeout=120_000)
    faults = page.locator("section", has=page.get_by_role("heading", name="What was found")).inner_text()
    assert "3 records of this producer are missing before this one (numbers 9019 to 9021)" in faults
    assert "send them again from the source" in faults
    heat = page.locator("table.heat")
    assert heat.locator("tbody tr").count() == 3 and heat.locator("a").count() == 3
    picture(page, "integrity")
    page.get_by_role("link", name="orders-1 @ 37306").click()
    assert "offset 37306" in page.inner_text("h1")
    page.goto("/topics/prices/integrity")
    page.get_by_text("no fault was found, but some loss would not show").wait_for(timeout=120_000)
    assert "cleanup.policy=compact" in page.inner_text("main")  # tolerated gaps, with their reason


def test_a_table_shows_windows_late_rows_and_why_a_value_is_what_it_is(page: Any, picture: Any) -> None:
    page.goto("/tables")
    page.get_by_role("link", name="shop:per-minute").click()
    page.get_by_label("Key").first.fill("customer-7")
    page.get_by_label("Chart").select_option("revenue")
    page.get_by_role("button", name="Show").click()
    assert (
        legend(page, "windows") == "at: 2026-01-01 10:59:00Z revenue: 751.4"
    )  # the newest, until one points
    assert "the highest is 1,515.03" in page.locator(".plot figcaption").inner_text()
    point(page, "windows", 0.003)
    assert legend(page, "windows") == "at: 2026-01-01 10:00:00Z revenue: 720.23"
    assert "41 records came too late" in page.inner_text("main")
    row = page.locator(".scroll tr", has=page.get_by_text("2026-01-01 10:00:00Z"))
    assert re.search(r"8\s+720\.23", row.first.inner_text())
    page.mouse.move(0, 0)
    picture(page, "table", 1000)
    point(page, "windows", 0.003)
    page.mouse.down()
    page.mouse.up()  # a bar leads to why it is what it is, as its row's link does
    page.get_by_text("8 records make this value").wait_for()
    page.go_back()
    row.first.get_by_role("link", name="explain").click()
    assert "8 records are counted here, and orders says 8: they agree" in page.inner_text("main")
    assert page.locator("tbody tr").count() == 8
    picture(page, "explain")
    page.go_back()
    page.get_by_role("button", name="Compare").click()
    assert "1 row new" in page.inner_text("main") and "commit" in page.inner_text("h1")


def test_an_app_shows_its_rounds_and_what_stopped(page: Any, picture: Any) -> None:
    page.goto("/apps/strict")
    text = page.inner_text("main")
    assert "strict is stopped by a fault in every partition that it reads." in text
    stopped = page.locator("section", has=page.get_by_role("heading", name="Stopped partitions"))
    commands = stopped.locator("code").all_inner_texts()
    assert all(each.startswith("tidegate app resume strict --partition per-hour:") for each in commands)
    assert ["--skip-to" in each for each in commands] == [False, True] * 2  # without loss first
    assert all(" --state /" in each for each in commands)
    page.goto("/apps/shop")
    assert page.locator(".sentence.bad").count() == 1  # it met three faults
    text = page.inner_text("main")
    assert "shop is not running; it has read everything there is." in text
    assert "drop duplicates of order_id within 10m → tumbling windows of 1m: orders, revenue" in text
    assert "it is the one that holds event time back" in text
    assert legend(page, "records") == "round: 6 records: 1,010"
    assert legend(page, "times").endswith("orders-0: 2026-01-01 11:00:01Z orders-1: 2026-01-01 11:00:01Z")
    assert legend(page, "lag").endswith("records behind: 0")
    point(page, "records", 0.001)
    assert legend(page, "records") == "round: 1 records: 20,000"
    page.mouse.move(0, 0)
    picture(page, "app", 1260)


def test_an_apps_faults_lead_to_their_records(page: Any, picture: Any) -> None:
    page.goto("/apps/shop")
    page.get_by_role("link", name="see which records").click()
    page.get_by_role("link", name="orders-0 @ 49474").wait_for(timeout=120_000)
    rows = page.locator("tbody tr")
    assert rows.count() == 3
    picture(page, "faults", 500)
    page.get_by_role("link", name="orders-1 @ 37306").click()
    assert (
        "This record is corrupt: it is not what its producer sent" in page.get_by_role("alert").inner_text()
    )
    page.go_back()
    page.goto("/topics/orders/records/1/37305")
    assert page.get_by_role("alert").count() == 0


def test_rounds_appear_as_they_commit(page: Any, data: Path) -> None:
    page.goto("/apps/shop")
    before = page.locator("[data-part=rounds] tbody tr").first.inner_text().split()[0]
    page.wait_for_timeout(1500)
    with tg.Log(data / "log", durability="os") as log:
        value = '{"order_id":"x-1","amount":1}'
        log.writer("orders").write(
            pa.table({"key": ["customer-7"], "value": [value], "timestamp": [1767265201000]})
        )
    shop(data).run("local", until="caught_up")
    page.wait_for_function(
        "before => document.querySelector('[data-part=rounds] tbody td').textContent !== before",
        arg=before,
        timeout=120_000,
    )


def test_a_chart_goes_on_with_what_events_say(page: Any, data: Path) -> None:
    """Two rounds commit while the page is open: the chart has them without the page being loaded again."""
    page.goto("/apps/shop")
    page.evaluate("window.stayed = true")
    known = int(legend(page, "records").split()[1])
    page.wait_for_timeout(1500)
    for turn in (1, 2):
        with tg.Log(data / "log", durability="os") as log:
            values = [f'{{"order_id":"y-{turn}-{n}","amount":1}}' for n in range(7)]
            log.writer("orders").write(
                pa.table({"key": ["customer-7"] * 7, "value": values, "timestamp": [1767265202000] * 7})
            )
        shop(data).run("local", until="caught_up")
        page.wait_for_function(
            "said => document.querySelector('#chart-records .u-legend td').innerText === said",
            arg=str(known + turn),
            timeout=120_000,
        )
        assert re.match(rf"round: {known + turn} records: \d+", legend(page, "records"))
    assert page.evaluate("window.stayed") is True
    assert "2026-01-01 11:00:02Z" in legend(page, "times")


def test_hostile_records_stay_text(page: Any) -> None:
    page.goto("/topics/hostile/records?limit=100&order=oldest")
    assert page.title().startswith("hostile records")
    assert page.locator("main h1").count() == 1 and page.locator("main img").count() == 0
    shown = page.inner_text("main")
    for text in HOSTILE[:2]:
        assert text in shown
    assert "\\x1b[31mred" in shown and "\\u202etxt.exe" in shown and "ff fe 80" in shown


def test_every_screen_has_its_command_its_python_and_its_json(page: Any) -> None:
    for path in SCREENS.values():
        page.goto(path)
        page.get_by_text("Copy as CLI").click()
        assert page.locator("#copy-cli").inner_text().startswith("tidegate ")
        page.get_by_text("Copy as Python").click()
        compile(page.locator("#copy-python").inner_text(), "shown", "exec")
        assert page.get_by_role("link", name="The same as JSON").get_attribute("href").startswith("/api/")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_screens_fit_and_can_be_read(browser: Any, address: str, scheme: str, width: int) -> None:
    """No sideways scrolling of the page, text that stands out from its ground, in light and dark, wide and narrow."""
    context = browser.new_context(
        base_url=address, color_scheme=scheme, viewport={"width": width, "height": 800}
    )
    page = context.new_page()
    for name, path in SCREENS.items():
        page.goto(path)
        assert page.evaluate(
            "document.documentElement.scrollWidth <= document.documentElement.clientWidth + 1"
        ), name
        assert page.evaluate(CONTRAST) >= 4.5, name
    context.close()


CONTRAST = """() => {
  const light = (c) => { const [r, g, b] = c.match(/[0-9.]+/g).slice(0, 3).map(v => v / 255).map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4); return .2126 * r + .7152 * g + .0722 * b; };
  const ground = light(getComputedStyle(document.body).backgroundColor);
  let worst = 99;
  for (const at of document.querySelectorAll("main p, main td, main a, main .quiet")) {
    const ink = light(getComputedStyle(at).color);
    worst = Math.min(worst, (Math.max(ink, ground) + .05) / (Math.min(ink, ground) + .05));
  }
  return worst;
}"""  # noqa: E501


def test_everything_is_reached_by_keyboard(page: Any) -> None:
    page.goto("/")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to content"
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.querySelector('main').contains(document.activeElement)")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    for landmark in ("banner", "main", "contentinfo"):
        assert page.get_by_role(landmark).count() == 1
    assert page.get_by_role("navigation").count() >= 1
    assert page.locator("html[lang=en]").count() == 1
    unnamed = """[...document.querySelectorAll('input, select, button, a')]
        .filter(e => !(e.textContent.trim() || e.labels?.length || e.ariaLabel)).length"""
    for path in SCREENS.values():
        page.goto(path)
        assert page.evaluate(unnamed) == 0, path


def test_pages_work_without_scripts(browser: Any, address: str) -> None:
    context = browser.new_context(base_url=address, java_script_enabled=False)
    page = context.new_page()
    page.goto("/topics/orders/records")
    page.get_by_label("Key has").fill("customer-7")
    page.get_by_role("button", name="Find").click()
    assert page.locator("tbody tr").count() > 10
    page.goto("/tables/shop:per-minute?key=customer-7")
    assert page.locator("rect.bar").count() >= 60  # an hour of minutes, as a picture without scripts
    page.goto("/apps/shop")
    assert page.locator("rect.bar").count() >= 6
    for figure in page.locator("figure.plot").all():  # each of the five charts is there as a picture
        assert figure.locator("svg.chart rect").count() >= 1, figure.inner_text()
    assert page.locator("polyline").count() >= 5
    context.close()
