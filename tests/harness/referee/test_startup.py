"""A single rank starts without torchrun's agent, and finds what torchrun would have set."""

import os
import subprocess
import sys

import pytest

from prism_fast.harness.process.jobs import Hello, Started
from prism_fast.harness.referee.launch import TrainerResult, single_rank_environment
from prism_fast.harness.referee.seed_run import startup_parts
from prism_fast.profiling.machine import process_age_s

RENDEZVOUS = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
assert (dist.get_rank(), dist.get_world_size()) == (0, 1) and dist.is_torchelastic_launched()
total = torch.ones(1)
dist.all_reduce(total)
dist.destroy_process_group()
print(int(total))
"""


def test_a_single_ranks_environment_makes_a_process_group():
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", **single_rank_environment()}
    done = subprocess.run([sys.executable, "-c", RENDEZVOUS], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "1", done.stderr


def test_a_single_ranks_environment_has_every_variable_that_torchrun_sets():
    source = subprocess.run(
        [
            sys.executable,
            "-c",
            "import torch.distributed.elastic.agent.server.local_elastic_agent as a; print(a.__file__)",
        ],
        capture_output=True,
        text=True,
    ).stdout.strip()
    with open(source) as file:
        text = file.read()
    named = [name for name in single_rank_environment() if f'"{name}"' in text]
    assert {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} <= set(named)
    assert len(named) == len(single_rank_environment())


def test_the_parts_of_the_start_add_up():
    result = TrainerResult(
        hello={0: Hello.model_construct(import_s=3.0, prepare_s=0.25)},
        started={0: Started(rank=0, bundle_import_s=0.5)},
        launch_s=4.0,
        tracing_s=1.0,
        first_batch_s=1.5,
    )
    parts = startup_parts(result)
    assert sum(parts.values()) == pytest.approx(4.0 + 0.5 + 1.5)
    assert parts["launch"] == 0.75 and parts["bundle_setup"] == 0.5 and parts["programs"] == 1.0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_process_knows_its_age():
    code = "from prism_fast.profiling.machine import process_age_s; print(process_age_s())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.0 < float(done.stdout) < process_age_s() + 60
