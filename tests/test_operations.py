"""Each operation of the registry against its reference, and the costs of operations against formulas."""

import inspect
import sys
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from models.operations.operation import BlockConfig, Operation, Segment
from models.operations.registry import OPERATIONS, IncompleteOperation, Kind, build_operation
from models.relative_attention import sinusoidal_encodings
from models.stream import Decoder
from models.transformer_xl import build_pattern
from nas.costs.flops import SOLVER
from nas.gumbel.gumbel_phase import set_choices
from tests import reference
from tests.making import BLOCKS, flops_of, operation_of, sized, supernet_of


def test_the_registry_describes_the_classes():
    """The arguments of their constructors are the sizes, and each has a reference, a letter and a colour of its own."""
    assert reference.BRANCHES.keys() == OPERATIONS.keys()
    letters = [kind.letter for kind in OPERATIONS.values()]
    for name, kind in OPERATIONS.items():
        parameters = inspect.signature(type(operation_of(name, BlockConfig(16)))).parameters
        required = [key for key, one in parameters.items() if one.default is inspect.Parameter.empty]
        assert required == ["config", *kind.sizes]
        own = [size.letter for size in kind.sizes.values()]
        assert len({*own}) == len(own) and "" not in own[1:]  # the main size comes first
        assert not {*own} & {*letters}  # so a short form without spaces is unambiguous
    assert all(len(letter) == 1 for letter in letters)
    for facts in (letters, [kind.colour for kind in OPERATIONS.values()]):
        assert len({*facts}) == len(facts)


def random_operation(name: str, norm: str = "pre", relative: bool = True, **options) -> Operation:
    """In float64, with parameters that make every term contribute."""
    torch.manual_seed(0)
    operation = operation_of(BLOCKS[name], BlockConfig(16, norm=norm, relative=relative), **options).double()
    for parameter in operation.parameters():
        nn.init.normal_(parameter, std=0.5)
    return operation


def segment(operation: Operation, length: int, start: int = 0, memory: int = 30, relative: bool = True) -> Segment:
    """A segment of zeros as tokens, for two rows. start: positions of the stream before it."""
    encodings = sinusoidal_encodings(memory + length, 16, torch.float64) if relative else None
    return Segment(encodings, start % operation.stride, memory, memory, torch.zeros(2, length, dtype=torch.int64))


def assert_close(one, two):
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def values_and_gradients(output, inputs):
    """The output and the gradients of a sum with fixed weights; zeros for inputs without an effect."""
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    gradients = torch.autograd.grad((output * weights).sum(), inputs, allow_unused=True, materialize_grads=True)
    return [output, *gradients]


@pytest.mark.usefixtures("each_device")
@pytest.mark.parametrize("relative", [True, False], ids=["relative", "plain"])
@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("memory", [0, 2, 11])
@pytest.mark.parametrize("name", OPERATIONS)
def test_values_and_gradients_are_those_of_the_reference(name, memory, norm, relative):
    operation, length = random_operation(name, norm, relative), 7
    x, past = (torch.randn(2, n, 16, dtype=torch.float64) for n in (length, memory))
    state = operation.remember(past, segment(operation, memory, 0, 30, relative))
    inputs = [x.requires_grad_(), *operation.parameters()]
    branch, _ = operation(x, state, segment(operation, length, memory, 30, relative))
    stream = torch.cat([past, x], dim=1)
    context = operation.norm(stream) if norm == "pre" and list(operation.parameters()) else stream
    expected = reference.BRANCHES[name](operation, context, length, memory)
    if norm == "post" and list(operation.parameters()):
        expected = operation.norm(x + expected) - x
    found, wanted = values_and_gradients(x + branch, inputs), values_and_gradients(x + expected, inputs)
    passes_all = not operation.has_own_state or not memory  # no gradient reaches what earlier segments wrote to a state
    assert_close(found if passes_all else found[:1], wanted if passes_all else wanted[:1])


@pytest.mark.parametrize("name", OPERATIONS)
def test_outputs_depend_on_no_later_position(name):
    operation, length = random_operation(name), 9
    x = torch.randn(2, length, 16, dtype=torch.float64, requires_grad=True)
    branch, _ = operation(x, operation.begin(2), segment(operation, length))
    for place in range(length if branch.requires_grad else 0):
        (gradient,) = torch.autograd.grad(branch[0, place].sum(), x, retain_graph=True)
        touched = gradient[0].abs().sum(dim=-1) > 0
        earliest = 0 if operation.reach is None else max(0, place - operation.reach)
        assert touched[place] and not touched[place + 1 :].any() and not touched[:earliest].any()
        assert touched[earliest] or operation.stride > 1  # sparse attention leaves out some
        assert not gradient[1].any()  # another row


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_pieces_equal_the_whole_with_states_caches_and_one_by_one(name, norm):
    """A state is detached, and its rows come first."""
    operation, length, context = random_operation(name, norm), 21, 30
    x = torch.randn(2, length, 16, dtype=torch.float64)
    whole, _ = operation(x, operation.begin(2), segment(operation, length))
    with torch.no_grad():
        cached = operation.cached(sinusoidal_encodings(context, 16, torch.float64))
        reader = cached.Reader(cached)
    for form, pieces in ((operation, [4, 1, 9, 7]), (cached, [4, 1, 9, 7]), (cached, [1] * length)):
        state, found, done = form.begin(2), [], 0
        for piece in x.split(pieces, dim=1):
            own = segment(operation, piece.shape[1], done, context - piece.shape[1])._replace(kept=context - 1)
            with torch.set_grad_enabled(form is operation):
                branch, state = form(piece, state, own)
            found.append(piece + branch)
            done += piece.shape[1]
            assert all(len(part) == 2 and not part.requires_grad for part in state.values())
        assert_close([torch.cat(found, dim=1)], [x + whole])
        assert state.keys() == form.begin(2).keys()
    reader.state, found = cached.begin(2), []
    with torch.no_grad():
        for place in range(length):
            own = segment(operation, 1, place, context - 1)
            found.append(reader(x[:, place], own))
    assert_close([torch.stack(found, dim=1)], [x + whole])
    assert reader.state.keys() == cached.begin(2).keys()


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_short_memory_shows_a_cached_form_as_little(name):
    """Two positions, fewer than some operations reach."""
    operation, context = random_operation(name), 6
    x = torch.randn(2, 12, 16, dtype=torch.float64)
    with torch.no_grad():
        forms = operation, operation.cached(sinusoidal_encodings(context, 16, torch.float64))
        states = [form.begin(2) for form in forms]
        for start in range(0, 12, 4):
            own = segment(operation, 4, start, 2)._replace(kept=context - 1)
            branches, states = zip(
                *(form(x[:, start : start + 4], s, own) for form, s in zip(forms, states)), strict=True
            )
            assert_close(branches[:1], branches[1:])


def test_what_an_operation_has_set_stays_and_linear_layers_are_drawn():
    for name in OPERATIONS:
        operation = operation_of(name, BlockConfig(64), heads=4)
        linear = {id(layer.weight) for layer in operation.modules() if isinstance(layer, nn.Linear)}
        before = {key: parameter.detach().clone() for key, parameter in operation.named_parameters()}
        operation.initialise(0.5)
        for key, parameter in operation.named_parameters():
            if id(parameter) not in linear:
                assert torch.equal(parameter, before[key])
            elif parameter.numel() > 1000:
                scale = 0.5 if key.endswith("output.weight") else 1.0
                assert parameter.std().item() == pytest.approx(scale * parameter.shape[1] ** -0.5, rel=0.1)


def incomplete(**pieces) -> type:
    return type(
        "Incomplete", (Operation,), {"__init__": lambda self, config: Operation.__init__(self, config)} | pieces
    )


def wrong_rows(self, rows):
    return {"sums": torch.zeros(3, rows)}


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ({}, r"needs branch\(\), or begin\(\) and forward\(\)"),
        ({"reach": None, "forward": lambda *_: None}, r"has one of begin\(\) and forward\(\); it needs both"),
        ({"carries_state": True, "branch": lambda *_: None}, r"carries a state, so it needs begin\(\) and forward\(\)"),
        ({"reach": None, "begin": wrong_rows, "forward": lambda *_: None}, "without the rows as its first dimension"),
        ({"branch": lambda *_: None}, "needs a last layer that is called output"),
    ],
)
def test_an_operation_that_lacks_a_piece_is_refused(pieces, message, monkeypatch):
    register(monkeypatch, incomplete(**pieces), carries_state=pieces.get("carries_state", False))
    with pytest.raises(IncompleteOperation, match=rf"the operation new of models/operations/new.py .*{message}"):
        build_operation("new", BlockConfig(16))


def register(monkeypatch, operation: type, **facts) -> None:
    """Add an operation `new` as a contributor does: a file in models/operations/, and a line in the registry."""
    module = ModuleType("models.operations.new")
    module.New = operation
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(OPERATIONS, "new", Kind("n", "#000000", "new:New", "a new operation", **facts))


class Follower(Operation):
    """The mean of what followed the same token earlier. The branch is 0 for tokens that are new."""

    reach, reads_tokens = None, True

    def __init__(self, config):
        super().__init__(config)
        self.output = nn.Linear(config.d_model, config.d_model)

    def branch(self, context, length, segment):
        tokens, keys = segment.tokens, context.shape[1]  # [B, K]
        places = torch.arange(keys, device=context.device)
        same = tokens[:, -length:, None] == tokens.roll(1, dims=1)[:, None]  # [B, L, K]
        same &= (places[None] <= places[-length:, None]) & (places > 0)
        return self.output(same.to(context.dtype) @ context / same.sum(dim=-1, keepdim=True).clamp_min(1))


def test_an_operation_of_one_file_and_one_line_reads_tokens_in_every_use(monkeypatch):
    register(monkeypatch, Follower, reaches_far=True)
    torch.manual_seed(1)
    pattern, config = ["new", "dense", "new"], BlockConfig(16)
    model = build_pattern(sized(pattern), config, 5).double().eval()
    tokens = torch.randint(5, (2, 26))
    whole, _ = model(tokens[:, :-1], tokens[:, 1:], None, 0)
    found, memories = [], None
    for part in (slice(0, 6), slice(6, 7), slice(7, 25)):
        nll, memories = model(tokens[:, :-1][:, part], tokens[:, 1:][:, part], memories, 30)
        found.append(nll)
    assert_close([torch.cat(found, dim=1)], [whole])

    decoder = Decoder(model, 30)
    for place, length in ((0, 9), (9, 1), (10, 1), (11, 14)):
        log_p = decoder.read(tokens[:, place : place + length])
        target = tokens[:, place + length]
        assert_close([-log_p.gather(1, target[:, None])[:, 0]], [whole[:, place + length - 1]])

    supernet = supernet_of(3, ["new", "dense"], config, 5).double().eval()
    set_choices(supernet, [[0], [1], [0]])
    weights = model.state_dict()
    for name, parameter in supernet.named_parameters():
        own = name.replace("candidates.0", "operation").replace("candidates.1", "operation")
        if own in weights and weights[own].shape == parameter.shape:
            parameter.data.copy_(weights[own])
    nll, memories = supernet(tokens[:, :9], tokens[:, 1:10], None, 30)
    later, _ = supernet(tokens[:, 9:25], tokens[:, 10:], memories, 30)
    assert_close([torch.cat([nll, later], dim=1)], [whole])
    assert flops_of("new", 2, 8, 4) == pytest.approx(2 * 16 * 12 + 2 * 16 * 16)

    block = model.blocks[0].operation
    context = torch.randn(2, 25, 16, dtype=torch.float64)
    given = Segment(None, 0, 0, 0, tokens[:, :-1])
    found = block.branch(context, 25, given)
    for row in range(2):
        for t in range(25):
            followers = [context[row, j] for j in range(1, t + 1) if tokens[row, j - 1] == tokens[row, t]]
            mean = sum(followers) / len(followers) if followers else torch.zeros(16, dtype=torch.float64)
            torch.testing.assert_close(found[row, t], block.output(mean))


ACTIVATIONS = {
    "relu_squared": lambda x: torch.clamp(x, min=0) ** 2,
    "relu": torch.nn.functional.relu,
    "gelu": torch.nn.functional.gelu,
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_dense_block_has_each_activation(activation):
    dense = operation_of("dense", BlockConfig(8, activation=activation)).double()
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    expected = dense.output(ACTIVATIONS[activation](dense.expand(dense.norm(x))))
    torch.testing.assert_close(dense(x, {}, segment(dense, 3))[0], expected)


@pytest.mark.parametrize("relative", [True, False], ids=["relative", "plain"])
@pytest.mark.parametrize("memory", [0, 6])
def test_flops_are_those_of_the_formulas(memory, relative):
    batch, segment, keys = 3, 8, 8 + memory
    square = 2 * 16**2
    scores = (3 if relative else 2) * 2 * 16 * segment * keys
    own, positions = 2 * square * segment, square * keys / batch if relative else 0
    expected = {
        "attention": (scores + own + 2 * square * keys + positions) / segment,
        "attention key_heads=1": (scores + own + 2 * square * keys / 4 + positions) / segment,
        "conv": (3 * square * (segment + min(3, memory)) + square * segment) / segment,
        "dense": 2 * 2 * 16 * 40,
        "identity": 0,
    }
    assert {name: flops_of(name, batch, segment, memory, relative) for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize("relative", [True, False], ids=["relative", "plain"])
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize(("length", "memory"), [(16, 16), (400, 0), (300, 100), (15, 600)])
def test_flops_of_shapes_are_those_of_a_real_pass(name, length, memory, relative):
    sizes = {"sparse_strided": " 16", "sparse_fixed": " 16 key_heads=2", "window": " 20"}.get(name, "")
    operation = operation_of(name + sizes, BlockConfig(16, relative=relative), heads=4, d_ffn=40)
    encodings = sinusoidal_encodings(memory + length, 16) if relative else None
    given = Segment(encodings, memory % operation.stride, memory, memory, torch.zeros(2, length, dtype=torch.int64))
    state = operation.remember(torch.randn(2, memory, 16), given._replace(tokens=given.tokens.new_zeros(2, memory)))
    with FlopCounterMode(display=False, custom_mapping=SOLVER) as counter:
        operation(torch.randn(2, length, 16), state, given)
    expected = flops_of(name + sizes, 2, length, memory, relative) * 2 * length
    assert counter.get_total_flops() == pytest.approx(expected)


def test_sparse_attention_needs_fewer_flops_the_longer_the_stream():
    """Its scores grow with n * sqrt(n), so their share of all n * n scores falls with n."""
    for name in ("sparse_strided", "sparse_fixed", "window"):
        ratios = [flops_of(f"{name} {n}", 1, n * n, 0) / flops_of("attention", 1, n * n, 0) for n in (32, 64)]
        assert ratios[1] < 0.62 * ratios[0] < 0.2
