"""Speed and memory of tokenising a text: `python experiments/bench/prepare.py [--megabytes 100]`.

Regime: one text file of random words with skewed frequencies (Zipf). `python -m nas.prepare` prepares it in an empty
cache, in a new process for each tokenizer. The bpe tokenizer first learns 8,000 pieces. Time and peak
resident memory are those of the whole process. The last line is JSON: {"megabytes", "rows": [{"tokenizer", "tokens",
"seconds", "tokens_per_s", "peak_mb"}]}.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
TOKENIZERS = {"bpe": 8000, "words": 50_000, "bytes": 8000}  # vocabulary sizes


def make_text(path: Path, megabytes: float) -> None:
    """Write lines of words drawn by Zipf's law from 60,000 random words."""
    random = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfw"))
    words = np.array(["".join(random.choice(letters, random.integers(2, 10))) for _ in range(60_000)])
    with open(path, "w", encoding="utf-8") as file:
        while file.tell() < megabytes * 1e6:
            ranks = np.minimum(random.zipf(1.3, 200_000), len(words)) - 1
            for line in np.array_split(words[ranks], 8_000):
                file.write(" ".join(line) + " .\n")


def measure(text: Path, tokenizer: str, vocab_size: int, folder: Path) -> dict:
    config = folder / f"{tokenizer}.yaml"
    config.write_text(json.dumps({"data": {"source": str(text), "tokenizer": tokenizer, "vocab_size": vocab_size}}))
    command = [sys.executable, "-m", "nas.prepare", str(config), f"data.cache={folder / tokenizer}"]
    started = time.perf_counter()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - started
    if process.returncode:
        raise SystemExit(f"{tokenizer} failed with status {process.returncode}")
    tokens = sum(int(line.split()[1].replace(",", "")) for line in output.splitlines()[1:])
    peak_mb = round(usage.ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3))
    rate = round(tokens / seconds)
    row = {"tokenizer": tokenizer, "tokens": tokens, "seconds": round(seconds, 1)}
    return row | {"tokens_per_s": rate, "peak_mb": peak_mb}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=100)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, rows = Path(name), []
        make_text(folder / "text.txt", arguments.megabytes)
        own_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        print(f"{'tokenizer':<14}{'tokens':>14}{'seconds':>10}{'tokens/s':>12}{'peak MB':>10}")
        for tokenizer, vocab_size in TOKENIZERS.items():
            rows.append(measure(folder / "text.txt", tokenizer, vocab_size, folder))
            name, tokens, seconds, rate, peak_mb = rows[-1].values()
            print(f"{name:<14}{tokens:>14,}{seconds:>10}{rate:>12,}{peak_mb:>10,}")
        print(f"(peaks below {own_mb:.0f} MB, this process's own memory, cannot be measured)")
        print(json.dumps({"megabytes": arguments.megabytes, "rows": rows}))


if __name__ == "__main__":
    main()
