"""FLOPs, network traffic and memory of one training step, computed from a configuration.

A step trains the weights in one of three modes (`MODES`):

- retrain: the interleaved pattern.
- soft: all candidate operations; weights and logits train on the same batch (search.split=shared).
- hard: one sampled path at uniform pi. One step in five (search.arch_fraction) trains the logits instead: it evaluates
  K = 4 paths (search.paths) without gradients. The figures of a step are means over both kinds of steps.

FLOPs count matrix products, and a multiply-add counts as two. Training takes three times the FLOPs of a forward pass.
tests/test_scaling.py compares small cases with PyTorch's own counters; scaling_check.py measures more of them.
"""

from typing import NamedTuple

MODES = ("retrain", "soft", "hard")
FP32, BF16 = 4, 2  # bytes of a value
INT64 = 8


class SavedBytes(NamedTuple):
    """Bytes saved for the backward pass: a part for each row of the batch, and a part that all rows share."""

    per_row: float
    shared: float

    def total(self, rows: float) -> float:
        return self.per_row * rows + self.shared


class StepCosts:
    """Costs of a step with the sizes of a configuration. Segments must be at least as long as the memory, because the
    next memories are then views of the blocks' inputs."""

    def __init__(self, config, counts, value: int = BF16):
        """counts [V]: how often each word occurs; value: bytes of an operand or result of a product."""
        from nas.costs.flops import count_flops
        from nas.data.cutoffs import cluster_table
        from nas.training.build import count_parameters

        self.config, self.value, vocab_size = config, value, len(counts)
        self.flops, self.clusters = count_flops(config, counts), cluster_table(counts, config.model.cutoffs)
        self.table = vocab_size * config.model.d_model
        self.overhead = count_parameters([], config, vocab_size)  # embedding, output layer and last norm
        names = config.search.operations
        self.operations = {name: count_parameters([name], config, vocab_size) - self.overhead for name in names}

    def operation_counts(self, mode: str) -> dict[str, float]:
        """Number of blocks that run each operation in a step that trains the weights."""
        from nas.core.pattern import interleaved

        blocks = self.config.model.blocks
        if mode == "retrain":
            return {name: interleaved(blocks).count(name) for name in self.operations}
        return dict.fromkeys(self.operations, blocks if mode == "soft" else blocks / len(self.operations))

    def parameters(self, mode: str) -> float:
        """Number of trained weights; the logits are not among them."""
        return self.gradients("retrain" if mode == "retrain" else "soft")

    def gradients(self, mode: str) -> float:
        """Number of gradient entries that a step computes."""
        used = self.operation_counts(mode).items()
        return self.overhead + sum(count * self.operations[name] for name, count in used)

    def forward_flops(self, mode: str) -> float:
        """FLOPs of a forward pass, per token."""
        used = self.operation_counts(mode).items()
        return self.flops.overhead + sum(count * self.flops.blocks[name] for name, count in used)

    def logits_share(self, mode: str) -> float:
        """Share of the steps that train the logits only."""
        return self.config.search.arch_fraction if mode == "hard" else 0.0

    def step_flops(self, mode: str) -> float:
        """FLOPs of a step, all ranks together."""
        share, train = self.logits_share(mode), self.config.train
        passes = (1 - share) * 3 + share * self.config.search.paths
        return passes * self.forward_flops(mode) * train.batch_size * train.segment

    # --- network

    def all_reduced(self, mode: str) -> float:
        """Bytes that a step all-reduces: the gradients, one loss for each batch or path, and the logits' gradient."""
        share, logits = self.logits_share(mode), self.config.model.blocks * len(self.operations)
        entries = (1 - share) * (self.gradients(mode) + 1)
        if mode == "hard":
            entries += share * (self.config.search.paths + logits)
        elif mode == "soft":
            entries += logits
        return FP32 * entries

    def sent(self, mode: str, ranks: int) -> float:
        """Bytes that each rank sends in a step, with a ring all-reduce."""
        return 2 * (ranks - 1) / ranks * self.all_reduced(mode)

    def late_share(self, mode: str) -> float:
        """Share of these bytes that a rank can send only after the backward pass has ended."""
        return 1.0 if mode == "hard" else FP32 * self.table / self.all_reduced(mode)

    # --- memory

    def cast_copies(self, weights: float) -> float:
        """Bytes of the weights' copies in the products' type. Each is saved until the backward pass of its product."""
        return 0 if self.value == FP32 else self.value * weights

    def dropout_mask(self, width: int) -> float:
        """Bytes per position of one dropout mask: one byte a value on a GPU, a float32 factor on a CPU."""
        return width * (1 if self.value == BF16 else FP32) if self.config.model.dropout else 0

    def saved_by(self, operation: str) -> SavedBytes:
        """What a block with this operation saves, apart from its input."""
        model, train, value = self.config.model, self.config.train, self.value
        width, queries, keys, norm_statistics = model.d_model, train.segment, train.segment + train.memory, 2 * FP32
        if operation == "attention":
            stream = keys * (FP32 * width + norm_statistics)  # memory and segment, the input of the norm
            products = keys * 3 * width + queries * 5 * width  # normed, k, v; normed, q + u, q + v, mixed, joined
            weights = model.heads * queries * keys
            positions = (1 if value == FP32 else 2) * value * keys * width  # projected, and a copy in bf16
            copies = self.cast_copies(4 * width**2)  # without the positions' projection: its input has no gradient
            per_row = stream + value * (products + weights) + queries * self.dropout_mask(width)
            return SavedBytes(per_row, copies + positions)
        if operation == "dense":
            inner = model.d_ffn * value * (2 if model.dropout else 1)  # before and after the inner dropout
            masks = self.dropout_mask(model.d_ffn) + self.dropout_mask(width)
            per_token = value * width + inner + norm_statistics + masks
            copies = self.cast_copies(2 * width * model.d_ffn)
            return SavedBytes(queries * per_token, copies)
        return SavedBytes(0, 0)

    def saved_by_output(self) -> SavedBytes:
        """What embedding, last norm and output layer save."""
        train, width, value = self.config.train, self.config.model.d_model, self.value
        (head, _), *tails = self.clusters
        in_tails = sum(share for _, share in tails)
        logits = head + len(tails) + sum(size * share for size, share in tails)
        # Token, norm, label; in a tail index, label and nll.
        statistics = INT64 + 2 * FP32 + INT64 + in_tails * (INT64 + INT64 + FP32)
        hidden = FP32 * width + value * width * (1 + in_tails) + 2 * self.dropout_mask(width)
        # The head's rows joined with the tails' entries. In bf16 the copy of the head's rows is one of the table's.
        copied_rows = (head if value == FP32 else 0) + len(tails)
        head_copy = value * copied_rows * width if tails else 0
        encodings = FP32 * (train.segment + train.memory) * width
        per_token = statistics + hidden + FP32 * logits  # log-probabilities are float32
        return SavedBytes(train.segment * per_token, head_copy + encodings + self.cast_copies(self.table))

    def activations(self, mode: str, rows: float, recompute: bool = False) -> float:
        """Bytes saved for the backward pass of `rows` rows. With recomputation, the inner values of one block only."""
        train, counts = self.config.train, self.operation_counts(mode)
        positions = train.segment * self.config.model.d_model * rows
        stream, output = FP32 * positions * self.config.model.blocks, FP32 * positions if mode == "soft" else 0
        inner = {name: self.saved_by(name).total(rows) + (output if name != "identity" else 0) for name in counts}
        if recompute:
            blocks = sum(inner.values()) if mode == "soft" else max(inner.values())
        else:
            blocks = sum(count * inner[name] for name, count in counts.items())
        return stream + blocks + self.saved_by_output().total(rows)

    def memories(self, mode: str, rows: float) -> float:
        """Bytes of the previous segment, which each block that may use its memory keeps."""
        model, train = self.config.model, self.config.train
        blocks = self.operation_counts("retrain")["attention"] if mode == "retrain" else model.blocks
        return FP32 * blocks * rows * max(train.segment, train.memory) * model.d_model

    def temporary(self, mode: str, rows: float, ranks: int) -> float:
        """Bytes of temporary values, the larger of two.

        The first is the logits of the largest cluster, in bf16 also cast to fp32. The second is the table's gradient
        while it is computed, and the buffer from which DDP sends it.
        """
        (head, _), *tails = self.clusters  # every token needs the head, a share of them a tail
        logits = max([head, *(size * share for size, share in tails)]) * rows * self.config.train.segment
        buffer = FP32 * self.table if ranks > 1 and mode != "hard" else 0
        return max((FP32 if self.value == FP32 else FP32 + self.value) * logits, self.cast_copies(self.table) + buffer)

    def memory(self, mode: str, rows: float, ranks: int, recompute: bool = False, parts: int = 1) -> dict[str, float]:
        """Bytes of each kind, and their total, on a rank that reads `rows` rows in `parts` parts."""
        parameters = self.parameters(mode)
        kinds = {
            "weights": FP32 * parameters,
            "gradients": FP32 * self.gradients(mode),
            "moments": 2 * FP32 * parameters,
            "activations": self.activations(mode, rows / parts, recompute),
            "memories": self.memories(mode, rows) * (1 if parts == 1 else 2),  # with parts, old and next memories exist
            "temporary": self.temporary(mode, rows / parts, ranks),
        }
        return kinds | {"total": sum(kinds.values())}

    def fsdp_memory(self, mode: str, rows: float, ranks: int) -> float:
        """Bytes on a rank with FSDP."""
        kinds = self.memory(mode, rows, ranks=1)
        state = kinds["weights"] + kinds["gradients"] + kinds["moments"]
        largest_unit = 2 * FP32 * self.table  # gathered, together with its gradient before it is scattered
        return kinds["total"] - state * (1 - 1 / ranks) + largest_unit
