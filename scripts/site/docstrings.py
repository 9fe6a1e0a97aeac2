"""An extension of Griffe: roles, formulas and tables of our docstrings, in Markdown.

Formulas become MathML while the site is built, so that pages need no script to show
them, and read without a network.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Module, NameResolutionError, Object
from latex2mathml.converter import convert

BLOCK = re.compile(
    r"^(?P<indent> *)\.\. math::(?P<same>[^\n]*)\n"
    r"(?P<body>(?:(?P=indent) +[^\n]*\n|\n)*)",
    re.MULTILINE,
)
TABLE = re.compile(r"^(=+)  +=+\n(.*?)^=+  +=+\n", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r":math:`([^`]+)`")
TOKEN = re.compile(r"\\\||\\[a-zA-Z]+| [-+=] |.")
# What the converter takes for a product of letters, and what it sets without spaces.
WORD = re.compile(r"(?<![\\\w])(KL|old|new|past|rest|max)(?!\w)")
LOG = re.compile(r"((?<=[\w}\]])\s+)?\\log\b(\s+(?!\())?")
LONG = 60  # characters of a formula that does not fit into the line of a phone
ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):`(~?)([\w.]+)`")


def block(match: re.Match[str]) -> str:
    """A formula on lines of its own."""
    latex = " ".join((match["same"] + " " + match["body"]).split())
    return f"\n{match['indent']}{mathml(latex, 'block')}\n\n"


def table(match: re.Match[str]) -> str:
    """A table of two columns, the first as wide as its rule."""
    width, lines = len(match[1]), match[2].splitlines()
    rows = [f"| {line[:width].strip()} | {line[width:].strip()} |" for line in lines]
    return "\n".join(["| | |", "|---|---|", *rows]) + "\n"


def inline(match: re.Match[str]) -> str:
    """A formula within a line; Markdown takes one that begins a line for a block."""
    parts = [mathml(part, "inline") for part in pieces(match[1])]
    return f"<span>{'<wbr>'.join(parts)}</span>"


def pieces(latex: str) -> list[str]:
    """The parts of a long formula: a line may break after = + - outside of brackets."""
    latex = " ".join(latex.split())
    if len(latex) < LONG:
        return [latex]
    parts, depth, bars = [""], 0, 0
    for token in TOKEN.findall(latex):
        depth += (token in "([{") - (token in ")]}")
        bars += depth == 0 and token in (r"\|", "|")
        parts[-1] += token
        if token in (" - ", " + ", " = ") and depth == 0 and bars % 2 == 0:
            parts.append("")
    return parts


def mathml(latex: str, display: str) -> str:
    """A formula as MathML on one line."""
    # The converter knows \big by its sized forms only.
    latex = re.sub(r"\\([bB]igg?)(?![a-zA-Z])", r"\\\1l", latex)
    latex = LOG.sub(spaced, WORD.sub(r"\\mathrm{\1}", latex))
    return " ".join(convert(latex, display=display).split())


def spaced(match: re.Match[str]) -> str:
    r"""A logarithm with the thin spaces that TeX puts around it."""
    left, right = (r"\, " if space else "" for space in match.groups())
    return rf"{left}\log {right}"


def link(match: re.Match[str], place: Object) -> str:
    """A reference: a link where the name has a page, else code."""
    short, name = match.groups()
    label = name.rpartition(".")[2] if short else name
    try:
        name = place.resolve(name)
    except NameResolutionError:
        pass  # a full path, or a name of another package
    return f'<autoref optional identifier="{name}">`{label}`</autoref>'


def to_markdown(text: str, place: Object) -> str:
    """A docstring as Markdown."""
    text = re.sub(r"^( *)Example:$", r"\1Examples:", text, flags=re.MULTILINE)
    text = TABLE.sub(table, BLOCK.sub(block, text + "\n"))
    text = INLINE.sub(inline, text)
    return ROLE.sub(lambda match: link(match, place), text).rstrip("\n")


class Docstrings(Extension):
    """Rewrites every docstring once, when the package has been read."""

    def on_package(self, *, pkg: Module, **kwargs: Any) -> None:
        """Called by Griffe when all modules have been read."""
        self.rewrite(pkg)

    def rewrite(self, obj: Object) -> None:
        """The docstring of an object, and those of its members."""
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value, obj)
        for member in obj.members.values():
            if not member.is_alias:
                self.rewrite(member)
