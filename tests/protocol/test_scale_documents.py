"""Modes, the parameter ladder, and the documents that describe them."""

import orjson
import pytest

from prism_fast.protocol.errors import UsageError
from prism_fast.protocol.scale import (
    assert_research_protocol_annex,
    crown_status,
    execution_mode_targets,
    is_within_stage_cap,
    max_parameters_for_stage,
    phases_of,
    provisional_crown_eligible,
    research_protocol_annex,
    runtime_policy_defaults,
    scale_ladder_document,
)


def test_a_mode_walks_its_corpora_in_order():
    assert [(p.dataset_subset, p.tokens) for p in phases_of("gpu_proxy_eval")] == [("sample-10BT", 10_000_000_000)]
    assert [(p.dataset_subset, p.tokens) for p in phases_of("full_scale_eval")] == [
        ("sample-10BT", 10_000_000_000),
        ("sample-100BT", 100_000_000_000),
    ]
    with pytest.raises(UsageError, match="unknown execution mode 'local_cpu_smoke'"):
        phases_of("local_cpu_smoke")


def test_the_policy_names_every_modes_targets():
    targets = runtime_policy_defaults()["execution_mode_targets"]
    assert targets == execution_mode_targets()
    assert targets["gpu_proxy_eval"]["dataset_subset"] == "sample-10BT"
    assert targets["gpu_proxy_eval"]["max_tokens"] == 10_000_000_000
    full = targets["full_scale_eval"]
    assert (full["phase_1_dataset_subset"], full["phase_1_max_tokens"]) == ("sample-10BT", 10_000_000_000)
    assert (full["phase_2_dataset_subset"], full["phase_2_dataset_tokens"]) == ("sample-100BT", 100_000_000_000)
    assert all(t["official_score"] is True and t["gpu_count"] == 1 for t in targets.values())


def test_stages_have_their_caps_and_an_unknown_stage_is_an_error():
    assert max_parameters_for_stage("explore") == 124_000_000
    assert max_parameters_for_stage("promote") == 350_000_000
    assert is_within_stage_cap(124_000_000, "explore") and not is_within_stage_cap(124_000_001, "explore")
    for stage in ("Explore", "", "tiny", " promote"):
        with pytest.raises(UsageError, match="unknown parameter ladder stage"):
            max_parameters_for_stage(stage)


def test_only_a_valid_explore_run_within_its_cap_is_provisional():
    assert provisional_crown_eligible("explore", parameters=124_000_000, valid=True)
    assert not provisional_crown_eligible("explore", parameters=124_000_001, valid=True)
    assert not provisional_crown_eligible("explore", parameters=1, valid=False)
    assert not provisional_crown_eligible("promote", parameters=1, valid=True)


@pytest.mark.parametrize(
    ("outcome", "after"), [("win", "confirmed"), ("tie", "confirmed"), ("loss", "revoked"), ("invalid", "revoked")]
)
def test_promote_confirms_on_win_or_tie_and_revokes_on_loss_or_invalid(outcome, after):
    assert crown_status("provisional", "promote", outcome) == after
    assert crown_status("confirmed", "promote", outcome) == after


@pytest.mark.parametrize("outcome", ["win", "tie", "loss"])
def test_a_valid_explore_run_is_provisional_and_moves_no_settled_standing(outcome):
    assert crown_status("none", "explore", outcome) == "provisional"
    assert crown_status("confirmed", "explore", outcome) == "confirmed"
    assert crown_status("revoked", "explore", outcome) == "revoked"


def test_an_invalid_explore_run_gives_nothing_and_takes_nothing():
    assert crown_status("none", "explore", "invalid") == "none"
    assert crown_status("provisional", "explore", "invalid") == "provisional"


def test_a_standing_is_not_worked_out_from_unknown_words():
    with pytest.raises(UsageError, match="unknown outcome 'draw'"):
        crown_status("provisional", "promote", "draw")
    with pytest.raises(UsageError, match="unknown parameter ladder stage 'promoted'"):
        crown_status("provisional", "promoted", "win")


def test_the_ladder_document_has_its_schema_stages_and_public_lock():
    document = scale_ladder_document()
    assert document["schema"] == "prism_scale_ladder.v1"
    assert document["stages"] == ["explore", "promote", "full_scale"]
    assert document["stage_detail"]["explore"]["param_cap"] == 124_000_000
    assert document["stage_detail"]["promote"]["param_cap"] == 350_000_000
    assert document["stage_detail"]["full_scale"]["execution_mode"] == "full_scale_eval"
    assert document["stage_detail"]["full_scale"]["phase_2_token_target"] == 100_000_000_000
    assert document["min_public_seeds"] == document["public_posture_requires_k_ge"] == 3
    assert document["default_public_seeds"] == [1337, 2027, 4242]
    assert document["k1_is_provisional"] is True and document["wall_clock_never_ranks"] is True
    assert (document["emission_primary"], document["emission_secondary"]) == ("heldout_delta", "prequential_bpb")
    assert document["phases"]["p1"]["seq_len"] == 256
    orjson.dumps(document)


def test_the_annex_has_exactly_its_keys_and_claims_no_crown():
    annex = research_protocol_annex()
    assert set(annex) == {
        "schema",
        "annex_id",
        "role",
        "non_emission",
        "emission_weight_crown",
        "silent_emission_rewrite",
        "protocol_id",
        "multimetric_scorecard_id",
        "complete_view_scorecard_id",
        "complete_view_schema",
        "densify_entrypoints_schema",
        "scale_ladder_schema",
        "min_public_seeds",
        "wall_clock_never_ranks",
        "tee_package",
        "notes",
    }
    assert annex["schema"] == "prism_research_protocol_annex.v1"
    assert annex["non_emission"] is True
    assert annex["emission_weight_crown"] is False
    assert annex["silent_emission_rewrite"] is False
    assert_research_protocol_annex(annex)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"emission_weight_crown": True}, "emission_weight_crown"),
        ({"non_emission": False}, "non_emission"),
        ({"silent_emission_rewrite": True}, "silent_emission_rewrite"),
        ({"weight": 0.1}, r"weight \(unknown\)"),
    ],
)
def test_a_document_that_claims_the_crown_is_not_the_annex(change, named):
    with pytest.raises(UsageError, match=named):
        assert_research_protocol_annex({**research_protocol_annex(), **change})
