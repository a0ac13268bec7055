"""Documents out of dumps, JSONL, text and parquet; and a sentence for whatever cannot be read."""

import bz2
import gzip
import json
import subprocess
import sys
import tracemalloc

import pytest

from megatron_ce_adaptor.longrun import text_sources
from megatron_ce_adaptor.longrun.data_errors import DatasetError
from megatron_ce_adaptor.longrun.text_sources import bundled_enwiki_slice, iter_documents, source_sha256
from megatron_ce_adaptor.longrun.wiki_markup import tidy_wiki_text

HEAD = '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11">\n'


def page(title, text, ns="0", redirect=False):
    mark = '<redirect title="Elsewhere" />' if redirect else ""
    return (
        f"<page><title>{title}</title><ns>{ns}</ns><id>1</id>{mark}"
        f"<revision><id>1</id><text>{text}</text></revision></page>\n"
    )


def dump(*pages):
    return (HEAD + "".join(pages) + "</mediawiki>\n").encode()


THREE_ARTICLES = dump(
    page("A", "'''Alpha''' is the [[letter|first letter]].{{cite}}"),
    page("Old", "#REDIRECT [[A]]", redirect=True),
    page("Talk:A", "Chatter about alpha.", ns="1"),
    page("Nothing", ""),
    page("B", "Beta is second."),
    page("C", "Gamma is third."),
)
THREE_TEXTS = ["Alpha is the first letter.", "Beta is second.", "Gamma is third."]


def test_bundled_slice_is_clean_wikipedia_text():
    documents = list(iter_documents(bundled_enwiki_slice()))
    assert len(documents) == 106
    assert documents[0].startswith(
        "Anarchism is a political philosophy that advocates self-governed societies"
    )
    assert sum(map(len, documents)) > 2_900_000
    for markup in ("''", "{{", "}}", "[[", "<ref", "File:", "&amp;", "\n\n\n", "(;", "()"):
        assert not [text for text in documents if markup in text], markup


@pytest.mark.parametrize("name", ["d.xml", "d.xml.bz2", "d.xml.gz", "d1.xml-p10p30302.bz2"])
def test_dump_gives_articles_only_in_order(tmp_path, name):
    pack = {"bz2": bz2.compress, "gz": gzip.compress}.get(name.rsplit(".", 1)[1], bytes)
    (tmp_path / name).write_bytes(pack(THREE_ARTICLES))
    assert list(iter_documents(tmp_path / name)) == THREE_TEXTS


@pytest.mark.slow
def test_workers_keep_the_order(tmp_path):
    pages = [page(str(i), f"Article number {i}.") for i in range(50)]
    (tmp_path / "d.xml").write_bytes(dump(*pages))
    expected = [f"Article number {i}." for i in range(50)]
    assert list(iter_documents(tmp_path / "d.xml", workers=2)) == expected


def test_dump_is_streamed(tmp_path):
    with open(tmp_path / "d.xml", "w") as stream:
        stream.write(HEAD)
        for i in range(60):
            stream.write(page(str(i), "word " * 50_000))
        stream.write("</mediawiki>")
    tracemalloc.start()
    try:
        count = sum(1 for _ in text_sources._iter_dump_articles(tmp_path / "d.xml"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 60
    assert peak < 5e6  # 15 MB of text in all, 0.25 MB an article


@pytest.mark.parametrize("name", ["d.jsonl", "d.json", "d.jsonl.gz"])
def test_jsonl(tmp_path, name):
    lines = "\n".join(json.dumps({"id": i, "body": f"Text {i} – ü"}) for i in range(3)) + "\n\n"
    data = lines.encode("utf-8-sig")
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    assert list(iter_documents(tmp_path / name, json_key="body")) == [f"Text {i} – ü" for i in range(3)]


def test_text_file_and_folder(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfsecond\r\nline\n")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "sub" / "c.txt").write_text("third")
    (tmp_path / "note.md").write_text("not a text")
    (tmp_path / "blank.txt").write_text(" \n")
    assert list(iter_documents(tmp_path / "b.txt")) == ["second\nline\n"]
    assert list(iter_documents(tmp_path)) == ["first", "second\nline\n", "third"]


def test_a_huge_text_file_is_cut_at_line_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(text_sources, "_TEXT_DOCUMENT_CHARACTERS", 10)
    (tmp_path / "a.txt").write_text("12345\n67890\nabc\n")
    assert list(iter_documents(tmp_path / "a.txt")) == ["12345\n67890\n", "abc\n"]


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": ["one", None, "two"], "n": [1, 2, 3]}), tmp_path / "d.parquet")
    assert list(iter_documents(tmp_path / "d.parquet")) == ["one", "two"]
    with pytest.raises(DatasetError, match=r"no column 'body' \(found: text, n\)"):
        list(iter_documents(tmp_path / "d.parquet", json_key="body"))
    with pytest.raises(DatasetError, match="holds int"):
        list(iter_documents(tmp_path / "d.parquet", json_key="n"))
    (tmp_path / "bad.parquet").write_bytes(b"PAR0")
    with pytest.raises(DatasetError, match="cannot read"):
        list(iter_documents(tmp_path / "bad.parquet"))


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "d.parquet").write_bytes(b"PAR1")
    with pytest.raises(DatasetError, match=r"needs the package pyarrow.*pip install pyarrow"):
        list(iter_documents(tmp_path / "d.parquet"))


BAD_INPUTS = {
    "empty.xml.bz2": (b"", "is empty"),
    "empty.xml": (b"", "empty or no XML"),
    "garbage.xml": (b"not xml at all", "empty or no XML"),
    "noarticle.xml": (
        dump(page("R", "#REDIRECT [[A]]", redirect=True), page("T", "x", ns="1")),
        "holds no article: 2 pages",
    ),
    "headonly.xml": (dump(), "holds no article: 0 pages"),
    "markuponly.xml": (dump(page("A", "{{template}}")), "holds no document"),
    "foreign.xml": (b"<feed><page/></feed>", "no MediaWiki dump: its root element is <feed>"),
    "truncated.xml": (THREE_ARTICLES[:-100], "cut off or damaged after 5 pages"),
    "truncated.xml.bz2": (bz2.compress(THREE_ARTICLES)[:-20], "cut off"),
    "corrupt.xml.bz2": (b"this is not bzip2 data", "damaged: Invalid data stream"),
    "corrupt.jsonl.gz": (b"this is not gzip data", "damaged: Not a gzipped file"),
    "truncated.jsonl.gz": (gzip.compress(b'{"text": "abc"}\n' * 99)[:-9], "cut off"),
    "flipped.jsonl.gz": (gzip.compress(b'{"text": "a"}')[:10] + b"\xff" * 20, "damaged: "),
    "broken.jsonl": (b'{"text": "a"}\n{"text": \n', "line 2 of .*broken.jsonl is not JSON"),
    "nokey.jsonl": (
        b'{"title": "a", "body": "b"}\n',
        r"no key 'text' \(found: 'title', 'body'\).*--json-keys",
    ),
    "list.jsonl": (b"[1]\n", r"no key 'text' \(found: list\)"),
    "number.jsonl": (b'{"text": 3}\n', "line 1 .*'text' is of type int, expected a string"),
    "blank.jsonl": (b"\n\n", "holds no document"),
    "latin1.txt": ("déjà".encode("latin-1"), "not UTF-8 text.*0xe9"),
    "latin1.jsonl": ('{"text": "déjà"}'.encode("latin-1"), "not UTF-8 text.*0xe9"),
    "unknown.pdf": (b"x", "kind of .*unknown.pdf is unknown: expected"),
    "nosuffix": (b"x", "kind of .*nosuffix is unknown"),
}


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_bad_input_is_one_sentence(tmp_path, name):
    content, sentence = BAD_INPUTS[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DatasetError, match=sentence) as caught:
        list(iter_documents(tmp_path / name))
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_missing_input_and_empty_folder(tmp_path):
    with pytest.raises(DatasetError, match="does not exist"):
        list(iter_documents(tmp_path / "none.xml"))
    with pytest.raises(DatasetError, match=r"holds no \.txt file"):
        list(iter_documents(tmp_path))


def test_a_truncated_dump_gives_its_whole_articles_first(tmp_path):
    (tmp_path / "d.xml").write_bytes(THREE_ARTICLES[:-100])
    documents = iter_documents(tmp_path / "d.xml")
    assert [next(documents), next(documents)] == THREE_TEXTS[:2]


def test_source_sha256_sees_names_and_contents(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    seen = {source_sha256(tmp_path)}
    (tmp_path / "a.txt").write_text("two")
    seen.add(source_sha256(tmp_path))
    (tmp_path / "a.txt").rename(tmp_path / "b.txt")
    seen.add(source_sha256(tmp_path))
    assert len(seen) == 3
    (tmp_path / "other.md").write_text("ignored")
    assert source_sha256(tmp_path) in seen


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("'''Bold''' and ''italic''", "Bold and italic"),
        ("== Life ==\nBorn.\n=== Work ===\nDid.", "Life\n\nBorn.\n\nWork\n\nDid."),
        ("Text.\n== References ==\n* \n== Links ==\n", "Text."),
        ("== A ==\n=== Empty ===\n=== Full ===\nx", "A\n\nFull\n\nx"),
        ("* one\n** two\n#three", "one\ntwo\nthree"),
        ("He (; born 1970) and (,) it ( )", "He (born 1970) and it"),
        ("File:Snow.jpg|The range in snow", "The range in snow"),
        ("A picture|alt=A tree", "A picture"),
        ("__TOC__\na\u00a0 b  \n\n\n\nc", "a b\n\nc"),
        ("x == y and don't", "x == y and don't"),
    ],
)
def test_tidy_wiki_text(markup, text):
    assert tidy_wiki_text(markup) == text


def test_imports_are_light():
    code = (
        "import sys, megatron_ce_adaptor.longrun.prepare_data;"
        "heavy = {'torch', 'gensim', 'tokenizers', 'transformers', 'megatron', 'tqdm'} & set(sys.modules);"
        "sys.exit(','.join(sorted(heavy)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
