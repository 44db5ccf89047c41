"""Prepare the tokens of a configuration: `python -m nas.prepare CONFIG.yaml [section.key=value ...]`.

The same text and options give the same folder in the cache, so the training commands find it there.
"""

import argparse
import time

from nas.core.config_loading import load_config
from nas.core.errors import run_command
from nas.core.files import read_yaml
from nas.data.corpus import prepare


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m nas.prepare", description="Prepare the tokens of a configuration.")
    parser.add_argument("config", metavar="CONFIG.yaml", help="configuration file; only its data section is used")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_args()
    options = load_config(arguments.config, arguments.overrides).data

    started = time.perf_counter()
    folder = prepare(options, print)
    print(f"{folder} ({time.perf_counter() - started:.1f} s)")
    for split, facts in read_yaml(folder / "meta.yaml")["splits"].items():
        kept = "lossless" if facts["lossless"] else "words kept" if facts["words_kept"] else "not lossless"
        print(f"{split:>5}: {facts['tokens']:,} tokens, {facts['words']:,} words, {facts['bytes']:,} bytes, {kept}")


if __name__ == "__main__":
    run_command(main)
