"""Continue a text with a trained model: `python -m nas.generate RUN_DIR --prompt "Once upon a time"`.

RUN_DIR is the run folder of a training, or a folder that nas.export wrote. The program prints the prompt and the new
text. It reads the prompt once; then each token costs one position. Without --prompt the text begins after a line end.
A byte order mark and the last line end of a prompt from a file or the standard input are dropped.
"""

import codecs
import re
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path

from nas.core.errors import InputError, run_command
from nas.core.files import check_parent, read_input


def parse_arguments() -> Namespace:
    parser = ArgumentParser("python -m nas.generate", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN_DIR", type=Path, help="a training, or an exported folder")
    parser.add_argument("stdin", nargs="?", metavar="-", help="read the prompt from the standard input")
    parser.add_argument("--prompt", metavar="TEXT")
    parser.add_argument("--prompt-file", metavar="FILE")
    parser.add_argument("--tokens", type=int, default=200, metavar="N", help="new tokens (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0: most probable (default: 1)")
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K most probable tokens; 0: all")
    parser.add_argument("--top-p", type=float, metavar="P", help="draw from the fewest tokens that sum to at least P")
    stop = "end the new text before TEXT (may be repeated)"
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help=stop)
    parser.add_argument("--lines", type=int, default=0, metavar="N", help="end the new text after N lines; 0: none")
    parser.add_argument("--seed", type=int, metavar="S", help="repeats the text (default: another text each time)")
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="number of texts (default: 1)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    out = "also write the new text, as bytes; several samples: FILE.1, FILE.2, ..."
    parser.add_argument("--out", metavar="FILE", type=Path, help=out)
    arguments = parser.parse_intermixed_args()
    if arguments.stdin not in (None, "-"):
        advice = "put quotes around a prompt" if arguments.prompt else "give a prompt with --prompt TEXT"
        raise InputError(f"{arguments.stdin!r} is not '-'; {advice}")
    if sum(given is not None for given in (arguments.stdin, arguments.prompt, arguments.prompt_file)) > 1:
        raise InputError("give only one of --prompt, --prompt-file and -")
    return arguments


def out_files(out: Path | None, samples: int) -> list[Path]:
    if out is None:
        return []
    check_parent(out)
    files = [out] if samples == 1 else [out.with_name(f"{out.name}.{number}") for number in range(1, samples + 1)]
    if existing := next((file for file in files if file.is_file() or file.is_dir()), None):
        raise InputError(f"--out {out}: {existing} exists; name another file, or remove it")
    return files


def read_prompt(file: str) -> bytes:
    """The content of a file, without a byte order mark and the last line end."""
    return re.sub(rb"\r?\n\Z", b"", read_input(file).removeprefix(codecs.BOM_UTF8))


def main() -> None:
    arguments = parse_arguments()
    files, file = out_files(arguments.out, arguments.samples), arguments.stdin
    file = arguments.prompt_file if file is None else file
    prompt = read_prompt(file) if file is not None else (arguments.prompt or "").encode("utf-8", "surrogateescape")

    from nas import load_model
    from nas.inference.generation import Sampling

    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p)
    model = load_model(arguments.run, arguments.device)
    samples, texts, count = arguments.samples, [b""] * arguments.samples, 0
    new = model.stream(prompt, arguments.tokens, sampling, arguments.seed, samples, arguments.stop, arguments.lines)
    if unknown := [f"{word} as {read}" for word, read in model.unknown_words(prompt).items()]:
        print(f"NOTICE: the vocabulary lacks some words or letters; it reads {', '.join(unknown)}", file=sys.stderr)
    screen = codecs.getincrementaldecoder("utf-8")(errors="replace")  # bytes of a character may come one by one
    if samples == 1:
        print(screen.decode(prompt), end="", flush=True)
    began = time.perf_counter()
    for pieces in new:
        count += 1
        texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
        if samples == 1:
            print(screen.decode(pieces[0]), end="", flush=True)
    seconds = time.perf_counter() - began
    if samples == 1:
        print(screen.decode(b"", final=True))
    for number, text in enumerate(texts if samples > 1 else (), start=1):
        print(f"--- sample {number}\n{(prompt + text).decode('utf-8', errors='replace')}")
    for file, text in zip(files, texts):
        file.write_bytes(text)
    if files:
        print(f"written to {', '.join(map(str, files))}", file=sys.stderr)
    tokens = min(count, arguments.tokens) * samples
    print(f"{tokens} tokens in {seconds:.1f} s with the prompt, {tokens / seconds:,.0f} tokens/s", file=sys.stderr)


if __name__ == "__main__":
    run_command(main, only_prints=not any(argument.startswith("--out") for argument in sys.argv))
