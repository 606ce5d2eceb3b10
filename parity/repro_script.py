"""Runs graph.param with inputs.npz and compares with expected.npz (fp32 PyTorch). Needs numpy and ncnn."""

import json
import sys
from pathlib import Path

import ncnn
import numpy as np

folder = Path(__file__).parent
about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
inputs, expected = np.load(folder / "inputs.npz"), np.load(folder / "expected.npz")
net = ncnn.Net()
for option in dir(net.opt):  # fp32 arithmetic only
    if option.startswith(("use_fp16", "use_bf16", "use_int8", "use_vulkan")):
        setattr(net.opt, option, False)
if net.load_param(str(folder / "graph.param")) or net.load_model(str(folder / "graph.bin")):
    sys.exit("ncnn cannot load the graph")
extractor = net.create_extractor()
arrays = {name: np.ascontiguousarray(inputs[name]) for name in inputs.files}  # named: a Mat borrows its array
for number, array in enumerate(arrays.values()):
    extractor.input(f"in{number}", ncnn.Mat(array).clone())
different = False
for number, name in enumerate(expected.files):
    code, mat = extractor.extract(f"out{number}")
    wanted = expected[name]
    actual = np.array(mat).reshape(wanted.shape) if code == 0 else np.full_like(wanted, np.nan)
    error = float(np.linalg.norm((actual - wanted).ravel()) / np.linalg.norm(wanted.ravel()))
    different = different or not error <= about["rel_l2_max"]
    print(f"{about['graph']} {name} {wanted.shape}: rel_l2 {error:.2e}, should be <= {about['rel_l2_max']:.0e}")
print(f"ncnn {ncnn.__version__}, numpy {np.__version__}; written with {about['versions']}")
sys.exit(1 if different else 0)
