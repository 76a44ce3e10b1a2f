"""Each example prints what is stored beside it; the ring attention job is right however it is started.

After a change that is meant to change an output:  python launch.py -n 4 examples/NAME.py > examples/output/NAME.txt
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NUMBERED = sorted(path.stem for path in EXAMPLES.glob("[0-9][0-9]_*.py"))
RANKS = {"01_hello_device": 1}  # the others: 4

pytestmark = pytest.mark.processes


def run(*command, status=0):
    """Run a command in the root of the project; return its standard output, or standard error when it must fail."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    for name in [n for n in environment if n.startswith(("HCCL_", "OMPI_", "PMI", "PRTE_"))]:
        del environment[name]
    environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(
        [str(word) for word in command], cwd=ROOT, env=environment, capture_output=True, encoding="utf-8", timeout=120
    )
    assert done.returncode == status, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stderr if status else done.stdout


def launch(ranks, *command, **options):
    return run(sys.executable, "launch.py", "-n", ranks, *command, **options)


def job(*options):
    return EXAMPLES / "ring_attention.py", "--json", "--tokens", 203, *options


def only_json(text):
    """The one JSON object that is all of the output."""
    lines = text.splitlines()
    assert len(lines) == 1, text
    return json.loads(lines[0])


def test_there_is_an_output_for_every_numbered_example():
    assert len(NUMBERED) >= 7
    assert sorted(path.stem for path in (EXAMPLES / "output").glob("*.txt")) == NUMBERED


@pytest.mark.parametrize("name", NUMBERED)
def test_the_output_is_the_stored_one(name):
    printed = launch(RANKS.get(name, 4), EXAMPLES / f"{name}.py")
    assert printed == (EXAMPLES / "output" / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NUMBERED)
def test_an_example_fits_on_a_screen(name):
    assert len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= 60


@pytest.mark.parametrize(("ranks", "layout"), [(1, "zigzag"), (3, "contiguous"), (4, "zigzag"), (5, "striped")])
def test_the_ring_attention_job_is_right(ranks, layout):
    report = only_json(launch(ranks, *job("--layout", layout)))
    assert report["ranks"] == ranks
    assert report["tokens"] == sum(report["tokens_by_rank"]) == 203
    assert 0 < report["max_abs_error"] < 2e-6
    assert report["virtual_s"] > 0
    assert report["wall_s"] > 0
    # every block of K and V is passed on to the right by all ranks but the last that gets it
    block = [2 * 4 * 64 * 4 * tokens for tokens in report["tokens_by_rank"]]
    sent = [sum(block) - block[(rank + 1) % ranks] for rank in range(ranks)]
    links = {f"{rank}->{(rank + 1) % ranks}": sent[rank] for rank in range(ranks)} if ranks > 1 else {}
    assert report["bytes_by_link"] == links
    assert report["bytes_sent_per_rank"] == (max(sent) if ranks > 1 else 0)


@pytest.mark.parametrize(("dtype", "limit"), [("float64", 1e-13), ("float16", 2e-3), ("bfloat16", 2e-2)])
def test_the_job_takes_other_types_shared_heads_and_no_mask(dtype, limit):
    report = only_json(launch(2, *job("--dtype", dtype, "--heads", 6, "--kv-heads", 2, "--dim", 16, "--no-causal")))
    assert 0 < report["max_abs_error"] <= report["tolerance"]
    assert report["max_abs_error"] < limit


def test_the_job_runs_alone_without_a_launcher():
    report = only_json(run(sys.executable, *job()))
    assert report["ranks"] == 1
    assert report["max_abs_error"] < 2e-6
    assert report["bytes_sent_per_rank"] == 0


def test_the_job_runs_under_plain_mpirun():
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("there is no mpirun")
    report = only_json(run(mpirun, "--oversubscribe", "-n", 3, sys.executable, *job()))
    assert report["ranks"] == 3
    assert report["max_abs_error"] < 2e-6


def test_the_job_reads_a_document_and_prints_tables(tmp_path):
    document = tmp_path / "text.txt"
    document.write_text("Grüße an den Ring. " * 3, encoding="utf-8")
    printed = launch(2, EXAMPLES / "ring_attention.py", document)
    for words in ("tokens", "63", "max error", "0->1", "1->0", "compute", "wait", "communication", "virtual time"):
        assert words in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["no/such/file"], "no such file"),
        (["--heads", 4, "--kv-heads", 3], "--heads 4 is not a multiple of --kv-heads 3"),
        (["--tokens", 0], "at least 1"),
        (["--layout", "blocked"], "invalid choice: 'blocked'"),
    ],
)
def test_wrong_options_are_named(options, message):
    assert message in run(sys.executable, EXAMPLES / "ring_attention.py", *options, status=2)


def test_an_empty_document_is_named(tmp_path):
    (tmp_path / "empty").touch()
    assert "the document is empty" in launch(2, EXAMPLES / "ring_attention.py", tmp_path / "empty", status=1)
