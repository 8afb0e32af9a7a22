"""Coverage-guided fuzzing of every decoder, with atheris (libFuzzer).

    python -m tools.fuzz --seconds 60              # each target of tests/fuzz/targets.py for a minute
    python -m tools.fuzz --seconds 600 tensors     # one of them

Needs the extra ``fuzz``. What was found stays in runs/fuzz/TARGET: the corpus that grows, and each input that
failed. To have the tests replay such an input, copy it to tests/fuzz/corpus/TARGET.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

KEPT = Path("tests/fuzz/corpus")
FOUND = Path("runs/fuzz")
MAX_INPUT_BYTES = 4096
MAX_SECONDS = 10
"""What one input may take: more is a hang."""

MAX_MEMORY_MB = 4096
"""Of the whole process, with torch; more means that an input allocates without bounds."""


def main() -> int:
    """Returns 1 if an input failed, 2 if atheris is missing."""
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description="Fuzz the decoders.")
    parser.add_argument("targets", nargs="*", help="names; default: all")
    parser.add_argument("--seconds", type=int, default=60, help="for each target (default: 60)")
    if sys.argv[1:2] == ["--inside"]:  # libFuzzer's options follow
        return _fuzz(sys.argv[2], sys.argv[3:])
    options = parser.parse_args()
    if importlib.util.find_spec("atheris") is None:
        print("the fuzzer needs atheris: pip install --group fuzz", file=sys.stderr)
        return 2
    names = options.targets or sorted(path.name for path in KEPT.iterdir())
    failed = [name for name in names if _run(name, options.seconds)]
    print(f"{len(names)} targets, failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def _run(name: str, seconds: int) -> bool:
    """Fuzzes a target in a process of its own, as libFuzzer ends its process. Returns whether it failed."""
    corpus = FOUND / name / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    limits = [
        f"-max_total_time={seconds}",
        f"-max_len={MAX_INPUT_BYTES}",
        f"-timeout={MAX_SECONDS}",
        f"-rss_limit_mb={MAX_MEMORY_MB}",
        f"-artifact_prefix={FOUND / name}/",
        "-print_final_stats=1",
    ]
    command = [sys.executable, "-m", "tools.fuzz", "--inside", name, *limits, str(corpus), str(KEPT / name)]
    log = FOUND / name / "log"
    with log.open("w") as output:
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    lines = log.read_text(errors="replace").splitlines()
    runs = next((line.split()[-1] for line in lines if "number_of_executed_units" in line), "?")
    print(f"{name:20} {runs:>10} runs  {'FAILED, see ' + str(log) if code else 'ok'}", flush=True)
    return code != 0


def _fuzz(name: str, arguments: list[str]) -> int:
    import atheris

    with atheris.instrument_imports(include=["zmqgrad"]):
        targets = importlib.import_module("tests.fuzz.targets").TARGETS
    atheris.Setup([sys.argv[0], *arguments], targets[name])
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
