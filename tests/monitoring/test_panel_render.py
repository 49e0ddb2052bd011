"""Frames of the panel: small, valid, safe HTML of constant height, at most 12 lines of text, no unknown shown as 0."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from urllib.parse import unquote
from xml.etree.ElementTree import Element, fromstring

import pytest
from panel_states import ADVICE, DIAGNOSIS, EMPTY, FINISHED, HOST, RUNNING, STATES, render

from colabkit.foundation.plotting import BLUE, GREEN, GREY, PURPLE, VERMILLION
from colabkit.monitoring.diagnosing.diagnosis import Shares, Verdict
from colabkit.monitoring.panel.content import Phase, thinned
from colabkit.monitoring.panel.html import line_chart

HOSTILE = "<img src=x onerror=alert(1)>'\"&\x1b[31m\udcff\n"


def tree(html: str) -> Element:
    return fromstring(html)


def pictures(html: str) -> list[Element]:
    return list(tree(html).iter("img"))


def text_of(html: str) -> str:
    return " ".join("".join(tree(html).itertext()).split())


def test_every_frame_is_small_well_formed_and_has_text_alternatives() -> None:
    for state in STATES.values():
        html, text = render(state)
        assert (html, text) == render(replace(state)), "the same state gives the same picture"
        assert len(html.encode()) <= (20_000 if state.is_over else 8_000)
        assert len(text.splitlines()) <= 12
        assert len(text) < 1500
        # No script, no style sheet, no inline SVG.
        assert {part.tag for part in tree(html).iter()} <= {"div", "span", "small", "b", "br", "img"}
        known = {"style", "role", "aria-label", "aria-hidden", "alt", "src", "width", "height"}
        assert {name for part in tree(html).iter() for name in part.attrib} <= known
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|url\((?!#h)", unquote(html))
        found = pictures(html)
        assert len(found) == 6
        for image in found:
            kind, _, svg = image.attrib["src"].partition(",")
            assert kind == "data:image/svg+xml"
            fromstring(unquote(svg))
            assert len(image.attrib["alt"]) > 5
        for part in tree(html).iter():
            assert part.attrib.get("role") != "img" or part.attrib["aria-label"]


def test_frames_stay_small_for_any_names_and_sentences() -> None:
    advice = replace(ADVICE, action="do " * 500, found="it is " * 500, call="f(" * 500)
    diagnosis = replace(DIAGNOSIS, sentence="wait " * 500, advice=(advice,))
    values = {"loss": 0.123456789, **{f"{'name' * 50}{number}": 1 / 3 for number in range(50)}}
    html, text = render(replace(RUNNING, diagnosis=diagnosis, values=values))
    assert len(html.encode()) <= 8_000
    assert len(text.splitlines()) <= 12
    assert len(text) < 2000


def test_all_states_have_the_same_rows_so_that_the_height_never_changes() -> None:
    def shape(part: Element) -> tuple[str, ...]:
        rows = [child for child in part if child.tag == "div"]
        heights = re.findall(
            r"(?:^|[; ])((?:line-)?height:[^;]*|margin[^;]*|padding[^;]*)", part.attrib.get("style", "")
        )
        within = () if part.attrib.get("role") == "img" else tuple(step for row in rows for step in shape(row))
        return (part.tag, *(heights if part.attrib.get("role") != "img" else ()), *within, "end")

    for state in STATES.values():
        assert shape(tree(render(state)[0])) == shape(tree(render(RUNNING)[0]))


def test_unknown_is_not_drawn_as_zero() -> None:
    html, text = render(EMPTY)
    assert "waiting for data n/a" in text
    assert "waiting for data n/a" in text_of(html)
    for name in ("CPU", "Images/s", "Data", "Ready queue", "Loss", "RAM", "Disk", "tmpfs"):
        is_gauge = name in ("RAM", "Disk", "tmpfs")
        assert bool(re.search(rf"{name}\s+n/a", text)) == is_gauge, "text has no row for an unknown curve"
        assert re.search(rf"{name}\s*n/a", text_of(html)), name
    assert "0%" not in text
    assert "0%" not in text_of(html)
    assert "n/a" in line_chart("nothing: n/a", (), None, None, 32)


def test_a_true_zero_is_drawn_as_zero() -> None:
    state = replace(RUNNING, queue_rate=0.0, data_bytes_per_s=0.0, diagnosis=replace(DIAGNOSIS, shares=Shares(1.0)))
    _, text = render(state)
    assert re.search(r"Ready queue +0%", text)
    assert re.search(r"Data +0 B/s", text)
    assert "copy 0%" in text


FIRST_LINES = (
    (EMPTY, "Starting", "0 s so far"),
    (replace(EMPTY, phase="running", epoch=1, step=3), "Warming up", "epoch 1 · step 3 · 0 s so far"),
    (RUNNING, DIAGNOSIS.sentence, "epoch 2/10 · step 814/1,250 · 31 min 03 s left"),
    (STATES["waiting"], "Waiting for data since 3.2 s", "epoch 2/10 · step 814/1,250 · 31 min 03 s left"),
    (FINISHED, DIAGNOSIS.sentence, "epoch 10/10 · step 1,250/1,250 · 38 min 31 s in total"),
    (STATES["stopped"], DIAGNOSIS.sentence, "stopped by KeyboardInterrupt · epoch 4/10"),
    (replace(EMPTY, phase="finished"), "Finished", "0 µs in total"),
)


def test_the_first_lines_are_verdict_and_position() -> None:
    for state, sentence, where in FIRST_LINES:
        html, text = render(state)
        assert text.splitlines()[0] == sentence
        assert where in text.splitlines()[1]
        assert text_of(html).startswith(sentence)
        assert where in text_of(html)


def test_the_progress_bar_shows_the_progress_of_finished_and_stopped_runs() -> None:
    assert "aria-label='done: 17%'" in render(RUNNING)[0]
    assert "aria-label='done: 100%'" in render(FINISHED)[0]
    assert "aria-label='done: 50%'" in render(replace(FINISHED, epochs=None, step=625))[0]
    assert "aria-label='done: 100%'" in render(replace(FINISHED, steps_per_epoch=None))[0]
    assert "aria-label='done: n/a'" in render(EMPTY)[0]


def test_a_short_wait_is_not_shown() -> None:
    assert render(replace(STATES["waiting"], waiting_s=0.4))[1].startswith(DIAGNOSIS.sentence)


def test_only_the_verdict_is_a_live_region_and_screen_readers_skip_the_seconds() -> None:
    root = tree(render(STATES["waiting"])[0])
    (region,) = [part for part in root.iter() if part.attrib.get("role") == "status" or "aria-live" in part.attrib]
    assert region.text.strip() == "Waiting for data"
    assert region[0].attrib["aria-hidden"] == "true"
    assert region[0].text == "since 3.2 s"


def test_the_shares_of_a_step_are_written_and_distinguishable_without_color() -> None:
    html, text = render(RUNNING)
    assert "▒ waiting for data 61%  ▓ copy 3.0%  █ step 33%  ░ other 3.0%" in text
    assert re.search(r"\n  ▒{15}█{8}░  ▒ waiting", text), "24 characters, shares rounded so that they fill it"
    bar = pictures(html)[0]
    assert bar.attrib["alt"] == "time of a typical step: waiting for data 61%, copy 3.0%, step 33%, other 3.0%"
    svg = unquote(bar.attrib["src"])
    assert 'width="61.0%" height="100%" fill="url(#h)"' in svg
    assert "stroke-dasharray" in svg
    for sign in "▨▥■⊟":
        assert sign in text_of(html)


def test_the_best_advice_is_shown_with_reason_call_and_prediction() -> None:
    html, text = render(RUNNING)
    action, found, gain = ADVICE.action.rstrip("."), ADVICE.found, "about 1,490 images/s (3.1×)"
    assert text.splitlines()[-2:] == [f"  {action}: {found}", f"  → {gain}  {ADVICE.call}"]
    assert f"Advice: {found} {gain}{action}{ADVICE.call}" in text_of(html)


WITHOUT_ADVICE: tuple[tuple[Phase, Verdict, float, str], ...] = (
    ("running", "unknown", 0.0, "No advice yet"),
    ("finished", "unknown", 0.0, "No advice"),
    ("running", "data", 0.5, "No advice"),
    ("finished", "compute", 0.1, "No advice"),
    ("running", "compute", 0.01, "Nothing to fix"),
)


def test_without_advice_the_panel_shows_whether_all_is_well_or_advice_may_follow() -> None:
    for phase, verdict, wait, said in WITHOUT_ADVICE:
        diagnosis = replace(DIAGNOSIS, verdict=verdict, shares=Shares(wait, compute=1 - wait), advice=())
        _, text = render(replace(RUNNING, phase=phase, diagnosis=diagnosis))
        assert text.splitlines()[-1].strip() == said


def test_a_call_of_two_statements_is_shown_completely_in_text() -> None:
    call = "colabkit.pack('/content/drive/MyDrive/birds', 'pack.h5', size=..., encoding='raw'); "
    call += "colabkit.Loader(colabkit.open_pack('pack.h5')['train'], batch_size, shuffle=True)"
    diagnosis = replace(DIAGNOSIS, advice=(replace(ADVICE, call=call),))
    assert call in render(replace(RUNNING, diagnosis=diagnosis))[1]


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_shown_before_all_advice(loss: float) -> None:
    html, text = render(replace(RUNNING, values={"loss": loss, "lr": math.inf}))
    assert f"Lower the learning rate, or clip gradients: the loss is {loss}" in text
    assert ADVICE.call not in html
    assert re.search(rf"Loss +{loss}", text)
    assert "lr inf" in text_of(html)


def test_a_frame_shows_its_time_and_a_headline_in_place_of_the_verdict() -> None:
    for shown in render(replace(RUNNING, at_s=86_399.0, headline="The run no longer exists")):
        assert "panel 0.2% · 23:59:59 UTC" in shown
        assert "The run no longer exists" in shown
        assert DIAGNOSIS.sentence not in shown


def test_gauges_show_used_and_total_in_one_unit_and_tmpfs_separately_within_ram() -> None:
    html, text = render(RUNNING)
    assert "GPU memory 10.0/15.0 GiB · RAM 6.0/12.0 GiB (tmpfs 2.0 GiB)" in text
    assert "Disk 38.0/108 GiB · tmpfs 2.0/6.0 GiB · panel 0.2%" in text
    assert "aria-label='RAM 50% full, 17% by tmpfs'" in html
    assert "margin-left:33.3%;width:16.7%" in html
    assert "GPU memory no GPU" in render(STATES["no GPU"])[1]
    _, text = render(replace(RUNNING, host=replace(HOST, ram_used_bytes=300 << 20, tmpfs_bytes=None)))
    assert "RAM 0.3/12.0 GiB ·" in text.replace("\n", " ·")


def test_without_a_gpu_the_cpu_load_is_shown_and_one_of_several_gpus_is_named() -> None:
    assert re.search(r"^ +CPU +93% ", render(STATES["no GPU"])[1], re.MULTILINE)
    two = replace(RUNNING, host=replace(HOST, gpus=(HOST.gpus[0], replace(HOST.gpus[0], utilization_rate=0.9))))
    assert re.search(r"^ +GPU 1 +90% ", render(replace(two, gpu_number=1))[1], re.MULTILINE)
    lost = replace(HOST.gpus[0], is_lost=True, utilization_rate=None)
    assert "GPU memory GPU lost" in render(replace(RUNNING, host=replace(HOST, gpus=(lost,))))[1]


def test_names_never_become_html_or_control_characters() -> None:
    advice = replace(ADVICE, action=HOSTILE, found=HOSTILE, call=HOSTILE)
    diagnosis = replace(DIAGNOSIS, sentence=HOSTILE, advice=(advice,))
    state = replace(STATES["stopped"], values={HOSTILE: 1.0}, diagnosis=diagnosis, stopped_by=HOSTILE)
    html, text = render(state)
    assert len(pictures(html)) == 6
    assert "<img src=x" not in html
    assert "\x1b" not in text + html
    assert len(text.splitlines()) == 12
    assert "alert(1)" in text_of(html)


def luminance(color: str) -> float:
    parts = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_colors_are_visible_on_light_and_dark_and_pictures_use_no_others() -> None:
    palette = {BLUE, VERMILLION, GREEN, PURPLE, GREY}
    for color in palette:
        for background in ("#ffffff", "#131314"):
            high, low = sorted([luminance(color), luminance(background)], reverse=True)
            assert (high + 0.05) / (low + 0.05) >= 3
    svg = unquote(" ".join(image.attrib["src"] for image in pictures(render(RUNNING)[0])))
    assert {color[:7] for color in re.findall(r"#[0-9A-F]{6,8}", svg)} == palette


def test_text_and_frame_use_the_colors_of_the_theme_and_digits_of_equal_width() -> None:
    style = tree(render(RUNNING)[0]).attrib["style"]
    for theme in ("--jp-ui-font-color1", "--colab-primary-text-color", "--vscode-foreground", "--jp-border-color2"):
        assert f"var({theme}" in style
    assert "font-variant-numeric:tabular-nums" in style
    assert "background" not in style


def test_a_long_curve_is_thinned_by_means_and_keeps_its_ends() -> None:
    assert thinned((1.0, 3.0, 5.0, 7.0), 2) == (2.0, 6.0)
    assert thinned((1.0, 2.0), 5) == (1.0, 2.0)
    assert len(thinned(range(1000), 32)) == 32
