"""`prism-fast init` and `prism-fast try`, as a miner meets them."""

import orjson
import pytest

from prism_fast.harness.bundle.bundle import load_bundle
from prism_fast.harness.bundle.starter import DEFAULT_EXAMPLE, examples, summary, write_starter
from prism_fast.protocol.errors import UsageError
from tests.cli.test_main import run

VOCABULARY = "prism:vocab-mismatch"


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def test_init_writes_a_bundle_and_never_over_one(tmp_path):
    target = tmp_path / "new" / "bundle"
    done = run("init", str(target))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(target / "architecture.py"), str(target / "training.py")]
    assert load_bundle(target).scripts == load_bundle(examples()[DEFAULT_EXAMPLE]).scripts
    (target / "training.py").unlink()
    again = run("init", str(target))
    assert again.returncode == 2 and f"{target / 'architecture.py'}: is there already" in again.stderr
    assert not (target / "training.py").exists()


@pytest.mark.parametrize("name", sorted(examples()))
def test_every_example_can_be_a_start_and_says_what_it_is(tmp_path, name):
    write_starter(tmp_path / "bundle", name)
    assert load_bundle(tmp_path / "bundle").digest == load_bundle(examples()[name]).digest
    assert summary(examples()[name]).endswith(".")


def test_an_unknown_example_or_a_file_in_the_way_is_named(tmp_path):
    with pytest.raises(UsageError, match="--example rnn: no such example; expected fused_loss, "):
        write_starter(tmp_path / "bundle", "rnn")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="a file is in the way"):
        write_starter(tmp_path / "file")
    assert run("init").returncode == 2


def test_try_names_a_bundle_of_the_wrong_shape_without_running_it(tmp_path):
    write_starter(tmp_path / "bundle")
    (tmp_path / "bundle" / "training.py").write_text("def trian(ctx): ...\n")
    done = run("try", str(tmp_path / "bundle"), "--json")
    assert done.returncode == 3, done.stderr
    document = orjson.loads(done.stdout)
    assert not document["ok"] and document["estimate"] is None
    assert [(f["kind"], f["rule"]) for f in document["findings"]] == [("reject", "prism:bundle-shape")]
    assert document["ran"] == ["the scripts were read"] and document["not_run"] == ["the bundle itself"]


@pytest.mark.slow
def test_try_finds_nothing_in_a_starter_and_says_how_long_scoring_takes(tmp_path, cache_dir):
    write_starter(tmp_path / "bundle")
    done = run("try", str(tmp_path / "bundle"), "--seconds=8", f"--cache-dir={cache_dir}", "--json")
    assert done.returncode == 0, done.stderr
    document = orjson.loads(done.stdout)
    assert document["ok"] and {f["kind"] for f in document["findings"]} <= {"ok", "warn"}
    assert {"forced init", "probes", "parameters", "shapes"} <= {f["what"] for f in document["findings"]}
    assert any("seed 1337" in ran and "batches" in ran for ran in document["ran"])
    assert any(word.startswith("seeds 2027") for word in document["not_run"])
    assert any("several ranks" in word for word in document["not_run"])
    estimate = document["estimate"]
    assert estimate["token_budget"] == 500_000 and 0 < estimate["tokens"] <= 500_000
    assert estimate["total_s"] == pytest.approx(estimate["start_s"] + estimate["train_s"] + estimate["heldout_s"])
    assert estimate["train_s"] <= 1200


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("is_causal=True", "is_causal=False", "prism:noncausal"),
        ("return self.head(self.hidden(tokens))", "return self.head(self.hidden(tokens))[..., :50000]", VOCABULARY),
    ],
)
def test_try_names_what_official_scoring_would_reject(tmp_path, cache_dir, old, new, rule):
    bundle = tmp_path / "bundle"
    write_starter(bundle)
    script = bundle / "architecture.py"
    assert old in script.read_text()
    script.write_text(script.read_text().replace(old, new))
    done = run("try", str(bundle), "--seconds=30", f"--cache-dir={cache_dir}", "--json")
    assert done.returncode == 3, done.stdout + done.stderr
    assert rule in [f["rule"] for f in orjson.loads(done.stdout)["findings"] if f["kind"] == "reject"]
