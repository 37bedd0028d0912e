"""What a bundle or a path is called is printed as it is: names are text, never markup, and end no command."""

import re
from pathlib import Path

import pytest

import prism_fast
from prism_fast.harness.audits.doctor import examine
from prism_fast.protocol.campaign import CampaignRun
from prism_fast.report import campaign_table, dry_run_table, scale_tables, tables
from prism_fast.report.console import styled, terminal

NAME = "mine[/] [red]:dog:[bold"  # as markup: a closing tag that nothing opened, a colour, a picture


def test_markup_is_made_in_one_place_alone():
    package = Path(prism_fast.__file__).parent
    for path in package.rglob("*.py"):
        if path.name != "console.py":
            assert not re.search(r"\bConsole\(|rich\.markup|rich import print", path.read_text()), path


def test_styles_are_parts_of_their_own_and_text_stays_text(capsys):
    terminal().print(styled((NAME, "bold"), f" {NAME}"))
    terminal().print(NAME)
    assert capsys.readouterr().out == f"{NAME} {NAME}\n{NAME}\n"


def test_control_sequences_do_not_get_through(capsys):
    terminal().print(styled("a\x1b[2Jb\n", ("c\x9bd", "red")))
    terminal().print("e\x1b]0;title\x07f")
    assert capsys.readouterr().out == "a [2Jb\nc d\ne ]0;title f\n"


LEADERBOARD = {
    "rows": [
        {"rank": 1, "final_score": 1.0, "key": NAME, "submission_id": NAME, "seeds": [1], "committed_at": None,
         "crown_eligible": True, "provisional": False, "accounting": "exact"},
    ],
    "crown": NAME,
    "unranked": [{"path": NAME, "reason": NAME}],
}  # fmt: skip
READINESS = {
    "ok": False, "status_label": NAME, "checks": {NAME: False}, "paths": {"a": NAME}, "reasons": [f"why:{NAME}"],
    "phase_1_dataset_subset": NAME, "phase_1_token_target": 1,
    "phase_2_dataset_subset": NAME, "phase_2_token_target": 1,
}  # fmt: skip
CONTRACT = {
    "ok": False,
    "static": {"policy": NAME, "requirements": [{"name": NAME, "met": None, "where": [NAME], "detail": NAME}]},
    "functional": {"runs": [{"world_size": 2, "skipped": NAME}]},
    "nccl_advisory": None,
}
FINDING = {"kind": "reject", "what": NAME, "detail": NAME, "rule": NAME}
DRY_RUN = {"submission_id": NAME, "findings": [FINDING], "ran": [NAME], "not_run": [NAME], "estimate": None}
RUN = CampaignRun.model_construct(
    submission_id=NAME, seed=1, status="failed", rule=NAME, final_score=None, message=NAME, exit_code=4
)
PRINTERS = {
    "rank": (lambda: scale_tables.print_leaderboard(LEADERBOARD), 4),
    "readiness": (lambda: scale_tables.print_readiness(READINESS), 5),
    "check": (lambda: scale_tables.print_contract(CONTRACT), 5),
    "try": (lambda: dry_run_table.print_dry_run(DRY_RUN), 6),
    "doctor": (lambda: tables.print_findings([(NAME, NAME, "broken", NAME)]), 3),
    "campaign": (lambda: terminal().print(campaign_table.campaign_table([RUN])), 2),
}


@pytest.mark.parametrize("command", PRINTERS)
def test_a_table_shows_names_as_they_are(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    show, times = PRINTERS[command]
    show()
    assert capsys.readouterr().out.count(NAME) >= times


def test_doctor_names_the_extra_to_install(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr("prism_fast.harness.audits.doctor.triton_version", lambda: None)
    tables.print_findings([(f.area, f.name, f.state, f.detail) for f in examine()])
    assert "pip install 'prism-fast[triton]'" in capsys.readouterr().out
