"""What the README prints is what happens: its example runs, its commands and options exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.processes
def test_the_example_prints_the_line_that_the_readme_shows(tmp_path: Path) -> None:
    [code] = re.findall(r"```python\n(.*?)```", README, re.S)
    script = tmp_path / "example.py"
    script.write_text(code)
    command = [sys.executable, str(ROOT / "launch.py"), "-n", "4", "--timeout", "120", str(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=180)
    [shown] = re.findall(r"`(rank 2 of 4: .*)`", README)
    assert result.returncode == 0, result.stderr
    assert shown in result.stdout.splitlines()
    assert len(result.stdout.splitlines()) == 4


def test_the_two_commands_are_single_lines_that_make_their_own_environment() -> None:
    commands = re.findall(r"<!-- ci: run -->\n```bash\n(.*?)\n```", README)
    assert len(commands) == 2
    assert all(command.startswith("python3 -m venv .venv && ") and "\n" not in command for command in commands)


def test_paths_and_modules_that_the_readme_names_exist() -> None:
    for module in set(re.findall(r"python -m (hccl\.\w+)", README)):
        assert (ROOT / (module.replace(".", "/") + ".py")).exists(), module
    named = set(re.findall(r"python ((?:examples|benchmarks)/\S+\.py)", README))
    for path in named | {"launch.py", "ARCHITECTURE.md"}:
        assert (ROOT / path).exists(), path
