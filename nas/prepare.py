"""Text -> memory-mapped tokens: `python -m nas.prepare CONFIG.yaml [section.key=value ...]`. Imports no torch.

Text streams through in chunks, so that memory does not grow with the corpus. Ids are ranked by their frequency in the
train split, as the adaptive softmax needs. A prepared corpus is a folder in the cache whose name is a digest of the
text and of the options, so that preparing the same data twice is a cache hit, and changed data never is.
"""

import argparse
import time

import yaml

from nas.core.config_loading import load_config
from nas.core.errors import run_command
from nas.data.preprocess import prepare


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m nas.prepare", description="Prepare the tokens of a configuration.")
    parser.add_argument("config", help="configuration file (its data section is what counts)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_args()
    options = load_config(arguments.config, arguments.overrides).data
    started = time.perf_counter()
    folder = prepare(options)
    meta = yaml.safe_load((folder / "meta.yaml").read_text())
    print(f"{folder} ({time.perf_counter() - started:.1f} s)")
    for split, about in meta["splits"].items():
        kept = "lossless" if about["lossless"] else "words kept" if about["words_kept"] else "not lossless"
        print(f"{split:>5}: {about['tokens']:,} tokens, {about['words']:,} words, {about['bytes']:,} bytes, {kept}")


if __name__ == "__main__":
    run_command(main)
