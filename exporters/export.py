"""Export a checkpoint: structures through pnnx, every graph's weights in the learnt layout, one model folder.

All of it stands in a store keyed by content; what is there is not made again.
"""

import importlib
import json
import os
import shutil
from collections.abc import Callable
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from exporters import param
from exporters.sources import code_of, source_of
from harness.errors import UnjudgedError
from harness.graphs import Graph, Port, Structure
from harness.ids import suggest
from harness.store import Store, file_sha256, key

HERE = Path(__file__).parent
TOOLS = ("export.py", "layout.py", "param.py", "pnnx.py")  # they decide what is written
AUDIT = "audit.py"  # decides what may be used
VERSIONS = ("ncnn", "pnnx", "torch")
MANIFEST, COMPLETE = "manifest.json", "complete.json"
# Relative L2 of the rewritten layer against the reference's, both in float64: there equal layers differ by
# 1e-15, while in float32 the rounding of a wide layer hides an eps of 1e-5 for 1e-6.
SELF_CHECK = 1e-9
TABLE_DTYPES = {"float32": np.float32, "float16": np.float16}


class Exporter:
    """Exports one checkpoint of one model into a store.

    arguments: what chooses this checkpoint on the command line, for messages.
    """

    def __init__(self, model: str, checkpoint: Path, fingerprint: str, store: Store, *, arguments: str = "") -> None:
        self.model, self.checkpoint, self.fingerprint, self.store = model, checkpoint, fingerprint, store
        self.command = f"python -m parity export {arguments or f'{model} --checkpoint {checkpoint}'}"
        self.description = importlib.import_module(f"references.{model}")
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        self.sizes = self.description.read_sizes(config, checkpoint)
        self.graphs: dict[str, Graph] = {graph.id: graph for graph in self.description.graphs(self.sizes)}
        self.versions = {name: version(name) for name in VERSIONS}

    def structure(self, structure: Structure) -> Path:
        """Folder with graph.param and layout.json, converted by pnnx unless it is in the store."""
        name = self._structure_key(structure)
        return self._get("structure", name, lambda folder: self._convert(structure, folder), structure.name)

    def graph(self, graph_id: str, *, verify: bool = False) -> Path:
        """Folder with graph.param and graph.bin of one graph. Raises UnjudgedError on an unknown id.

        verify: build it again when a file was altered, not only when one is missing or cut short.
        """
        graph = self.graphs.get(graph_id)
        if graph is None:
            near = suggest(graph_id, self.graphs)
            raise UnjudgedError(f"graph {graph_id} is unknown; did you mean {near}?")
        name = self.graph_key(graph)
        return self._get("graph", name, lambda folder: self._write_graph(graph, folder), graph_id, verify)

    def base(self, *, table: str = "float32", verify: bool = False) -> Path:
        """Folder with what the runtime needs besides graphs: vocabulary table, final norm, tokenizer."""
        name = key(checkpoint=self.fingerprint, table=table, tools=self._tools, versions=self.versions)
        what = f"{self.model} base"
        return self._get("base", name, lambda folder: self._write_base(folder, table), what, verify)

    def model_folder(
        self,
        *,
        table: str = "float32",
        each: Callable[[str], None] = lambda graph_id: None,
        verify: bool = False,
    ) -> Path:
        """Folder for the runtime: base, graphs, manifest.json. `each` is told every graph that is done.

        verify: also make good what was altered since it was built; reads every file.
        """
        keys = [self.graph_key(graph) for graph in self.graphs.values()]
        name = key(graphs=keys, table=table, checkpoint=self.fingerprint)
        return self._get("model", name, lambda folder: self._assemble(folder, table, each, verify), self.model, verify)

    def graph_key(self, graph: Graph) -> str:
        """Key of a graph: its structure, its checkpoint, its id, and the audit that it passed."""
        structure = self._structure_key(graph.structure)
        return key(structure=structure, checkpoint=self.fingerprint, graph=graph.id, audit=self._audit)

    def rewritten(self, graph: Graph) -> Any:
        """The rewritten layer of a graph with the checkpoint's weights."""
        module = self.new_module(graph.structure)
        read = self._reference.checkpoint.tensor
        state = {name: read(self._checkpoint_name(graph, module, name)) for name in module.state_dict()}
        module.load_state_dict(state, strict=True, assign=True)
        return module.eval().requires_grad_(False)

    def new_module(self, structure: Structure) -> Any:
        """The rewritten layer of a structure, without the checkpoint's weights."""
        return self._rewrites[structure.name](self.sizes)

    def _get(self, kind: str, name: str, build: Callable[[Path], None], what: str, verify: bool = False) -> Path:
        return self.store.get(kind, name, build, verify=verify, name=what, command=self.command)

    def _structure_key(self, structure: Structure) -> str:
        if structure.name not in self._structure_keys:
            self._structure_keys[structure.name] = key(
                rewrite=source_of(self._rewrites[structure.name]),
                structure=repr(structure),
                sizes=repr(self.sizes),
                tools=self._tools,
                versions=self.versions,
            )
        return self._structure_keys[structure.name]

    @cached_property
    def _structure_keys(self) -> dict[str, str]:
        return {}

    @cached_property
    def _tools(self) -> list[str]:
        return [code_of(HERE / name) for name in TOOLS]

    @cached_property
    def _audit(self) -> str:
        return code_of(HERE / AUDIT)

    @cached_property
    def _rewrites(self) -> dict[str, Any]:
        rewrites: dict[str, Any] = importlib.import_module(f"exporters.{self.model}").REWRITES
        return rewrites

    @cached_property
    def _reference(self) -> Any:
        from references.dumping import open_reference

        return open_reference(self.model, self.checkpoint)

    def _checkpoint_name(self, graph: Graph, module: Any, name: str) -> str:
        for own, prefix in type(module).PREFIXES.items():
            if name.startswith(own):
                return str(prefix.format(index=graph.index)) + name.removeprefix(own)
        raise UnjudgedError(
            f"{graph.id}: no prefix of {type(module).__name__}.PREFIXES fits its tensor {name}; "
            f"mend it in {self._rewrite_file}"
        )

    @property
    def _rewrite_file(self) -> str:
        return f"exporters/{self.model}.py"

    def _convert(self, structure: Structure, folder: Path) -> None:
        from exporters import layout, pnnx

        module = self.new_module(structure)
        layout.set_probe_weights(module)
        work = folder / "work"
        work.mkdir()
        text, weights = pnnx.convert(module, structure, work)
        try:
            layers = param.plain_reshapes(param.isolate_inputs(param.unique_names(param.parse(text))))
            entries = layout.learn(weights, param.blobs(layers), module)
        except (KeyError, ValueError, UnjudgedError) as error:
            what = f"pnnx wrote a layer of type {error}, which is not known" if type(error) is KeyError else error
            raise UnjudgedError(
                f"{structure.name}: {what}; rewrite {type(module).__name__} in {self._rewrite_file}"
            ) from error
        shutil.rmtree(work)
        (folder / "graph.param").write_text(param.write(layers), encoding="utf-8", newline="\n")
        (folder / "layout.json").write_text(json.dumps(list(map(vars, entries)), indent=1), encoding="utf-8")

    def _write_graph(self, graph: Graph, folder: Path) -> None:
        from exporters import layout
        from exporters.audit import audit

        module = self.rewritten(graph)
        self._self_check(graph, module)  # before the converter, which takes longer
        structure = self.structure(graph.structure)
        text = (structure / "graph.param").read_text(encoding="utf-8")
        (folder / "graph.param").write_text(text, encoding="utf-8", newline="\n")
        entries = json.loads((structure / "layout.json").read_text(encoding="utf-8"))
        with (folder / "graph.bin").open("wb") as file:
            layout.write(file, [layout.Entry(**entry) for entry in entries], layout.tensors(module))
        findings = audit(graph.structure, text, folder / "graph.bin")
        if findings:
            raise UnjudgedError(f"{graph.id}: the exported graph fails its audit: " + "; ".join(findings))

    def _self_check(self, graph: Graph, module: Any) -> None:
        """The rewritten layer must equal the reference's before it may be exported."""
        import torch

        from harness.metrics import measure
        from references.dumping import random_inputs

        inputs = random_inputs(graph, length=6)
        expected = self._reference.run(graph, inputs, double=True)
        with torch.no_grad():
            outputs = module.double()(*(inputs[port.name][None].double() for port in graph.structure.inputs))
        module.float()  # to double and back changes no bit
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        for port, actual in zip(graph.structure.outputs, outputs, strict=True):
            error = measure(actual[0].numpy(), expected[port.name].numpy()).rel_l2
            if not error <= SELF_CHECK:
                raise UnjudgedError(
                    f"{graph.id}: output {port.name} of the rewritten layer differs from the reference's: "
                    f"rel_l2 {error:.1e}, but should be <= {SELF_CHECK:.0e}; "
                    f"mend {type(module).__name__} in {self._rewrite_file}"
                )

    def _write_base(self, folder: Path, table: str) -> None:
        checkpoint = self._reference.checkpoint
        weights = checkpoint.tensor("model.embed_tokens.weight").numpy()
        weights.astype(TABLE_DTYPES[table]).tofile(folder / "embed_tokens.bin")
        checkpoint.tensor("model.norm.weight").numpy().tofile(folder / "norm.bin")
        for path in checkpoint.side_files():
            shutil.copyfile(path, folder / path.name)
        entry = {"file": "embed_tokens.bin", "dtype": table, "shape": list(weights.shape)}
        self._write_manifest(folder, entry, [])

    def _assemble(self, folder: Path, table: str, each: Callable[[str], None], verify: bool) -> None:
        base = self.base(table=table, verify=verify)
        for path in base.iterdir():
            if path.name not in (MANIFEST, COMPLETE):
                link_or_copy(path, folder / path.name)
        entries = []
        for graph_id, graph in self.graphs.items():
            entries.append(self._place(graph, self.graph(graph_id, verify=verify), folder))
            each(graph_id)
        entry = json.loads((base / MANIFEST).read_text(encoding="utf-8"))["table"]
        self._write_manifest(folder, entry, entries)

    def _write_manifest(self, folder: Path, table: dict[str, Any], entries: list[dict[str, Any]]) -> None:
        files = {path.name: file_sha256(path) for path in sorted(folder.iterdir()) if path.is_file()}
        manifest = {
            "model": self.model,
            "checkpoint": self.fingerprint,
            "versions": self.versions,
            "options": {"fp16": 0, "precision": "fp32"},
            "table": table,
            "files": files,
            "graphs": entries,
        }
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8", newline="\n")

    def entry(self, graph: Graph) -> dict[str, Any]:
        """A graph's line of the manifest, for the files of its own folder in the store."""
        hashes = json.loads((self.graph(graph.id) / COMPLETE).read_text(encoding="utf-8"))
        names = {suffix: f"graph.{suffix}" for suffix in ("param", "bin")}
        return {
            "id": graph.id,
            **names,
            "inputs": _ports(graph.structure.inputs),
            "outputs": _ports(graph.structure.outputs),
            "sha256": {name: hashes[name]["sha256"] for name in names.values()},
        }

    def _place(self, graph: Graph, built: Path, folder: Path) -> dict[str, Any]:
        entry = self.entry(graph)
        for suffix in ("param", "bin"):
            target = folder / f"{graph.id}.{suffix}"
            target.parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(built / entry[suffix], target)
            entry["sha256"][f"{graph.id}.{suffix}"] = entry["sha256"].pop(entry[suffix])
            entry[suffix] = f"{graph.id}.{suffix}"
        return entry


def link_or_copy(source: Path, target: Path) -> None:
    """A second name for a file where the file system can, else a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _ports(ports: tuple[Port, ...]) -> list[dict[str, Any]]:
    return [{"name": port.name, "shape": list(port.shape)} for port in ports]
