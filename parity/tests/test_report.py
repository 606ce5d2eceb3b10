"""The report: what a reader must find in it after a green, a red, an interrupted run; and that a browser shows it."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from harness.compare import compare_exact, compare_tensor
from harness.errors import UnjudgedError
from harness.origin import MEANINGS
from harness.records import Record, RecordWriter, Where
from parity import report
from parity.checks import LIMITS
from parity.report import Written, junit_properties, pictures, provenance
from parity.report.charts import CHAINED, ISOLATED, RED
from parity.report.content import collect
from parity.report.page import margin_class
from parity.report.pictures import difference_image, unpatchify
from parity.report.words import shown
from parity.verdict import claims
from parity.workspace import Choice, Workspace
from runtime.errors import InputError
from runtime.image import Pixels, patchify

MODEL, CASE = "youtu_vl", "square"
FAULTY, NEXT = f"{MODEL}/vision.layer.07", f"{MODEL}/vision.layer.08"
IDS = f"{MODEL}/decode.ids"
SIZE = (1400, 2400)
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")

Noise = Mapping[tuple[str, str], float]  # (id, mode) -> relative noise of the port


@pytest.fixture(scope="module")
def workspace() -> Workspace:
    Workspace(Choice(MODEL)).exporter.base()  # a report builds nothing
    return Workspace(Choice(MODEL, cases=(CASE,), build=False))


@pytest.fixture(scope="module")
def green(workspace: Workspace) -> list[Record]:
    return made(workspace, {})


@pytest.fixture(scope="module")
def red(workspace: Workspace) -> list[Record]:
    """One graph is wrong; all behind it carry that on; the answer leaves the reference's at step 3."""
    behind = list(workspace.graphs)[list(workspace.graphs).index(FAULTY) :]
    noise = {(FAULTY, "isolated"): 0.05} | {(name, "chained"): 0.02 for name in behind}
    ids = workspace.dump(CASE).values["ids"]
    answer = compare_exact([*ids[:3], 0, *ids[4:]], ids, where=Where(IDS, "ids", CASE, "exact"))
    return [answer if record.where.id == IDS else record for record in made(workspace, noise)]


def made(workspace: Workspace, noise: Noise) -> list[Record]:
    """A record for every claim of a run, small tensors compared within the real limits."""
    generator = np.random.default_rng(0)
    expected, errors = generator.standard_normal((2, 6, 16)).astype(np.float32)

    def judged(name: str, case: str, mode: str) -> Record:
        where, rerun = Where(name, "hidden", case, mode), f"pytest -k '{name} and {case}'"
        if mode == "exact":
            return compare_exact([1, 2], [1, 2], where=where, rerun=rerun)
        actual = expected + np.float32(noise.get((name, mode), 1e-6)) * errors
        floor = 3e-7 if name in workspace.graphs else None
        return compare_tensor(actual, expected, LIMITS.of(name, mode), where=where, floor=floor, rerun=rerun)

    return [judged(*claim) for claim in claims(workspace)]


@pytest.fixture(scope="module")
def red_files(workspace: Workspace, red: list[Record], tmp_path_factory: pytest.TempPathFactory) -> Written:
    return written(workspace, red, tmp_path_factory.mktemp("red"))


def written(workspace: Workspace, records: Iterable[Record], folder: Path) -> Written:
    """The report of records, which two workers wrote by turns, the last ones first."""
    writers = [RecordWriter(folder / "records", f"gw{n}") for n in range(2)]
    for number, record in enumerate(reversed(list(records))):
        writers[number % 2].write(record)
    return report.write([workspace], records=folder / "records", folder=folder / "report")


def content_of(files: Written) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(files.json.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    return found


def row_of(files: Written, name: str) -> dict[str, Any]:
    return next(row for row in content_of(files)["rows"] if row["id"] == name)


# ---- what is said


def test_a_green_run_is_equal(workspace: Workspace, green: list[Record], tmp_path: Path) -> None:
    files = written(workspace, green, tmp_path)
    content, page = content_of(files), files.page.read_text(encoding="utf-8")

    assert files.code == content["code"] == 0
    assert (content["first_red"], content["missing"], content["origins"]) == (None, [], [])
    assert [len(tower["graphs"]) for tower in content["towers"]] == [29, 40, 40, 40]
    assert {row["id"] for row in content["rows"]} == {record.where.id for record in green}
    assert {row["word"] for row in content["rows"]} == {"equal"}
    assert "<h1>parity: equal</h1>" in page
    assert 'id="first-red"' not in page
    assert files.markdown.read_text(encoding="utf-8").startswith("### parity: equal\n\nevery claim was judged, every")


def test_the_page_asks_no_network(red_files: Written) -> None:
    page = red_files.page.read_text(encoding="utf-8")
    addresses = re.findall(r'\b(?:src|href|action)="([^"]*)"', page)

    assert len(addresses) > 300  # every point of the charts leads to its row
    assert {address for address in addresses if not address.startswith(("#", "data:"))} == set()
    assert set(re.findall(r'https?://[^\s"<]*', page)) <= {"http://www.w3.org/1999/xlink", "http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\((?!#)|<script[^>]+src|<iframe|fetch\(", page)
    assert 'target="_blank"' not in page


def test_links_of_the_charts_lead_to_rows(red_files: Written) -> None:
    page = red_files.page.read_text(encoding="utf-8")

    for name in set(re.findall(r'xlink:href="#([^"]*/[^"]*)"', page)):
        assert f'<tbody id="{name}"' in page


def test_the_first_red_stands_on_top_with_its_text(red_files: Written, red: list[Record]) -> None:
    content, page = content_of(red_files), red_files.page.read_text(encoding="utf-8")
    detail = next(record.detail for record in red if record.where.id == FAULTY and record.where.mode == "isolated")

    assert red_files.code == 1
    assert content["first_red"]["id"] == FAULTY
    assert content["first_red"]["detail"] == detail  # isolated, the case before the shape cases
    assert content["origins"] == [FAULTY]
    assert page.index("<h1>parity: different</h1>") < page.index('id="first-red"') < page.index('id="towers"')
    assert "python -m parity bisect youtu_vl --case square" in page
    assert f"python -m parity explain {FAULTY}" in page
    assert f"```\n{detail}\n```" in red_files.markdown.read_text(encoding="utf-8")


def test_every_metric_stands_beside_its_limit(red_files: Written, red: list[Record]) -> None:
    record = next(r for r in red if r.where.id == FAULTY and r.where.case == CASE and r.where.mode == "isolated")
    row = row_of(red_files, FAULTY)
    line = next(line for line in row["lines"] if line["mode"] == "isolated")

    assert record.metrics is not None
    assert (row["word"], row["verdict"], row_of(red_files, NEXT)["word"]) == ("origin", "different", "carrier")
    assert row["isolated"] == line["metrics"]["rel_l2_max"]["value"] == pytest.approx(record.metrics.rel_l2)
    limit = LIMITS.of(FAULTY, "isolated")["rel_l2_max"]
    said = {"value": row["isolated"], "limit": f"≤ {limit.bound:g}", "line": limit.line, "kept": False}
    assert line["metrics"]["rel_l2_max"] == said
    assert {key for key, cell in line["metrics"].items() if not cell["kept"]} == set(record.failed)
    assert all(line["metrics"][limit.key]["limit"] for limit in record.limits)
    cell = f'<td class="n broken">{shown("rel_l2_max", record.metrics.rel_l2)}</td>'
    assert cell in red_files.page.read_text(encoding="utf-8")


def test_the_worst_case_of_a_graph_is_the_one_shown(workspace: Workspace, green: list[Record], tmp_path: Path) -> None:
    def worse(record: Record) -> Record:
        chosen = record.where.id == FAULTY and record.where.case == "length_6"
        assert record.metrics or not chosen
        return replace(record, metrics=replace(record.metrics, rel_l2=9e-5)) if chosen and record.metrics else record

    writer = RecordWriter(tmp_path, "main")
    for record in map(worse, green):
        writer.write(record)
    rows = collect(tmp_path, [workspace], notes=tmp_path)["rows"]
    row = next(row for row in rows if row["id"] == FAULTY)
    assert row["isolated"] == 9e-5
    assert row["multiple"] == pytest.approx(300)
    assert [line["case"] for line in row["lines"] if line["mode"] == "isolated"] == ["length_6"]


def test_the_token_strip_marks_the_first_difference(workspace: Workspace, red_files: Written) -> None:
    (strip,) = content_of(red_files)["tokens"]
    values, page = workspace.dump(CASE).values, red_files.page.read_text(encoding="utf-8")

    assert (strip["ids"], strip["margins"], strip["text"]) == (values["ids"], values["margins"], values["text"])
    assert (strip["first_difference"], strip["verdict"]) == (3, "different")
    marked = re.findall(r'<span class="m\d first" title="step (\d+): [^"]*">(\d+)</span>', page)
    assert marked == [("3", str(values["ids"][3]))]
    assert f"step 3: 0 in [{', '.join(map(str, values['ids'][:3]))}, 0, " in page


def test_margins_have_colours() -> None:
    assert [margin_class(margin) for margin in (0, 0.001, 0.05, 0.1, 0.5, 3)] == [
        "m0",
        "m1",
        "m2",
        "m3",
        "m3",
        "m4",
    ]


def test_an_interrupted_run_is_written_and_says_what_is_missing(
    workspace: Workspace, green: list[Record], tmp_path: Path
) -> None:
    left = [record for record in green if not record.where.id.startswith(f"{MODEL}/llm.layer.3")]
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "records-gw7.jsonl").write_text(green[0].to_json()[:80], encoding="utf-8")
    files = written(workspace, left, tmp_path)
    content, page = content_of(files), files.page.read_text(encoding="utf-8")

    assert files.code == 2
    assert content["verdict"] == "could not be judged"
    assert len(content["missing"]) == len(green) - len(left) == 10 * 3 * 5
    assert f"{MODEL}/llm.layer.30.prefill [square, isolated]" in page
    assert "records-gw7.jsonl:1 is no whole record: was the run killed?" in page
    assert "no verdict" in page  # in the charts
    text = files.markdown.read_text(encoding="utf-8")
    assert "nothing is red, but 150 claims have no verdict: run python -m parity run" in text
    assert f"- without a verdict, case square: 60 claims, such as `{MODEL}/llm.layer.30.prefill [square," in text


def test_without_records_there_is_no_report(workspace: Workspace, tmp_path: Path) -> None:
    with pytest.raises(
        UnjudgedError, match=r"records holds no record of youtu_vl; judge first: python -m parity run yo"
    ):
        report.write([workspace], records=tmp_path / "records", folder=tmp_path / "report")
    assert not (tmp_path / "report").exists()


def test_a_run_that_was_killed_at_once_is_written_too(workspace: Workspace, tmp_path: Path) -> None:
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "records-main.jsonl").write_text('{"where"', encoding="utf-8")
    files = report.write([workspace], records=tmp_path / "records", folder=tmp_path / "report")

    assert files.code == 2
    assert "records-main.jsonl:1 is no whole record" in files.page.read_text(encoding="utf-8")


def test_records_of_other_models_and_unknown_ids(workspace: Workspace, green: list[Record], tmp_path: Path) -> None:
    strangers = [replace(green[0], where=replace(green[0].where, id=name)) for name in ("smollm2/x", f"{MODEL}/gone")]
    files = written(workspace, [*green, *strangers], tmp_path)

    assert content_of(files)["unknown"] == [f"{MODEL}/gone"]
    assert "smollm2/x" not in files.page.read_text(encoding="utf-8")
    assert report.judged_models(tmp_path / "records") == [MODEL, "smollm2"]
    assert report.judged_models(tmp_path / "nowhere") == [MODEL, "smollm2"]


def test_an_error_that_is_no_number_is_the_worst(workspace: Workspace, green: list[Record], tmp_path: Path) -> None:
    where, limits = Where(FAULTY, "hidden", CASE, "isolated"), LIMITS.of(FAULTY, "isolated")
    expected = np.ones((2, 4), np.float32)
    broken = compare_tensor(np.full_like(expected, np.nan), expected, limits, where=where)
    assert broken.verdict == "different"
    files = written(workspace, [broken if record.where == where else record for record in green], tmp_path)

    assert row_of(files, FAULTY)["isolated"] == "inf"
    assert content_of(files)["first_red"]["detail"] == broken.detail


def test_notes_of_other_commands_stand_in_the_card(workspace: Workspace, red: list[Record], tmp_path: Path) -> None:
    folder = tmp_path / "report"
    folder.mkdir()
    for name, text in (("bisect", "probe 1: <boundary 15>"), ("explain", "of an earlier run")):
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    os.utime(folder / "explain.txt", (1, 1))
    later = folder.stat().st_mtime + 1000
    os.utime(folder / "bisect.txt", (later, later))
    files = written(workspace, red, tmp_path)
    page = files.page.read_text(encoding="utf-8")

    assert '<pre class="note">probe 1: &lt;boundary 15&gt;</pre>' in page
    assert "of an earlier run" not in page
    assert f"python -m parity explain {FAULTY}" in page
    assert "probe 1: <boundary 15>" in files.markdown.read_text(encoding="utf-8")


def test_commands_choose_the_checkpoint_of_the_run(workspace: Workspace, red: list[Record], tmp_path: Path) -> None:
    chosen = Workspace(replace(workspace.choice, profile=workspace.profile))
    content = content_of(written(chosen, red, tmp_path))

    assert [note["command"] for note in content["first_red"]["notes"]] == [
        f"python -m parity bisect {MODEL} --case {CASE} --profile tiny",
        f"python -m parity explain {FAULTY} --case {CASE} --profile tiny",
    ]
    assert content["command"] == f"python -m parity run {MODEL} --profile tiny --case {CASE}"


def test_texts_of_records_are_no_markup(workspace: Workspace, red: list[Record], tmp_path: Path) -> None:
    evil = [replace(r, detail="<script>alert(1)</script>") if r.verdict == "different" else r for r in red]

    assert "<script>alert" not in written(workspace, evil, tmp_path).page.read_text(encoding="utf-8")


def test_the_same_records_give_the_same_bytes(workspace: Workspace, red: list[Record], tmp_path: Path) -> None:
    files = written(workspace, red, tmp_path)
    before = [path.read_bytes() for path in (files.page, files.json, files.markdown)]
    report.write([workspace], records=tmp_path / "records", folder=tmp_path / "report")

    assert [path.read_bytes() for path in (files.page, files.json, files.markdown)] == before


# ---- pictures, provenance


def test_unpatchify_undoes_patchify() -> None:
    pixels = np.random.default_rng(0).standard_normal((64, 96, 3)).astype(np.float32)

    assert np.array_equal(unpatchify(patchify(pixels), (4, 6)), pixels)


def test_the_difference_image_is_black_but_where_values_differ() -> None:
    expected = np.random.default_rng(0).standard_normal((64, 96, 3)).astype(np.float32)
    actual = expected.copy()
    actual[33, 70, 1] += 1e-6
    grid, rows = (4, 6), patchify(expected)

    assert not np.asarray(difference_image(rows, rows, grid)).any()
    lit = np.argwhere(np.asarray(difference_image(patchify(actual), rows, grid)))
    assert lit.tolist() == [[33, 70, 1]]


class OneValueOff:
    """A port whose preprocessor is wrong in one value."""

    def __init__(self, pipeline: Any) -> None:
        self.pipeline, self.stop_ids = pipeline, pipeline.stop_ids

    def preprocess(self, images: Any) -> list[Pixels]:
        (pixels,) = self.pipeline.preprocess(images)
        pixels.pixel_values[5, 7] += 0.25
        return [pixels]


def test_the_preprocessors_differences_are_counted(
    workspace: Workspace, red: list[Record], red_files: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (right,) = content_of(red_files)["pictures"]
    assert (right["differing"], right["total"], right["max_abs"]) == (0, 371_712, 0.0)
    real: Callable[[Workspace], Any] = pictures.pipeline
    monkeypatch.setattr(pictures, "pipeline", lambda workspace: OneValueOff(real(workspace)))
    files = written(workspace, red, tmp_path)

    (wrong,) = content_of(files)["pictures"]
    assert (wrong["differing"], wrong["max_abs"]) == (1, 0.25)
    assert '<figcaption class="broken">' in files.page.read_text(encoding="utf-8")


def test_what_cannot_be_had_is_told_in_its_place(
    workspace: Workspace, green: list[Record], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_dump(self: Workspace, name: str) -> None:
        raise UnjudgedError(f"{name}.json is missing; write it: python -m parity dumps youtu_vl")

    def no_port(workspace: Workspace) -> None:
        raise InputError("tokenizer.json is missing; export again")

    monkeypatch.setattr(Workspace, "dump", no_dump)
    for module in (pictures, provenance):
        monkeypatch.setattr(module, "pipeline", no_port)
    page = written(workspace, green, tmp_path).page.read_text(encoding="utf-8")

    assert page.count("square.json is missing; write it: python -m parity dumps youtu_vl") == 2
    assert page.count("tokenizer.json is missing; export again") == 2
    assert "<h1>parity: equal</h1>" in page


def test_provenance_says_what_was_judged_and_with_what(workspace: Workspace, red_files: Written) -> None:
    parts = {part["title"]: dict(part["rows"]) for part in content_of(red_files)["provenance"]}
    machine, model = parts["machine and packages"], parts[MODEL]

    assert model["checkpoint hash"] == workspace.fingerprint
    assert re.fullmatch(r"[0-9a-f]{64}", model["tokenizer.json"])
    assert model["stop ids"] == "1537"
    assert '"eos_token_id"' in model["generation_config.json"]
    assert machine["ncnn"].startswith("1.0.")
    assert "use_fp16_packed" in machine["ncnn options off"]
    assert machine["threads of a graph"] == "1"
    assert all(machine[name] for name in ("machine", "CPU features", "Python", "torch"))
    page = red_files.page.read_text(encoding="utf-8")
    for name in ("Apache-2.0", "CC BY 2.0", model["tokenizer.json"]):
        assert name in page


def test_times_and_memory_are_read_where_they_were_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "home", lambda: tmp_path)
    path = tmp_path / "bench-youtu_vl.json"
    assert provenance._bench(MODEL) == [["not measured", "python -m parity bench youtu_vl"]]
    figure = {"name": "peak memory, streaming", "unit": "MB", "values": [600.0, 700.0, 800.0], "goal": "<= 2500"}
    about = {"machine": "Linux", "cores": 2, "memory_gib": 23.5, "options": "one thread each"}
    path.write_text(json.dumps(about | {"figures": [figure]}), encoding="utf-8")
    assert provenance._bench(MODEL)[-1] == ["peak memory, streaming", "700 MB (600 to 800); goal <= 2500"]
    path.write_text("{", encoding="utf-8")
    assert re.match(r"bench-youtu_vl\.json: .*; measure again: python -m parity bench", provenance._bench(MODEL)[0][1])


def test_junit_properties_name_the_worst_and_the_first_red(red: list[Record]) -> None:
    found = junit_properties(red)

    assert all(isinstance(value, str) for value in found.values())
    assert found["parity.comparisons"] == str(len(red))
    assert found["parity.different"] == str(sum(record.verdict == "different" for record in red))
    assert found["parity.isolated.worst"] == f"{FAULTY} hidden [fp32, square, isolated]"
    assert float(found["parity.isolated.floors"]) > 1e4
    assert found["parity.first_red"] == FAULTY
    assert junit_properties([]) == {f"parity.{name}": "0" for name in ("comparisons", "equal", "different", "unjudged")}


# ---- as a browser shows it


def browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.fail(
            "no Chromium is installed, so nobody has seen the page; run: apt-get install -y chromium", pytrace=False
        )
    return found


def browse(page: Path, folder: Path, *arguments: str, fragment: str = "") -> str:
    """What headless Chromium prints about a page; it asks no network."""
    command = [browser(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"]
    command += [f"--user-data-dir={folder / 'profile'}", *arguments, f"{page.as_uri()}{fragment}"]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def screenshot(page: Path, folder: Path) -> np.ndarray:
    """The page as pixels (H, W, 3)."""
    path = folder / "page.png"
    browse(page, folder, f"--screenshot={path}", f"--window-size={SIZE[0]},{SIZE[1]}")
    with Image.open(path) as picture:
        return np.array(picture.convert("RGB"))


def where(pixels: np.ndarray, colour: str) -> np.ndarray:
    """Rows and columns (N, 2) of the pixels of a colour."""
    wanted = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
    return np.argwhere((np.abs(pixels.astype(int) - wanted) <= 2).all(axis=-1))


def lines_of_text(inked: np.ndarray) -> int:
    """How many bands of rows hold inked pixels (H, W), with empty rows between them."""
    rows = np.asarray(inked.any(axis=1))
    return int(np.count_nonzero(rows[1:] & ~rows[:-1]))


def dark(pixels: np.ndarray) -> np.ndarray:
    return np.asarray(pixels.max(axis=-1) < 110)


def green_ink(pixels: np.ndarray) -> np.ndarray:
    """Pixels (H, W) in the colour of the word "equal"."""
    r, g, b = np.moveaxis(pixels.astype(int), -1, 0)
    return np.asarray((g - r > 40) & (g - b > 40))


@pytest.mark.browser
def test_a_browser_shows_card_charts_and_table(red_files: Written, tmp_path: Path) -> None:
    pixels = screenshot(red_files.page, tmp_path)
    assert pixels.shape == (SIZE[1], SIZE[0], 3)

    blue, orange, red = (where(pixels, colour) for colour in (ISOLATED, CHAINED, RED))
    assert min(map(len, (blue, orange, red))) > 1000
    for points in (blue, orange):  # as wide as the page and four charts high
        assert np.ptp(points[:, 1]) > 800
        assert np.ptp(points[:, 0]) > 700
    top, foot = int(red[:, 0].min()), int(blue[:, 0].max())
    assert top < 60  # the verdict's own colour
    assert lines_of_text(dark(pixels[: blue[:, 0].min(), 100:700])) > 8  # verdict, card
    assert lines_of_text(dark(pixels[foot + 60 :, 80:400])) > 15  # the table's ids
    assert lines_of_text(green_ink(pixels[foot + 60 :, 450:560])) > 15  # and their words


@pytest.mark.browser
def test_a_blank_page_is_seen(tmp_path: Path) -> None:
    (tmp_path / "blank.html").write_text("<!doctype html>", encoding="utf-8")
    pixels = screenshot(tmp_path / "blank.html", tmp_path)

    assert len(where(pixels, ISOLATED)) == lines_of_text(dark(pixels)) == 0


@pytest.mark.browser
def test_the_browser_runs_the_script_and_opens_the_row_of_a_link(red_files: Written, tmp_path: Path) -> None:
    dom = browse(red_files.page, tmp_path, "--dump-dom", fragment=f"#{FAULTY}")
    bodies = dict(re.findall(r'<tbody id="([^"]+)".*?<tr class="more"( hidden="")?>', dom, re.DOTALL))

    assert re.search(r'id="count">170 of 170<', dom)  # only the script writes that
    assert [name for name, hidden in bodies.items() if not hidden] == [FAULTY]
    assert dom.count("<svg") == 4
    assert dom.count("data:image/png;base64,") == 2
    for text in ("parity: different", FAULTY, "first red", *MEANINGS["origin"].split(":")[:1], "CC BY 2.0"):
        assert text in dom


@pytest.mark.browser
def test_the_filter_leaves_what_it_names(red_files: Written, tmp_path: Path) -> None:
    page = red_files.page.read_text(encoding="utf-8")
    typed = tmp_path / "typed.html"
    wanted = 'text.value = "Vision.layer origin"; text.dispatchEvent(new Event("input"));'
    typed.write_text(page.replace("</script>", f"{wanted}</script>"), encoding="utf-8")
    dom = browse(typed, tmp_path, "--dump-dom")

    assert re.search(r'id="count">1 of 170<', dom)
    visible = re.findall(r'<tbody id="([^"]+)"(?:(?! hidden)[^>])*>', dom)
    assert visible == [FAULTY]


def test_without_a_browser_the_test_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(pytest.fail.Exception, match="run: apt-get install -y chromium"):
        browser()
