"""Frames of the panel: small, valid and safe HTML, and at most 12 lines of text."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any
from urllib.parse import unquote
from xml.etree.ElementTree import Element, fromstring

from panel_states import ADVICE, DIAGNOSIS, EMPTY, FINISHED, HOST, RUNNING, STATES, render

from colabkit.foundation import Phrase, Words, escape, option, speaking
from colabkit.foundation.plotting import BLUE, GREEN, GREY, PURPLE, VERMILLION
from colabkit.monitoring.diagnosing.diagnosis import Shares, Verdict
from colabkit.monitoring.diagnosing.remedies import options
from colabkit.monitoring.panel.charts import averaged
from colabkit.monitoring.panel.content import Phase

HOSTILE = "<img src=x onerror=alert(1)>'\"&\x1b[31m\udcff\n"


def tree(html: str) -> Element:
    return fromstring(html)


def pictures(html: str) -> list[Element]:
    return list(tree(html).iter("img"))


def text_of(html: str) -> str:
    return " ".join("".join(tree(html).itertext()).split())


def test_every_frame_is_small_well_formed_and_has_text_alternatives() -> None:
    for name, state in STATES.items():
        html, text = render(state)
        assert (html, text) == render(replace(state)), "the same state gives the same picture"
        assert len(html.encode()) <= (14_000 if state.is_over else 13_000), name
        assert len(text.splitlines()) <= 12
        assert len(text) < 1600
        # There are no scripts, style sheets or inline SVG images.
        assert {part.tag for part in tree(html).iter()} <= {"div", "span", "small", "b", "br", "img"}
        known = {"style", "role", "aria-label", "aria-hidden", "alt", "src", "width", "height"}
        assert {name for part in tree(html).iter() for name in part.attrib} <= known
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|url\((?!#h)", unquote(html))
        for image in pictures(html):
            kind, _, svg = image.attrib["src"].partition(",")
            assert kind == "data:image/svg+xml"
            fromstring(unquote(svg))
            assert len(image.attrib["alt"]) > 5
        for part in tree(html).iter():
            assert part.attrib.get("role") != "img" or part.attrib["aria-label"]
            assert not (
                "%" in part.attrib.get("style", "") and "width" in part.attrib["style"].replace("max-width", "")
            )


def test_frames_stay_small_for_any_names_and_sentences() -> None:
    advice = replace(ADVICE, action="do " * 500, found="it is " * 500, call="f(" * 500)
    diagnosis = replace(DIAGNOSIS, sentence="wait " * 500, advice=(advice,))
    values = {"loss": 0.123456789, **{f"{'name' * 50}{number}": 1 / 3 for number in range(50)}}
    epochs = tuple((epoch, values) for epoch in range(1, 600))
    html, text = render(replace(RUNNING, diagnosis=diagnosis, values=values, epoch_values=epochs))
    assert len(html.encode()) <= 13_000
    assert len(text.splitlines()) <= 12
    assert len(text) < 2200


def test_during_a_run_the_panel_never_loses_a_part() -> None:
    order = [STATES[name] for name in ("empty", "starting", "measuring", "first epoch", "running", "finished")]
    # Frames of a run also have a mark that appears when they are old.
    parts = [len(pictures(render(state)[0])) - (not state.is_over) for state in order]
    assert parts == sorted(parts)
    assert (parts[0], parts[-1]) == (0, 9)


def test_what_is_unknown_or_does_not_apply_is_left_out() -> None:
    for name, state in STATES.items():
        assert "n/a" not in "".join(render(state)), name
    for state in (EMPTY, STATES["measuring"]):
        assert "waiting for data" not in "".join(render(state))
    assert render(EMPTY)[1].split() == ["Starting:", "loading", "the", "first", "batch", "0", "s", "so", "far"]
    no_tmpfs = replace(RUNNING, host=replace(HOST, gpus=(), tmpfs_bytes=0, shm_free_bytes=HOST.shm_total_bytes))
    for shown in render(no_tmpfs):
        assert not re.search(r"GPU|tmpfs|/dev/shm|None", shown)


def test_a_true_zero_is_drawn_as_zero() -> None:
    state = replace(RUNNING, queue_rate=0.0, data_bytes_per_s=0.0, diagnosis=replace(DIAGNOSIS, shares=Shares(1.0)))
    _, text = render(state)
    assert "queue 0% full" in text
    assert "Loader 0 B/s" in text
    assert "copy 0%" in text


FIRST_LINES = (
    (EMPTY, "Starting: loading the first batch", "0 s so far"),
    (replace(EMPTY, phase="running", epoch=1, step=3), "Measuring the first steps", "epoch 1 · step 3 · 0 s so far"),
    (RUNNING, DIAGNOSIS.sentence, "epoch 8/30 · step 814/1,250 · about 31 min left"),
    (STATES["waiting"], "Waiting for data for 3 s", "epoch 8/30 · step 814/1,250 · about 31 min left"),
    (STATES["first epoch"], DIAGNOSIS.sentence, "epoch 1/30 · step 814/1,250 · about 2 min left in this epoch"),
    (FINISHED, f"Finished. {DIAGNOSIS.sentence}", "epoch 30/30 · step 1,250/1,250 · 38 min 31 s in total"),
    (STATES["stopped"], f"Stopped. {DIAGNOSIS.sentence}", "interrupted · epoch 4/30"),
    (replace(EMPTY, phase="finished"), "Finished", "0 µs in total"),
    (replace(STATES["measuring"], phase="stopped", stopped_by="ValueError"), "Stopped", "stopped by ValueError"),
    (
        STATES["staging"],
        "Copying files to this machine",
        "1.3 of 3.4 GiB · 812/2,000 files, 3 retries · about 2 min left",
    ),
    (STATES["packing"], "Packing samples into one file", "812/2,000 samples · 61 s so far"),
    (STATES["staged"], "Finished", "1.3 of 3.4 GiB · 812/2,000 files, 3 retries · 61 s in total"),
    (STATES["dead"], STATES["dead"].headline, "epoch 8/30 · step 814/1,250 · 6 min 52 s so far"),
)


def test_the_first_lines_are_verdict_and_position() -> None:
    for state, sentence, where in FIRST_LINES:
        html, text = render(state)
        assert text.splitlines()[0] == sentence
        assert where.replace("61 s so", "1 min 01 s so").replace("61 s in", "1 min 01 s in") in text.splitlines()[1]
        assert text_of(html).startswith(sentence)


def test_the_progress_bar_shows_the_progress_of_finished_and_stopped_runs() -> None:
    assert "aria-label='done: 26%'" in render(RUNNING)[0]
    assert "aria-label='done: 100%'" in render(FINISHED)[0]
    assert "aria-label='done: 50%'" in render(replace(FINISHED, epochs=None, step=625))[0]
    assert "aria-label='done: 100%'" in render(replace(FINISHED, steps_per_epoch=None))[0]
    assert "aria-label='done: 38%'" in render(STATES["staging"])[0]
    assert "done:" not in render(EMPTY)[0]


def test_the_time_of_small_charts_is_shown_only_with_charts() -> None:
    assert "small charts: last minute" in render(RUNNING)[1]
    assert "small charts" not in render(replace(STATES["measuring"], hosts=(HOST,), speed_curve=(310.0,)))[1]


def test_only_a_frame_that_others_should_follow_says_after_a_minute_that_it_is_old() -> None:
    old = "not updated for 60 s"
    assert unquote(render(RUNNING)[0]).count(old) == 1
    for name in ("finished", "stopped", "dead"):
        assert old not in unquote(render(STATES[name])[0])
    first, second = (re.findall("src='([^']*)'", render(replace(RUNNING, at_s=at_s))[0])[0] for at_s in (1e9, 1e9 + 1))
    assert first != second, "the pictures of two frames would share a clock"


def test_a_short_wait_is_not_shown() -> None:
    assert render(replace(STATES["waiting"], waiting_s=0.4))[1].startswith(DIAGNOSIS.sentence)


def test_speed_and_waiting_are_large_and_shares_wait_for_a_verdict() -> None:
    large = re.findall(r"font-size:24px[^>]*>([^<]*)<", render(RUNNING)[0])
    assert large == ["482", "61%"]
    assert re.findall(r"font-size:24px[^>]*>([^<]*)<", render(STATES["measuring"])[0]) == ["310"]
    assert re.findall(r"font-size:24px[^>]*>([^<]*)<", render(STATES["staging"])[0]) == ["21.9 MiB/s"]


def test_training_and_validation_are_charts_over_epochs_with_axes_and_the_best_epoch() -> None:
    html, text = render(STATES["overfitting"])
    assert "best validation: 0.8795 in epoch 16" in text_of(html)
    for shown in (text_of(html), text):
        assert re.search(
            r"Loss.*training 0\.1145.*validation 1\.109.*Accuracy.*training 0\.956.*validation 0\.806", shown, re.DOTALL
        )
    loss = next(image for image in pictures(html) if image.attrib["alt"].startswith("Loss: training from 2.074"))
    svg = unquote(loss.attrib["src"])
    assert svg.count("<path") == 3
    assert 'd="M15,-3V99"' in svg, "epoch 16 is marked, counted from epoch 1"
    assert svg.count("stroke-dasharray") == 1, "training and validation differ without color"
    assert "2.17" in text_of(html)
    assert "lr 0.001" in text
    first = render(STATES["first epoch"])[1]
    assert "Loss this batch 0.8431" in first
    assert "training" not in first.splitlines()[4], "a value of one batch is not called the training loss"
    other = replace(
        RUNNING, epoch_values=((3, {"error": 2.0, "loss": math.nan}), (4, {"error": 1.0, "loss": math.inf}))
    )
    assert "Error validation 1" in render(other)[1]
    assert "Error training 1" in render(replace(other, values={"error": 1.0}))[1]
    assert "best" not in render(other)[1]
    late = replace(RUNNING, epoch_values=((1, {"loss": math.nan}), (2, {"loss": 2.0}), (3, {"loss": 1.0})))
    (svg,) = [unquote(one.attrib["src"]) for one in pictures(render(late)[0]) if one.attrib["alt"].startswith("Loss")]
    assert 'd="M1,' in svg, "nothing is drawn where the loss was not finite"


def test_a_loss_that_is_not_finite_any_more_is_shown_as_the_newest_value_and_ends_its_curve() -> None:
    losses = (2.0, 1.0, math.nan, math.nan)
    html, text = render(replace(RUNNING, epoch_values=tuple(enumerate(({"loss": loss} for loss in losses), 1))))
    assert "Loss training nan" in text
    assert "best training: 1 in epoch 2" in text
    (svg,) = [unquote(one.attrib["src"]) for one in pictures(html) if one.attrib["alt"].startswith("Loss")]
    assert 'viewBox="0 -2 3 ' in svg, "the axis ends at epoch 4"
    assert 'd="M0,0l1 64"' in svg, "the curve ends at epoch 2"


def test_the_best_epoch_of_a_long_run_is_marked_inside_the_picture() -> None:
    epochs = tuple((number, {"loss": 1 / number}) for number in range(1, 601))
    html, _ = render(replace(RUNNING, epoch_values=epochs))
    (svg,) = [unquote(one.attrib["src"]) for one in pictures(html) if one.attrib["alt"].startswith("Loss")]
    assert 'd="M599,-3V99"' in svg
    assert 'viewBox="0 -2 599 ' in svg


def test_disk_and_network_show_both_directions_and_small_charts_their_limits() -> None:
    html, text = render(STATES["staging"])
    assert re.search(r"Disk read 56\.8 MiB/s, write 1\.6 MiB/s", text)
    assert re.search(r"Network in 9\.8 MiB/s, out 293 KiB/s", text)
    assert "Disk0–59.1 MiB/s" in text_of(html)
    assert "CPU0–100%" in text_of(html)
    assert "CPU 80% (of 2 CPUs)" in render(STATES["staged"])[1], "after the end, the mean"


def test_only_the_verdict_is_a_live_region_and_screen_readers_skip_the_seconds() -> None:
    root = tree(render(STATES["waiting"])[0])
    (region,) = [part for part in root.iter() if part.attrib.get("role") == "status" or "aria-live" in part.attrib]
    assert region.text.strip() == "Waiting for data"
    assert region[0].attrib["aria-hidden"] == "true"
    assert region[0].text == "for 3 s"


def test_the_shares_of_a_step_are_written_and_distinguishable_without_color() -> None:
    html, text = render(RUNNING)
    assert "▒ waiting for data 61%  ▓ copy 3.0%  █ step 33%  ░ other 3.0%" in text
    assert re.search(r"\n  ▒{15}█{8}░  ▒ waiting", text), "24 characters, shares rounded so that they fill it"
    (bar,) = [image for image in pictures(html) if image.attrib["alt"].startswith("time of a typical step")]
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
    assert f"{action} → {gain}{found.capitalize()}{ADVICE.call}" in text_of(html)


class FlagWords(Words):
    def option(self, name: str, value: Any) -> str:
        return f"--{name.replace('_', '-')} {value}"


def test_advice_has_the_syntax_of_the_front_end_that_runs_the_training() -> None:
    advice = replace(ADVICE, action=Phrase(("Set ", option("batch_size", 8))), call=options(batch_size=8))
    state = replace(RUNNING, diagnosis=replace(DIAGNOSIS, advice=(advice,)))
    with speaking(FlagWords()):
        html, text = render(state)
    for frame in (text, text_of(html)):
        assert "Set --batch-size 8" in frame
        assert "batch_size" not in frame
    assert "Set batch_size=8" in render(state)[1]


WITHOUT_ADVICE: tuple[tuple[Phase, Verdict, float, str], ...] = (
    ("running", "unknown", 0.0, ""),
    ("running", "data", 0.5, ""),
    ("finished", "compute", 0.1, ""),
    ("running", "compute", 0.01, "Data loading needs no fix"),
)


def test_without_advice_the_panel_says_at_most_that_loading_needs_no_fix() -> None:
    for phase, verdict, wait, said in WITHOUT_ADVICE:
        diagnosis = replace(DIAGNOSIS, verdict=verdict, shares=Shares(wait, compute=1 - wait), advice=())
        html, text = render(replace(RUNNING, phase=phase, diagnosis=diagnosis))
        assert (text.splitlines()[-1].strip() == said) == bool(said)
        assert ("Data loading needs no fix" in html) == bool(said)
    assert "no fix" not in render(STATES["overfitting"])[1]


def test_a_call_of_two_statements_is_shown_completely() -> None:
    first = "colabkit.pack('/content/drive/MyDrive/birds', 'pack.h5', size=..., encoding='raw')"
    second = "loader = colabkit.Loader(colabkit.open_pack('pack.h5')['train'], batch_size, shuffle=True)"
    diagnosis = replace(DIAGNOSIS, advice=(replace(ADVICE, call=f"{first}\n{second}"),))
    markup, text = render(replace(RUNNING, diagnosis=diagnosis))
    assert f"{escape(first)}\n{escape(second)}" in markup
    assert f"{first}; {second}" in text


def test_memory_and_storage_are_one_row_in_which_full_ones_stand_out() -> None:
    html, text = render(RUNNING)
    row = "RAM 6.0 of 12.0 GiB, 2.0 GiB of it tmpfs · disk 38.0 of 108 GiB · /dev/shm 2.0 of 6.0 GiB"
    assert row in text
    assert "⚠" not in html
    assert f"<b><span style='color:{VERMILLION}'>⚠</span> RAM 12.0 of 12.0 GiB" in render(STATES["full RAM"])[0]


def test_each_gpu_is_shown_beside_the_cpus_and_many_as_their_mean() -> None:
    assert re.search(r"^ +GPU 62% \(10\.0 of 15\.0 GiB\) · CPU 86% \(of 2 CPUs\)", render(RUNNING)[1], re.MULTILINE)
    assert re.search(r"GPU 0 62% .* GPU 1 82% .* CPU 86%", render(STATES["2 GPUs"])[1])
    assert re.search(r"8 GPUs, mean 45% \(from 2% to 82%\) · CPU", render(STATES["8 GPUs"])[1])
    lost = replace(HOST.gpus[0], is_lost=True, utilization_rate=None)
    assert "GPU (GPU lost)" in render(replace(RUNNING, host=replace(HOST, gpus=(lost,))))[1]
    mig = replace(HOST.gpus[0], utilization_rate=None)
    assert "GPU (10.0 of 15.0 GiB)" in render(replace(RUNNING, host=replace(HOST, gpus=(mig,)), hosts=()))[1]


def test_a_frame_shows_its_time() -> None:
    assert "updated 15 Jan 08:00:00 UTC" in render(RUNNING)[1]
    assert "ended 15 Jan 08:00:00 UTC" in text_of(render(FINISHED)[0])


def test_names_never_become_html_or_control_characters() -> None:
    advice = replace(ADVICE, action=HOSTILE, found=HOSTILE, call=HOSTILE)
    diagnosis = replace(DIAGNOSIS, sentence=HOSTILE, advice=(advice,))
    state = replace(STATES["stopped"], values={HOSTILE: 1.0}, diagnosis=diagnosis, stopped_by=HOSTILE)
    html, text = render(state)
    assert len(pictures(html)) == len(pictures(render(STATES["stopped"])[0]))
    assert "<img src=x" not in html
    assert "\x1b" not in text + html
    assert len(text.splitlines()) <= 12
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
    assert averaged((1.0, 3.0, 5.0, 7.0), 2) == (2.0, 6.0)
    assert averaged((1.0, 2.0), 5) == (1.0, 2.0)
    assert len(averaged(range(1000), 32)) == 32
