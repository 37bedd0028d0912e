"""A campaign's bookkeeping: verdicts stand, machine faults are tried again, what is done is not done twice."""

import os
import sqlite3
import subprocess
import sys
import zipfile

import orjson
import pytest

import prism_fast
from prism_fast.campaign.campaign import find_submissions, run_campaign
from prism_fast.campaign.job import LOG_FILE, Job, Outcome, run_job
from prism_fast.campaign.store import Store
from prism_fast.protocol.campaign import CAMPAIGN_FILE, CampaignRun, campaign_file, read_campaign
from prism_fast.protocol.errors import DataError, EngineFault, UsageError
from prism_fast.report.rank import rank_runs
from tests.harness.conftest import write_bundle
from tests.report.conftest import write_seed

OPTIONS = ["--data=sample"]


class ScriptedPool:
    """Ends each job as its script says: a number is the exit code of `score`, a sentence how the worker died."""

    def __init__(self, endings=None):
        self.endings = {key: list(value) for key, value in (endings or {}).items()}
        self.jobs, self.ended = [], []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def submit(self, job):
        self.jobs.append(job)
        name = job.bundle.name
        script = self.endings.get((name, job.seed), [])
        ending = script.pop(0) if script else 0
        job.work.mkdir(parents=True)
        (job.work / LOG_FILE).write_text("prism-fast: as scripted\n")
        if ending in (0, 4):
            status = "scored" if ending == 0 else "failed"
            place = job.work / f"seed-{job.seed}"
            write_seed(place, bundle=job.bundle.submission_id, seed=job.seed, status=status)
        outcome = Outcome(None, ending) if isinstance(ending, str) else Outcome(ending, "as scripted", "node", 1.0)
        self.ended.append((job, outcome))

    def finished(self, timeout_s):
        ended, self.ended = self.ended, []
        return ended


@pytest.fixture
def submissions(tmp_path):
    for name in ("a", "b"):
        write_bundle(tmp_path / "submissions" / name, training=f"# {name}\ndef train(ctx): ...\n")
    return tmp_path / "submissions"


def run(submissions, out, pool, seeds=(1, 2), options=OPTIONS, **kwargs):
    return run_campaign(find_submissions(submissions), seeds, out, options, lambda: pool, **kwargs)


def rows(out):
    return {
        (r.submission_id.rpartition("-")[0] or r.submission_id, r.seed): r for r in read_campaign(out / CAMPAIGN_FILE)
    }


def test_every_bundle_and_seed_comes_to_its_verdict_and_is_ranked(submissions, tmp_path):
    pool = ScriptedPool({("b", 2): [4]})
    assert run(submissions, tmp_path / "out", pool) == 0
    found = rows(tmp_path / "out")
    assert {key: row.status for key, row in found.items()} == {
        ("a", 1): "scored",
        ("a", 2): "scored",
        ("b", 1): "scored",
        ("b", 2): "failed",
    }
    for row in found.values():
        assert (tmp_path / "out" / row.run_dir / "status.json").is_file()
        assert (row.attempts, row.node, row.seconds) == (1, "node", 1.0)
    assert not list((tmp_path / "out" / "work").iterdir())
    board = rank_runs([tmp_path / "out"])
    assert [r["submission_id"].rpartition("-")[0] for r in board["rows"]] == ["a"]
    assert board["rows"][0]["seeds"] == [1, 2]
    assert board["rows"][0]["final_score"] == pytest.approx(
        sum(found["a", seed].final_score for seed in (1, 2)) / 2, rel=1e-15
    )
    assert board["unranked"][0]["reason"].startswith("seed 2 failed: ")
    # the same figures from the runs' own files
    folders = sorted((tmp_path / "out" / "runs").iterdir())
    assert [r["final_score"] for r in rank_runs(folders)["rows"]] == [r["final_score"] for r in board["rows"]]


def test_a_machines_fault_is_tried_again_and_a_bundles_is_not(submissions, tmp_path):
    pool = ScriptedPool({("a", 1): ["its worker died", 5, 0], ("a", 2): [4], ("b", 1): [3], ("b", 2): [7]})
    assert run(submissions, tmp_path / "out", pool) == 0
    found = rows(tmp_path / "out")
    assert (found["a", 1].status, found["a", 1].attempts) == ("scored", 3)
    assert (found["a", 2].status, found["a", 2].attempts) == ("failed", 1)
    assert (found["b", 1].status, found["b", 1].exit_code, found["b", 1].attempts) == ("rejected", 3, 1)
    assert (found["b", 2].status, found["b", 2].exit_code, found["b", 2].attempts) == ("failed", 7, 1)
    assert len({job.work for job in pool.jobs}) == len(pool.jobs) == 6


def test_faults_without_end_are_given_up_and_taken_up_by_the_next_call(submissions, tmp_path):
    out = tmp_path / "out"
    assert run(submissions, out, ScriptedPool({("a", 1): ["gone"] * 9}), retries=1) == 5
    row = rows(out)["a", 1]
    assert (row.status, row.attempts, row.message) == ("fault", 2, "gone")
    later = ScriptedPool()
    assert run(submissions, out, later) == 0
    assert [(job.bundle.name, job.seed) for job in later.jobs] == [("a", 1)]
    assert (rows(out)["a", 1].status, rows(out)["a", 1].message) == ("scored", None)


def test_a_campaign_that_was_cut_off_goes_on_where_it_was(submissions, tmp_path):
    class Cut(ScriptedPool):
        def finished(self, timeout_s):
            if len(self.ended) < 4:
                raise KeyboardInterrupt
            first, self.ended = self.ended[:2], self.ended[2:3]
            return first

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run(submissions, out, Cut())
    assert sorted(key for key, row in rows(out).items() if row.status == "scored") == [("a", 1), ("a", 2)]
    later = ScriptedPool()
    assert run(submissions, out, later) == 0
    assert [(job.bundle.name, job.seed) for job in later.jobs] == [("b", 1), ("b", 2)]
    untouched = ScriptedPool()
    assert run(submissions, out, untouched) == 0 and not untouched.jobs


def test_more_seeds_or_bundles_are_added_to_what_is_there(submissions, tmp_path):
    out = tmp_path / "out"
    run(submissions, out, ScriptedPool(), seeds=(1,))
    write_bundle(submissions / "c")
    pool = ScriptedPool()
    assert run(submissions, out, pool, seeds=(1, 2)) == 0
    assert [(j.bundle.name, j.seed) for j in pool.jobs] == [("a", 2), ("b", 2), ("c", 1), ("c", 2)]


def test_a_bundle_of_the_wrong_shape_is_rejected_without_a_worker(submissions, tmp_path):
    (submissions / "b" / "training.py").unlink()
    (submissions / "c.zip").write_text("no archive")
    (submissions / ".hidden").mkdir()
    pool = ScriptedPool()
    assert run(submissions, tmp_path / "out", pool, seeds=(1,)) == 0
    assert [job.bundle.name for job in pool.jobs] == ["a"]
    for name in ("b", "c.zip"):
        row = rows(tmp_path / "out")[name, 1]
        assert (row.status, row.exit_code, row.rule) == ("rejected", 3, "prism:bundle-shape")
    assert len(rows(tmp_path / "out")) == 3


def test_options_that_score_does_not_take_end_the_campaign(submissions, tmp_path):
    with pytest.raises(UsageError, match="as scripted"):
        run(submissions, tmp_path / "out", ScriptedPool({("a", 1): [2]}))
    assert rows(tmp_path / "out")["a", 1].status == "pending"


def test_other_options_or_a_second_command_are_refused(submissions, tmp_path):
    out = tmp_path / "out"
    run(submissions, out, ScriptedPool(), seeds=(1,))
    with pytest.raises(UsageError, match="begun with --data=sample; asked now for --data=else"):
        run(submissions, out, ScriptedPool(), options=["--data=else"])
    with Store(out, OPTIONS), pytest.raises(UsageError, match="another prism-fast campaign is at work"):
        run(submissions, out, ScriptedPool())


def test_the_knobs_of_the_environment_are_the_campaigns_and_bind_it(submissions, tmp_path):
    pool, out = ScriptedPool(), tmp_path / "out"
    run(submissions, out, pool, seeds=(1,), environment={"PRISM_TOKEN_BUDGET": "4096", "HOME": "x"})
    assert {job.environment for job in pool.jobs} == {(("PRISM_TOKEN_BUDGET", "4096"),)}
    with pytest.raises(UsageError, match="begun with --data=sample PRISM_TOKEN_BUDGET=4096; asked now for"):
        run(submissions, out, ScriptedPool())


def test_what_is_no_folder_of_bundles_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no bundle in it"):
        find_submissions(tmp_path / "empty")
    with pytest.raises(UsageError, match="no such file or folder"):
        find_submissions(tmp_path / "nowhere")


def test_a_results_file_of_another_kind_is_named(tmp_path):
    file = tmp_path / CAMPAIGN_FILE
    file.write_bytes(b"not a database, but long enough to be taken for one" * 40)
    assert campaign_file(tmp_path) == campaign_file(file) == file
    with pytest.raises(DataError, match=r"campaign\.sqlite: not a campaign's results"):
        read_campaign(file)
    file.unlink()
    sqlite3.connect(file).execute("PRAGMA user_version = 9").connection.close()
    with pytest.raises(DataError, match="campaign layout 9; expected 1"):
        read_campaign(file)


def test_a_row_reads_back_as_it_was_written(tmp_path):
    with Store(tmp_path, OPTIONS) as store:
        run = CampaignRun(
            submission_id="s", bundle_sha256="0" * 64, seed=3, status="scored", attempts=2, exit_code=0,
            run_dir="runs/s/seed-3", node="n", seconds=1.5, final_score=100.1, prequential_bpb=2.5,
            heldout_delta=0.1, val_bpb_trained=2.0, crown_eligible=True, flags=["no_learning"],
        )  # fmt: skip
        store.write(run)
        assert store.runs() == [run]
        stored = sqlite3.connect(store.file).execute("SELECT options FROM campaign").fetchone()[0]
    assert orjson.loads(stored) == OPTIONS


def test_an_option_that_score_lacks_is_said_in_its_words(submissions, tmp_path):
    (bundle, _) = find_submissions(submissions).bundles.values()
    options = ("--data=sample", "--no-such-option=1")
    with Store(tmp_path / "out", options) as store:
        (tmp_path / "out" / ".campaign.id").write_text(store.id)
        job = Job(bundle, 1, 1, str(tmp_path / "out"), store.id, prism_fast.__version__, options)
        outcome = run_job(job)
    assert outcome.is_usage and "--no-such-option" in outcome.message


def test_a_node_of_another_version_or_file_system_refuses(submissions, tmp_path):
    (bundle, _) = find_submissions(submissions).bundles.values()
    with pytest.raises(EngineFault, match=r"expected 9\.9 on every node"):
        run_job(Job(bundle, 1, 1, str(tmp_path), "id", "9.9", ()))
    with pytest.raises(EngineFault, match="file system that every node shares"):
        run_job(Job(bundle, 1, 1, str(tmp_path / "elsewhere"), "id", prism_fast.__version__, ()))
    (tmp_path / ".campaign.id").write_text("another")
    with pytest.raises(EngineFault, match="is another campaign's"):
        run_job(Job(bundle, 1, 1, str(tmp_path), "id", prism_fast.__version__, ()))


def test_a_write_that_was_cut_off_is_not_there(tmp_path):
    with Store(tmp_path, OPTIONS) as store:
        store.write(CampaignRun(submission_id="s", bundle_sha256="0", seed=1, status="scored"))
    killed = (
        "import os, sqlite3, sys\n"
        "database = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "database.execute('PRAGMA cache_size = 1')\n"  # so that pages reach the file before the end
        "database.execute('BEGIN')\n"
        "for i in range(2000):\n"
        "    database.execute('INSERT INTO runs (submission_id, bundle_sha256, seed, status, attempts)'\n"
        "                     ' VALUES (?, ?, ?, ?, 0)', ('x' * 200, '0', i, 'scored'))\n"
        "os._exit(0)\n"
    )
    before = store.file.stat().st_size
    subprocess.run([sys.executable, "-c", killed, store.file], check=True)
    assert store.file.stat().st_size > before and list(tmp_path.glob("*-journal"))
    assert [run.submission_id for run in read_campaign(store.file)] == ["s"]
    with Store(tmp_path, OPTIONS) as store:
        assert [run.submission_id for run in store.runs()] == ["s"]


def test_a_damaged_submission_of_any_name_is_a_row_and_the_campaign_goes_on(submissions, tmp_path):
    """Cut, mangled and misnamed archives, a folder that cannot be listed, names that are no UTF-8 or two lines."""
    good = tmp_path / "good.zip"
    with zipfile.ZipFile(good, "w", zipfile.ZIP_LZMA) as archive:
        archive.write(submissions / "a/architecture.py", "architecture.py")
        archive.write(submissions / "a/training.py", "training.py")
    data = good.read_bytes()
    for name, content in {
        b"cut.zip": data[:200],
        b"empty.zip": b"",
        b"lzma.zip": data,
        b"no\xffutf8.zip": data[:100] + b"\x00" * 30 + data[130:],
        b"two\nlines.zip": data.replace(b"architecture.py", b"\xe4rchitecture.py"),
    }.items():
        (submissions / os.fsdecode(name)).write_bytes(content)
    (submissions / "empty folder").mkdir()
    pool = ScriptedPool()
    assert run(submissions, tmp_path / "out", pool, seeds=(1,)) == 0
    assert sorted(job.bundle.name for job in pool.jobs) == ["a", "b"]
    rejected = {r.submission_id: r for r in read_campaign(tmp_path / "out" / CAMPAIGN_FILE) if r.status == "rejected"}
    assert set(rejected) == {
        "cut.zip", "empty.zip", "lzma.zip", "no\\xffutf8.zip", "two\\x0alines.zip", "empty folder"
    }  # fmt: skip
    for row in rejected.values():
        assert row.exit_code == 3 and row.rule == "prism:bundle-shape"
        assert row.message.isprintable() and str(submissions) in row.message
    orjson.dumps(rank_runs([tmp_path / "out"]))
