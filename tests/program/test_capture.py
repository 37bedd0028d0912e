"""What cannot become a program is refused in one sentence that names the construct, the line and what to write."""

import linecache
import sys
import types

import pytest
import torch
from torch import nn

from prism_fast.program.capture import capture
from prism_fast.program.format import Program
from prism_fast.protocol.errors import BundleRejected

SOURCE = """
import torch, torch.nn as nn, torch.nn.functional as F
class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x * 2
    @staticmethod
    def backward(ctx, g): return g * 2
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.o, self.cell, self.n = nn.Embedding(300, 16), nn.Linear(16, 300), nn.LSTMCell(16, 16), 0
        self.register_buffer("seen", torch.zeros(()))
    def forward(self, t):
        x = self.e(t)
        {line}
        return self.o(x)
def build_model(ctx): return Model()
"""
LINE = 15


@pytest.fixture
def build(tmp_path):
    def build(line: str) -> torch.nn.Module:
        path = tmp_path / "architecture.py"
        path.write_text(SOURCE.format(line=line.replace("\n", "\n        ")))
        linecache.checkcache()
        module = types.ModuleType("architecture_under_test")
        sys.modules[module.__name__] = module
        exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
        torch.manual_seed(0)
        return module.build_model(None)

    return build


@pytest.mark.parametrize(
    ("line", "clause", "hint"),
    [
        ("if (x > 0).nonzero().numel() > 3: x = x + 1", "branches on", "no rows"),
        ("if (x > 0).all(): x = x + 1", "branches on", "torch.where"),
        ("x = x * int(t.sum().item())", "branches on", "no .item()"),
        ("x = x + sum(t[0].tolist())", "aten.item.default", "no .item()"),
        ("x = x + F.one_hot(t).float().sum()", "branches on", "num_classes"),
        ("x = x + torch.randn_like(x)", "aten.randn_like.default", "without random numbers"),
        ("x = F.dropout(x, 0.5, True)", "train is True", "without random numbers"),
        ("x = x.as_strided(x.shape, x.stride())", "aten.as_strided.default", "use view"),
        ("x = torch.func.vmap(lambda v: v * 2)(x)", "torch.func.vmap", "attn_mask"),
        ("x = torch.cond(x.sum() > 0, lambda v: v + 1, lambda v: v - 1, (x,))", "cond is control flow", "torch.where"),
        ("x = x + torch.bincount(t.flatten(), minlength=300)[:16]", "aten.bincount.default", "one_hot"),
        ("x = x + torch.randn(16, generator=torch.Generator())", "no tensor", ""),
        ("raise RuntimeError('boom' * 1000)", "RuntimeError: boom", ""),
    ],
)
def test_a_refusal_names_construct_line_and_what_to_write(build, tmp_path, line, clause, hint):
    with pytest.raises(BundleRejected) as caught:
        capture(build(line), width=8, bundle_dir=tmp_path)
    text = str(caught.value)
    assert caught.value.rule == "prism:not-exportable"
    assert clause in text and hint in text and len(text) < 400 and "\n" not in text
    assert f"architecture.py:{LINE}" in text or "Generator" in line


@pytest.mark.parametrize(
    "line",
    [
        "y = torch.empty_like(x); y.copy_(x); x = y",
        "y = torch.empty(16); y[:] = 1.0; x = x + y",
        "x = Twice.apply(x)",
        "x = x + self.e(torch.unique(t)).mean()",
        "with torch.no_grad(): x = x + 1",
        "with torch.autocast('cpu', dtype=torch.bfloat16): x = self.o(x)[..., :16].float()",
        "with torch.autocast('cuda', dtype=torch.float16): x = x + 1",
        "x = torch.fft.irfft(torch.fft.rfft(x, dim=1), n=t.shape[1], dim=1)",
        "x = torch.stack([self.cell(x[:, i])[0] for i in range(t.shape[1])], 1)",
        "y = x.detach().requires_grad_(); x = x - 0.1 * x",
        "i = (t > 9).nonzero(as_tuple=True)\nif i[0].numel(): x = x.index_put(i, x[i] * 2)",
        "self.seen = self.seen * 1",
        "self.last = x",
        "x = torch.compile(lambda v: v * 2)(x)",
        "print(x.sum())",
    ],
)
def test_what_honest_models_do_becomes_a_program_of_the_same_bits(build, tmp_path, line):
    found = capture(build(line), width=8, bundle_dir=tmp_path)
    assert found.differs == 0.0 and found.program.batch is None


def test_a_forward_that_asks_for_the_number_of_rows_gets_a_program_for_that_many(build, tmp_path):
    found = capture(build("x = x if t.shape[0] == 3 else x * 2"), width=8, rows=3, bundle_dir=tmp_path)
    assert (found.program.batch, found.differs) == (3, 0.0)
    assert any("exactly 3 rows" in note for note in found.notes)


@pytest.mark.parametrize("line", ["self.n += 1; x = x * self.n", "self.seen = self.seen + 1; x = x + self.seen"])
def test_what_depends_on_something_outside_the_state_is_seen_to_differ(build, tmp_path, line):
    assert capture(build(line), width=8, bundle_dir=tmp_path).differs > 0.1


def test_capture_leaves_the_model_and_the_random_state_as_they_were(build, tmp_path):
    model = build("x = x + 1")
    model.e.eval()
    before = torch.get_rng_state()
    capture(model, width=8, bundle_dir=tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training and not model.e.training and torch.is_grad_enabled()


class _Branches(nn.Module):
    """A forward that takes another way for more than `limit` rows, or for an odd number of them."""

    def __init__(self, limit: int | None) -> None:
        super().__init__()
        self.embed, self.head, self.limit = nn.Embedding(20, 4), nn.Linear(4, 20), limit

    def forward(self, tokens):
        hidden = self.embed(tokens)
        odd = tokens.shape[0] % 2 if self.limit is None else tokens.shape[0] > self.limit
        return self.head(hidden * 2 if odd else hidden)


def test_a_branch_on_the_number_of_rows_bounds_the_rows_that_a_program_takes():
    program = capture(_Branches(16), width=8).program
    assert (program.batch, program.most) == (None, 16)
    assert [program.takes(rows) for rows in (1, 16, 17)] == [True, True, False]
    assert Program.from_bytes(program.to_bytes()).most == 16


def test_a_branch_that_fewer_rows_take_otherwise_leaves_one_number_of_rows():
    program = capture(_Branches(None), width=8).program
    assert (program.batch, program.most) == (2, None)
    assert not program.takes(1) and not program.takes(4)
