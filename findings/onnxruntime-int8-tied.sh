#!/usr/bin/env bash
# quantize_dynamic of ONNX Runtime leaves the product of a tied output layer in float32, or stores the table twice.
# Guess: a table that is embedding and, transposed, output layer becomes int8, and its product an integer product.
# Seen: the table is stored as int8, and made float32, transposed and multiplied by MatMul in each run. After
# quant_pre_process the product is of integers, and the file holds the table and its transpose.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6 sympy==1.14.0
cd "$folder"
venv/bin/python - <<'END'
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import quantize_dynamic
from onnxruntime.quantization.shape_inference import quant_pre_process

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
assert "MatMul" in shared and "Transpose" in shared and "DequantizeLinear" in shared
stored = {one.name: one.data_type for one in onnx.load("int8.onnx").graph.initializer if one.dims == [64, 16]}
assert set(stored.values()) <= {TensorProto.INT8, TensorProto.UINT8} and stored
quant_pre_process("whole.onnx", "folded.onnx", skip_symbolic_shape=True)
quantize_dynamic("folded.onnx", "int8.onnx")
graph = onnx.load("int8.onnx").graph
sizes = sorted(tuple(one.dims) for one in graph.initializer if one.dims)
print(f"after quant_pre_process: {sorted(node.op_type for node in graph.node)}, tables {sizes}")
assert "MatMulInteger" in {node.op_type for node in graph.node} and sizes == [(16, 64), (64, 16)]
END
