#!/usr/bin/env bash
# quantize_dynamic of ONNX Runtime makes a tied output layer slower work: its product stays in float32.
# Guess: a table that is embedding and, transposed, output layer becomes int8, and its product an integer product.
# Seen: the table is stored as int8, and made float32, transposed and multiplied as such in each run. Nothing warns.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'END'
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import quantize_dynamic

table = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)


def operators(nodes, weights):
    ends = helper.make_tensor_value_info("i", TensorProto.INT64, ["n"]), helper.make_tensor_value_info("y", 1, ["n", 64])
    weights = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "one", [ends[0]], [ends[1]], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), "whole.onnx")
    quantize_dynamic("whole.onnx", "int8.onnx")
    return sorted(node.op_type for node in onnx.load("int8.onnx").graph.node)


embed = helper.make_node("Gather", ["e", "i"], ["h"])
tied = [embed, helper.make_node("Transpose", ["e"], ["t"], perm=[1, 0]), helper.make_node("MatMul", ["h", "t"], ["y"])]
own = operators([embed, helper.make_node("MatMul", ["h", "t"], ["y"])], {"e": table, "t": table.T.copy()})
shared = operators(tied, {"e": table})
print(f"two tables: {own}\none table: {shared}")
assert "MatMulInteger" in own and "MatMulInteger" not in shared
assert "MatMul" in shared and "Transpose" in shared
END
