"""From wiki markup to plain text: gensim removes the markup, this module tidies what it leaves behind."""

from __future__ import annotations

import re

from megatron_ce_adaptor.longrun.data_errors import missing_package

_QUOTES = re.compile(r"'{2,}")
_GALLERY_LINE = re.compile(r"^[ \t]*(?:File|Image):[^|\n]*", re.MULTILINE | re.IGNORECASE)
_NAMED_PARAMETER = re.compile(r"\|[ \t]*\w+[ \t]*=[^|\n]*")
_MAGIC_WORD = re.compile(r"__[A-Z]+__")
_HEADING = re.compile(r"^(={1,6})[ \t]*(.*?)[ \t]*\1[ \t]*$")
_LIST_MARK = re.compile(r"^[*#:;]+[ \t]*")
# Templates for pronunciation, coordinates and the like vanish and leave "(; born 1970)" or "()".
_PAREN_START = re.compile(r"\((?:[ \t]*[;,])+[ \t]*")
_EMPTY_PAREN = re.compile(r"[ \t]*\([ \t]*\)")
_BLANKS = re.compile(r"[ \t\u00a0]+")


def wiki_to_text(markup: str) -> str:
    """Return the plain text of one article.

    Args:
        markup: the article's source, as in the ``<text>`` element of a dump.

    Returns:
        Paragraphs separated by one empty line; empty if the article has no text.

    Raises:
        DatasetError: gensim is not installed.
    """
    try:
        from gensim.corpora.wikicorpus import filter_wiki
    except ModuleNotFoundError as error:
        raise missing_package(
            "reading a Wikipedia dump", "gensim", "'megatron-ce-adaptor[longrun]'"
        ) from error
    return tidy_wiki_text(filter_wiki(markup))


def tidy_wiki_text(text: str) -> str:
    """Remove what gensim's ``filter_wiki`` leaves: marks of quotes, headings, lists and pictures.

    Headings under which nothing is left (lists of templates, mostly) are dropped with their section.
    """
    text = _GALLERY_LINE.sub("", _NAMED_PARAMETER.sub("", text))
    text = _MAGIC_WORD.sub("", _QUOTES.sub("", text))
    text = _EMPTY_PAREN.sub("", _PAREN_START.sub("(", text))

    lines: list[str] = []
    pending: list[tuple[int, str]] = []  # headings, (level, title), still without a line of text below them
    for raw_line in text.split("\n"):
        line = _BLANKS.sub(" ", raw_line).strip()
        heading = _HEADING.match(line)
        if heading:
            level = len(heading.group(1))
            pending = [(above, title) for above, title in pending if above < level]
            if heading.group(2):
                pending.append((level, heading.group(2)))
            continue
        line = _LIST_MARK.sub("", line).lstrip("|").strip()
        if not line:
            if lines and lines[-1]:
                lines.append("")
            continue
        for _, title in pending:
            if lines and lines[-1]:
                lines.append("")
            lines += [title, ""]
        pending = []
        lines.append(line)
    return "\n".join(lines).strip()
