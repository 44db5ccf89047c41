#!/usr/bin/env bash
# After quantize_dynamic of ONNX Runtime, the result for a text depends on the others in its batch.
# Guess: weights are int8 and activations have a scale for each row, so a row has the same result alone and in a
# batch.
# Seen: one scale serves all rows. Beside a row 100 times as large, the error of the first row grows more than ten times.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'END'
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic

source = np.random.default_rng(0)
weight, x = (source.normal(size=shape).astype(np.float32) for shape in ((16, 8), (2, 16)))
ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", size]) for name, size in (("x", 16), ("y", 8))]
graph = helper.make_graph(
    [helper.make_node("MatMul", ["x", "w"], ["y"])], "one", ends[:1], ends[1:], [numpy_helper.from_array(weight, "w")]
)
onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), "whole.onnx")
quantize_dynamic("whole.onnx", "int8.onnx", weight_type=QuantType.QInt8)
session = onnxruntime.InferenceSession("int8.onnx", providers=["CPUExecutionProvider"])
errors = []
for batch in (x[:1], np.stack([x[0], 100 * x[1]])):
    errors.append(float(abs(session.run(None, {"x": batch})[0][0] - x[0] @ weight).max()))
print(f"largest error of the first row: {errors[0]:.3f} alone, {errors[1]:.3f} beside a large row")
assert errors[1] > 10 * errors[0]
END
