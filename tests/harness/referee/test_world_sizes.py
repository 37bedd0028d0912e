"""Several ranks, scored: the same figures open and sealed, whatever the machine is observed to have."""

import pytest

from tests.harness.conftest import ROOT

pytestmark = pytest.mark.slow


@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", [2, 4])
def test_open_and_sealed_agree_bit_for_bit_at_every_world_size(score, world):
    blocks = []
    for seal in ("open", "sealed"):
        options = (f"--seal={seal}", f"--nproc={world}", "--step-budget=3")
        run = score(bundle=ROOT / "examples" / "ssm_tiny", options=options, out=seal, timeout=400)
        assert run.code == 0, run.stderr
        manifest = run.manifest()
        assert manifest.metrics.tokens_seen == 3 * world * 4 * 64
        assert (manifest.run.nproc_per_node, manifest.compute.world_size) == (world, world)
        dump = manifest.model_dump(exclude={"score": {"emission_ineligible_reasons"}})
        del dump["metrics"]["train_series"]["sha256"]  # the series holds wall-clock times
        blocks.append({name: dump[name] for name in ("metrics", "score", "anti_cheat")})
    assert blocks[0] == blocks[1]
