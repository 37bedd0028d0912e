"""What masks are seen to allow, and the probe on a bundle that mixes a causal and a sliding-window attention."""

import pytest
import torch

from prism_fast.profiling.bundle_process import BundleJob
from prism_fast.profiling.mask import describe_call, findings, measure_mask, window_holds
from prism_fast.protocol.errors import BundleFailed, UsageError

Q = torch.zeros(2, 3, 6, 4)
CAUSAL = torch.ones(6, 6, dtype=torch.bool).tril()


def described(**mask):
    return describe_call(Q, Q, Q, **mask)


def test_is_causal_and_the_same_mask_written_out_allow_the_same_keys():
    bias = torch.zeros(6, 6).masked_fill(~CAUSAL, float("-inf"))
    for mask in ({"is_causal": True}, {"attn_mask": CAUSAL}, {"attn_mask": bias}, {"attn_mask": CAUSAL[None, None]}):
        found = described(**mask)
        assert (found["allowed_max"], found["allowed_min"], found["causal"], found["padded"]) == (6, 1, True, False)


def test_a_sliding_window_allows_as_many_keys_as_it_says():
    window = CAUSAL & ~CAUSAL.tril(-3)
    assert described(attn_mask=window)["allowed_max"] == 3 and described(attn_mask=window)["causal"]


def test_full_attention_and_a_mask_with_one_key_too_many_are_not_causal():
    assert not described()["causal"]
    leaky = CAUSAL.clone()
    leaky[2, 4] = True
    assert not described(attn_mask=leaky)["causal"]


def test_right_padding_shows_as_a_mask_that_differs_between_rows():
    mask = CAUSAL.expand(2, 1, 6, 6).clone()
    mask[1, :, :, 4:] = False
    assert described(attn_mask=mask)["padded"] and "padding pins" in " ".join(
        findings([{**described(attn_mask=mask), "layers": 5}], None)
    )


def test_fewer_queries_than_keys_end_together():
    query = torch.zeros(1, 1, 1, 4)
    assert describe_call(query, Q[:1, :1], Q[:1, :1])["allowed_max"] == 6
    assert describe_call(query, Q[:1, :1], Q[:1, :1], attn_mask=torch.ones(1, 6, dtype=torch.bool))["causal"]


def test_a_window_holds_only_if_some_layer_is_windowed_and_none_lies_between():
    narrow, wide, full = ({**described(attn_mask=CAUSAL & ~CAUSAL.tril(-n))} for n in (2, 4, 6))
    assert window_holds([narrow, full], 2) and not window_holds([wide, full], 2)
    assert not window_holds([narrow, wide], 2) and not window_holds([full], 2)
    assert not window_holds([narrow, described()], 2)  # a layer that sees the future


def job(bundle, corpus, width=32):
    return BundleJob(bundle, (width,), 0, {}, data=str(corpus), tokenizer="bytes", torch_threads=1, device="cpu")


def test_the_probe_finds_the_bundles_window_and_times_its_masks(write_bundle, corpus):
    found = measure_mask(job(write_bundle(), corpus), window=8, repeats=2)
    causal, windowed = found["calls"]
    assert causal["is_causal"] and causal["allowed_max"] == 32 and causal["layers"] == 1
    assert windowed["mask"] == "bool" and windowed["allowed_max"] == 8 and windowed["causal"]
    assert found["window_holds"] is True
    (timed,) = found["times"]
    assert [r["mask"] for r in timed["rows"]] == ["is_causal", "explicit bool", "explicit float32", "window 8, bool"]
    assert timed["rows"][0]["ratio"] == 1 and all(r["ms"] > 0 and len(r["ms_all"]) == 2 for r in timed["rows"])


@pytest.mark.slow
def test_attention_written_by_hand_cannot_be_seen_and_says_so(write_bundle, corpus):
    bundle = write_bundle()
    architecture = bundle / "architecture.py"
    lines = [line for line in architecture.read_text().splitlines() if "scaled_dot" not in line]
    architecture.write_text("\n".join(lines))
    with pytest.raises(BundleFailed, match="no call to torch's scaled_dot_product_attention"):
        measure_mask(job(bundle, corpus))


def test_a_window_as_wide_as_the_row_is_refused(write_bundle, corpus):
    with pytest.raises(UsageError, match="--window 32: expected 1 to 31"):
        measure_mask(job(write_bundle(), corpus), window=32)
