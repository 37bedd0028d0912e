"""The bundle itself under torchrun and gloo: an honest one, one that breaks every rule, ones that never finish."""

from __future__ import annotations

import pytest

from prism_fast.harness.audits import functional_contract as fc
from prism_fast.harness.audits.functional_contract import CHECKS, Trial, check_functional_contract
from prism_fast.harness.bundle.bundle import Bundle, load_bundle
from prism_fast.harness.process.isolation import resolve_isolation
from prism_fast.harness.process.jobs import RankFacts
from prism_fast.protocol.errors import BundleRejected
from tests.harness.conftest import ROOT, TINY_ARCHITECTURE

HONEST = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from architecture import build_model
from torch.nn.parallel import DistributedDataParallel

def train(ctx):
    if ctx.world_size > 1:
        dist.init_process_group("gloo")
    model = build_model(ctx)
    wrapped = DistributedDataParallel(model) if ctx.world_size > 1 else model
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=3e-2)
    tokenizer = ctx.reference_tokenizer("bytes")
    for batch in ctx.iter_train_batches(model, batch_size=4, tokenizer=None):
        logits = wrapped(batch.tokens)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch.tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if ctx.world_size > 1:
            dist.all_reduce(loss.detach())
    if ctx.rank == 0:
        torch.save(model.state_dict(), ctx.artifacts_dir + "/state.pt")
        open("log.txt", "w").write("done")
    if ctx.world_size > 1:
        dist.destroy_process_group()
"""

# No wrapper, another batch size on rank 1, a climbing loss, writes on every rank, no teardown.
BROKEN = (
    HONEST.replace("DistributedDataParallel(model) if ctx.world_size > 1 else model", "model")
    .replace("batch_size=4", "batch_size=4 - ctx.rank")
    .replace("lr=3e-2", "lr=3e-2, maximize=True")
    .replace("if ctx.rank == 0:", "if True:")
    .replace("dist.destroy_process_group()", "dist.barrier()")
)


@pytest.fixture(scope="module")
def trial(cache_dir) -> Trial:
    from prism_fast.data.corpus import resolve_data
    from prism_fast.data.tokenizers import reference_tokenizer

    tokenizer = reference_tokenizer("bytes")
    return Trial(
        resolve_data("sample", tokenizer, cache_dir), tokenizer, resolve_isolation("auto"), steps=8, sequence_length=32
    )


def bundle(training: str) -> Bundle:
    return Bundle("tried", {"architecture.py": TINY_ARCHITECTURE.encode(), "training.py": training.encode()})


def met(report) -> dict[str, bool | None]:
    (run,) = report.runs
    return {check.name: check.met for check in run.checks}


def detail(report, name: str) -> str:
    return next(check.detail for check in report.runs[0].checks if check.name == name)


@pytest.mark.parametrize("world", [2, 4])
def test_an_honest_bundle_meets_every_assertion(trial, world):
    report = check_functional_contract(bundle(HONEST), trial, (world,))
    assert report.ok and met(report) == dict.fromkeys(CHECKS, True), report.unmet
    assert detail(report, "completes") == f"8 steps on each of {world} ranks"
    assert detail(report, "data_disjoint_and_covering").startswith(f"batches 0 to {8 * world - 1} of the stream")
    assert detail(report, "reduced_metrics_agree") == "8 all_reduce calls gave every rank the same bytes"
    assert detail(report, "rank0_only_writer") == "rank 0 wrote 2 files, the others none"
    document = report.as_dict()
    assert document["schema"] == "prism_functional_contract.v1"
    assert [c["name"] for c in document["runs"][0]["checks"]] == list(CHECKS)


def test_a_bundle_that_breaks_the_contract_is_told_everything_that_is_wrong(trial):
    report = check_functional_contract(bundle(BROKEN), trial, (2,))
    assert met(report) == {
        "completes": True,
        "loss_falls": False,
        "parameters_identical": False,
        "data_disjoint_and_covering": False,
        "reduced_metrics_agree": True,
        "clean_teardown": False,
        "rank0_only_writer": False,
    }
    assert detail(report, "parameters_identical").startswith("ranks 0 and 1 differ in embedding.weight and ")
    assert detail(report, "data_disjoint_and_covering") == "rank 1's batch 0 is not the stream's batch 1"
    assert detail(report, "clean_teardown") == "train(ctx) left the process group up on ranks 0, 1"
    assert detail(report, "rank0_only_writer").startswith("a rank other than 0 wrote rank-1/log.txt, rank-1/state.pt")
    assert not report.ok and len(report.unmet) == 5


def test_a_run_past_its_limit_is_ended(trial):
    waiting = bundle(HONEST.replace("model = build_model(ctx)", "import time; time.sleep(600)", 1))
    report = check_functional_contract(waiting, Trial(trial.corpus, trial.tokenizer, limit_s=3.0), (2,))
    assert met(report)["completes"] is False
    assert detail(report, "completes") == "still running after 3 s, start-up included"
    assert report.runs[0].seconds < 60


def test_more_ranks_than_one_node_has_are_refused_before_anything_starts(trial):
    with pytest.raises(BundleRejected, match="one node with 1 to 8 processes"):
        check_functional_contract(bundle(HONEST), trial, (2, 16))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformer_tiny", "ssm_tiny", "fused_loss"])
def test_every_example_meets_every_assertion_at_world_2_and_4(name, cache_dir):
    from prism_fast.data.corpus import resolve_data
    from prism_fast.data.tokenizers import reference_tokenizer

    tokenizer = reference_tokenizer("gpt2")
    trial = Trial(resolve_data("sample", tokenizer, cache_dir), tokenizer, resolve_isolation("auto"))
    report = check_functional_contract(load_bundle(ROOT / "examples" / name), trial)
    assert report.ok, report.unmet


# ----------------------------------------------------------------------- what no real run of two ranks shows on demand


def reports(*changes: dict) -> dict[int, RankFacts]:
    same = {
        "batches": ["b0"],
        "parameters": {"w": "1"},
        "parameters_sha256": "p",
        "sharded_parameters": 0,
        "all_reduce_calls": 2,
        "all_reduce_sha256": "a",
        "process_group_left": False,
    }
    return {rank: RankFacts(**{**same, **change}) for rank, change in enumerate(changes)}


def test_reductions_that_disagree_in_number_or_result_are_named():
    assert fc._metrics_agree(reports({}, {})).met
    number = fc._metrics_agree(reports({}, {"all_reduce_calls": 3}))
    assert (number.met, number.detail) == (False, "the ranks made 2, 3 all_reduce calls; expected as many")
    result = fc._metrics_agree(reports({}, {"all_reduce_sha256": "b"}))
    assert (result.met, result.detail) == (False, "2 all_reduce calls gave the ranks different results")


def test_a_batch_that_two_ranks_took_is_not_disjoint():
    expected = ["s0", "s1", "s2", "s3"]
    fine = fc._data_covered(reports({"batches": ["s0", "s2"]}, {"batches": ["s1", "s3"]}), expected)
    assert (fine.met, fine.detail) == (True, "batches 0 to 3 of the stream, each on one rank")
    twice = fc._data_covered(reports({"batches": ["s0", "s2"]}, {"batches": ["s0", "s3"]}), expected)
    assert (twice.met, twice.detail) == (False, "rank 1's batch 0 is not the stream's batch 1")
    short = fc._data_covered(reports({"batches": ["s0", "s2"]}, {"batches": ["s1"]}), expected)
    assert (short.met, short.detail) == (False, "the ranks took 2, 1 batches; expected equal steps")


def test_sharded_parameters_are_counted_and_not_compared():
    sharded = {"parameters": {}, "sharded_parameters": 7}
    check = fc._parameters_identical(reports(sharded, {**sharded, "parameters_sha256": "q"}))
    assert check.met and "all 7 are sharded" in check.detail


def test_torchruns_own_failure_is_no_clean_teardown():
    assert fc._torn_down(reports({}, {}), 0).met
    assert fc._torn_down(reports({}, {}), 1).detail == "torchrun ended with code 1 after train(ctx) had returned"
