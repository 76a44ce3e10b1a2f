"""Every transport keeps the contract of a link: one suite of clauses (transport_contract.py) runs over each.

The sides are real: two threads, two processes that map each other's memory, two processes under mpirun.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONTRACT = Path(__file__).with_name("transport_contract.py")
ROOT = Path(__file__).resolve().parents[2]
MPI_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
}
CLAUSES = [
    "a_record_is_found_once_its_owner_has_opened_it",
    "a_name_that_is_taken_is_refused",
    "what_was_published_before_a_record_is_looked_for_is_there",
    "words_arrive_in_the_order_of_publishing",
    "data_of_every_size_arrives",
    "transfers_of_one_tag_keep_their_order_and_tags_do_not_mix",
    "last_words_are_heard_after_the_record_is_closed",
    "a_peer_that_lives_is_not_gone",
    "a_peer_that_has_ended_is_gone",
    "close_may_be_repeated",
]
TRANSPORTS = [pytest.param(name, id=f"over-{name}", marks=pytest.mark.processes) for name in ("local", "shm", "mpi")]


@pytest.fixture(scope="module")
def outcome():
    """Run the contract over a transport, once."""
    done: dict[str, dict[str, str]] = {}

    def of(transport: str) -> dict[str, str]:
        if transport not in done:
            command = [sys.executable, str(CONTRACT), transport]
            if transport == "mpi":
                beside = Path(sys.executable).with_name("mpirun")
                mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
                if mpirun is None:
                    pytest.skip("there is no mpirun, neither beside this Python nor on PATH")
                command = [mpirun, "-n", "2", *command]
            environment = {**os.environ, **MPI_ENVIRONMENT, "PYTHONPATH": str(ROOT)}
            run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
            assert run.stdout.strip(), run.stderr
            done[transport] = json.loads(run.stdout.strip().splitlines()[-1])
        return done[transport]

    return of


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("clause", CLAUSES)
def test_contract(outcome, transport, clause):
    assert outcome(transport)[clause] == ""


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_clause_is_listed(outcome, transport):
    assert sorted(outcome(transport)) == sorted(CLAUSES)
