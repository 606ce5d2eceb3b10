"""Export a checkpoint: structures through pnnx, every graph's weights in the learnt layout, one model folder.

All of it stands in a store keyed by content; what is there is not made again, and an interruption loses no more than
the graph that was being written.
"""

import copy
import importlib
import json
import shutil
from collections.abc import Callable
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from exporters import model_folder, param
from exporters.folders import concatenate, link_or_copy
from exporters.model_folder import BIN
from exporters.sources import code_of, source_of
from harness.errors import UnjudgedError
from harness.graphs import Graph, Structure
from harness.ids import suggest
from harness.store import Build, Hashes, Store, key, listed_sha256

HERE = Path(__file__).parent
# They decide what is written.
TOOLS = (
    *("export.py", "layout.py", "linear.py", "output.py", "param.py", "pnnx.py", "selfcheck.py"),
    *("tensors.py", "weights.py"),
)
FOLDERS = ("folders.py", "model_folder.py")  # they decide how a model folder is laid out
WRITERS = ("layout.py", "output.py", "weights.py")  # they decide the bytes of weights
AUDIT = "audit.py"  # decides what may be used
VERSIONS = ("ncnn", "pnnx", "torch")
PARTS = "weights.json"
WEIGHTS = "weights.bin"
# Relative L2 of the rewritten layer against the reference's, both in float64: there equal layers differ by
# 1e-15, while in float32 the rounding of a wide layer hides an eps of 1e-5 for 1e-6.
SELF_CHECK = 1e-9


class Exporter:
    """Exports one checkpoint of one model into a store.

    arguments: what chooses this checkpoint on the command line, for messages.
    """

    def __init__(self, model: str, checkpoint: Path, fingerprint: str, store: Store, *, arguments: str = "") -> None:
        self.model, self.checkpoint, self.fingerprint = model, checkpoint, fingerprint
        self.store = self.graphs_store = store
        self.arguments = arguments or f"{model} --checkpoint {checkpoint}"
        self.command = f"python -m parity export {self.arguments}"
        self.description = importlib.import_module(f"references.{model}")
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        self.sizes = self.description.read_sizes(config, checkpoint)
        self.graphs: dict[str, Graph] = {graph.id: graph for graph in self.description.graphs(self.sizes)}
        self.shapes: dict[str, tuple[int, ...]] = self.description.tensors(self.sizes)
        self.versions = {name: version(name) for name in VERSIONS}
        self._structure_keys: dict[str, str] = {}
        self._templates: dict[str, set[str]] = {}  # structure -> the checkpoint's names, {index} for the layer's

    def over(self, store: Store) -> "Exporter":
        """The same exporter with another store for graphs and their weights."""
        other = copy.copy(self)
        other.graphs_store = store
        return other

    def structure(self, structure: Structure) -> Path:
        """Folder with graph.param and layout.json, converted by pnnx unless it is in the store."""
        name = self._structure_key(structure)
        return self._get("structure", name, lambda folder: self._convert(structure, folder), structure.name)

    def graph(self, graph_id: str, *, verify: bool = False) -> Path:
        """Folder with graph.param of one graph, and graph.bin unless its weights are several files: see `weights`.

        Raises UnjudgedError on an unknown id.
        verify: build it again when a file was altered, not only when one is missing or cut short.
        """
        graph = self.graphs.get(graph_id)
        if graph is None:
            near = suggest(graph_id, self.graphs)
            raise UnjudgedError(f"graph {graph_id} is unknown; did you mean {near}?")
        name = self.graph_key(graph)
        return self._get("graph", name, lambda folder: self._write_graph(graph, folder, verify), graph_id, verify)

    def weights(self, graph_id: str, *, verify: bool = False) -> list[Path]:
        """The files of a graph's weights, in the order in which ncnn reads them. Graphs may share some."""
        names = json.loads((self.graph(graph_id, verify=verify) / PARTS).read_text(encoding="utf-8"))
        return [self._weights(self.graphs[graph_id], n, name, verify) for n, name in enumerate(names)]

    def base(self, *, table: str = "float32", verify: bool = False) -> Path:
        """Folder with what the runtime needs besides graphs: vocabulary table, final norm, tokenizer."""
        build = partial(model_folder.write_base, self, table=table)
        return self._get("base", self._base_key(table), build, f"{self.model} base", verify)

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
        name = key(graphs=keys, table=table, checkpoint=self.fingerprint, folders=self._folders)

        def build(folder: Path) -> Hashes:
            return model_folder.assemble(self, folder, table, each, verify)

        return self._get("model", name, build, self.model, verify)

    def entry(self, graph: Graph) -> dict[str, Any]:
        """A graph's line of the manifest, for its files where they are in the store."""
        return model_folder.entry(self, graph)

    def copy_graph(self, graph_id: str, target: Path) -> None:
        """Make a folder with graph.param and graph.bin of one graph, for ncnn's own loader."""
        target.mkdir(parents=True)
        shutil.copyfile(self.graph(graph_id) / "graph.param", target / "graph.param")
        concatenate(self.weights(graph_id), target / BIN)

    def forget_tensors(self) -> None:
        """Let go of the checkpoint's tensors that are kept for the next graph."""
        self._tensors.clear()

    def holds(self, graph: Graph) -> bool:
        """Whether a graph is in the store."""
        return self.graphs_store.holds("graph", self.graph_key(graph))

    def holds_base(self, table: str) -> bool:
        """Whether the base is in the store."""
        return self.store.holds("base", self._base_key(table))

    def sources(self, graph: Graph) -> set[str]:
        """The checkpoint's names of a graph's tensors."""
        if graph.structure.name not in self._templates:
            module = self.new_module(graph.structure)
            names = {self._template(graph.id, module, name) for name in module.state_dict()}
            self._templates[graph.structure.name] = names
        return {template.format(index=graph.index) for template in self._templates[graph.structure.name]}

    def graph_key(self, graph: Graph) -> str:
        """Key of a graph: its structure, its checkpoint, its id, and the audit that it passed."""
        structure = self._structure_key(graph.structure)
        return key(structure=structure, checkpoint=self.fingerprint, graph=graph.id, audit=self._audit)

    def rewritten(self, graph: Graph, *, double: bool = False) -> Any:
        """The rewritten layer of a graph with the checkpoint's weights, which it shares: not to be changed in place."""
        module = self.new_module(graph.structure)
        read = self._tensors.double if double else self._tensors.single
        names = {name: self._template(graph.id, module, name) for name in module.state_dict()}
        state = {name: read(template.format(index=graph.index)) for name, template in names.items()}
        module.load_state_dict(state, strict=True, assign=True)
        module = module.double() if double else module  # the constants
        return module.eval().requires_grad_(False)

    def new_module(self, structure: Structure) -> Any:
        """The rewritten layer of a structure, its weights without values."""
        from exporters.tensors import Uninitialised

        with Uninitialised():
            return self._rewrites[structure.name](self.sizes)

    def _base_key(self, table: str) -> str:
        return key(checkpoint=self.fingerprint, table=table, folders=self._folders, versions=self.versions)

    def _get(self, kind: str, name: str, build: Build, what: str, verify: bool = False) -> Path:
        store = self.graphs_store if kind in ("graph", "weights") else self.store
        return store.get(kind, name, build, verify=verify, name=what, command=self.command)

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
    def _tools(self) -> list[str]:
        return [code_of(HERE / name) for name in TOOLS]

    @cached_property
    def _folders(self) -> list[str]:
        return [code_of(HERE / name) for name in FOLDERS]

    @cached_property
    def _writers(self) -> list[str]:
        return [code_of(HERE / name) for name in WRITERS]

    @cached_property
    def _audit(self) -> str:
        return code_of(HERE / AUDIT)

    @cached_property
    def _rewrites(self) -> dict[str, Any]:
        rewrites: dict[str, Any] = importlib.import_module(f"exporters.{self.model}").REWRITES
        return rewrites

    @cached_property
    def reference(self) -> Any:
        """The model's reference over the checkpoint."""
        from references.dumping import open_reference

        return open_reference(self.model, self.checkpoint)

    @cached_property
    def _tensors(self) -> Any:
        from exporters.tensors import Tensors

        return Tensors(self.reference.checkpoint.tensor)

    def _template(self, where: str, module: Any, name: str) -> str:
        """The checkpoint's name of a module's tensor, with {index} for the layer's."""
        for own, prefix in type(module).PREFIXES.items():
            if name.startswith(own):
                return str(prefix) + name.removeprefix(own)
        raise UnjudgedError(
            f"{where}: no prefix of {type(module).__name__}.PREFIXES fits its tensor {name}; "
            f"mend it in {self._rewrite_file}"
        )

    @property
    def _rewrite_file(self) -> str:
        return f"exporters/{self.model}.py"

    def _convert(self, structure: Structure, folder: Path) -> None:
        from exporters import layout, linear, pnnx, weights

        module = self.new_module(structure)
        layout.set_probe_weights(module)
        work = folder / "work"
        work.mkdir()
        text, converted = pnnx.convert(module, structure, work)
        try:
            layers = param.tidy(text)
            entries = layout.learn(converted, param.blobs(layers), module)
            entries = weights.traced(entries, module, partial(self._template, structure.name, module))
            entries, layers = linear.lay_out_entries(layers, entries), linear.lay_out(layers)
        except (KeyError, ValueError, UnjudgedError) as error:
            what = f"pnnx wrote a layer of type {error}, which is not known" if type(error) is KeyError else error
            raise UnjudgedError(
                f"{structure.name}: {what}; rewrite {type(module).__name__} in {self._rewrite_file}"
            ) from error
        shutil.rmtree(work)
        (folder / "graph.param").write_text(param.write(layers), encoding="utf-8", newline="\n")
        (folder / "layout.json").write_text(json.dumps(list(map(vars, entries)), indent=1), encoding="utf-8")

    def _write_graph(self, graph: Graph, folder: Path, verify: bool) -> Hashes:
        from exporters import weights
        from exporters.audit import audit

        self._self_check(graph, self.rewritten(graph, double=True))  # before the converter, which takes longer
        structure = self.structure(graph.structure)
        text = (structure / "graph.param").read_text(encoding="utf-8")
        (folder / "graph.param").write_text(text, encoding="utf-8", newline="\n")
        names = [
            key(recipe=part.recipe(), checkpoint=self.fingerprint, writers=self._writers)
            for part in weights.parts(weights.read_entries(structure), graph)
        ]
        (folder / PARTS).write_text(json.dumps(names), encoding="utf-8")
        files = [self._weights(graph, number, name, verify) for number, name in enumerate(names)]
        findings = audit(graph.structure, text, *files)
        if findings:
            raise UnjudgedError(f"{graph.id}: the exported graph fails its audit: " + "; ".join(findings))
        if len(files) > 1:
            return {}
        link_or_copy(files[0], folder / BIN)
        return {BIN: listed_sha256(files[0].parent, files[0].name)}

    def _weights(self, graph: Graph, number: int, name: str, verify: bool) -> Path:
        """The file of one part of a graph's weights."""
        build = partial(self._write_weights, graph, number)
        return self._get("weights", name, build, f"{graph.id} weights", verify) / WEIGHTS

    def _write_weights(self, graph: Graph, number: int, folder: Path) -> Hashes:
        from exporters import layout, weights

        part = weights.parts(weights.read_entries(self.structure(graph.structure)), graph)[number]
        constants = layout.constants(self.new_module(graph.structure))
        values = {
            entry.tensor: constants[entry.tensor] if entry.tensor in constants else self._tensors.single(source).numpy()
            for entry, source in zip(part.entries, part.sources, strict=True)
        }
        try:
            return weights.write(folder / WEIGHTS, part, values)
        except ValueError as error:
            what = f"{type(self.new_module(graph.structure)).__name__} in {self._rewrite_file}"
            raise UnjudgedError(f"{graph.id}: {error}; mend {what}") from error

    def _self_check(self, graph: Graph, module: Any) -> None:
        """The rewritten layer, in float64, must equal the reference's before it may be exported."""
        from exporters import selfcheck

        for port, error in selfcheck.errors(self.model, self.sizes, graph, module, self._tensors.double):
            if not error <= SELF_CHECK:
                raise UnjudgedError(
                    f"{graph.id}: output {port} of the rewritten layer differs from the reference's: "
                    f"rel_l2 {error:.1e}, but should be <= {SELF_CHECK:.0e}; "
                    f"mend {type(module).__name__} in {self._rewrite_file}"
                )
