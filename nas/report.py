"""Write one HTML page of run folders, with pictures, tables, claims and the commands to repeat them.

RUN_DIRs are folders of searches, trainings, comparisons, or of nas.run, whose page begins with the answer. The page
contains its pictures, loads no other file and runs no script. Its layout suits phones and print.
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

from nas.core.errors import InputError, run_command
from nas.core.files import check_parent


def main() -> None:
    parser = ArgumentParser("python -m nas.report", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("runs", metavar="RUN_DIR", nargs="+", type=Path, help="a search, a training or a comparison")
    out = "output file; an existing file is replaced"
    parser.add_argument("--out", required=True, metavar="FILE.html", type=Path, help=out)
    parser.add_argument("--title", default="A searched language model", help="the page's title (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.out.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"--out {arguments.out} must end in .html")
    check_parent(arguments.out)

    from nas.reporting.page import write_page  # imported late because matplotlib is slow to import

    write_page(arguments.runs, arguments.out, arguments.title)
    print(f"written to {arguments.out}, {arguments.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    run_command(main)
