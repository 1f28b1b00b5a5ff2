"""reStructuredText to plain text: what a reader sees, without the markup."""

from __future__ import annotations

import re

# Directives that print nothing where they stand; their bodies go with them.
_SILENT = {
    "index", "highlight", "sectionauthor", "moduleauthor", "codeauthor", "toctree", "image",
    "figure", "testsetup", "testcleanup", "tabularcolumns", "only", "contents", "module",
    "currentmodule", "program", "include", "literalinclude", "role", "default-role", "rubric",
    "audit-event", "audit-event-table", "miscnews", "raw", "opcode-list", "limited-api-list",
}  # fmt: skip
_LEADS = {
    "versionadded": "New in version {}.",
    "versionchanged": "Changed in version {}:",
    "deprecated": "Deprecated since version {}.",
    "deprecated-removed": "Deprecated since version {}.",
    "note": "Note: {}",
    "warning": "Warning: {}",
    "caution": "Caution: {}",
    "impl-detail": "CPython implementation detail: {}",
    "seealso": "See also: {}",
    "class": "class {}",
    "exception": "exception {}",
    "code-block": "",
    "productionlist": "",
    "doctest": "",
    "testcode": "",
    "testoutput": "",
}
_DIRECTIVE = re.compile(r"^(\s*)\.\. (?:([\w:-]+)::)?(.*)$")
_FIELD = re.compile(r"^\s+:[\w-]+:(\s|$)")
_UNDERLINE = re.compile(r"^([=\-~^*#\"'+])\1{2,}$")
_TITLED = re.compile(r":[\w:+-]+:`([^`<]+?)\s*<[^`>]*>`")
_ROLE = re.compile(r":([\w:+-]+):`([^`]+)`")
_LINK = re.compile(r"`([^`<]+?)\s*<[^`>]*>`_+")
_FUNCTIONS = {"func", "meth", "c:func"}
_NAMED = {"pep": "PEP ", "rfc": "RFC ", "issue": "bpo-", "gh": "gh-"}


def _role(match: re.Match[str]) -> str:
    role, text = match[1].removeprefix("py:"), match[2].lstrip("!")
    if text.startswith("~"):
        text = text.rpartition(".")[2]
    if role in _NAMED:
        return _NAMED[role] + text
    if role in {"ref", "doc"}:
        return text.replace("-", " ").replace("_", " ")
    return text + "()" if role in _FUNCTIONS and not text.endswith(")") else text


def inline(text: str) -> str:
    """Replace roles, links and literals by their text."""
    text = _TITLED.sub(r"\1", text)
    text = _ROLE.sub(_role, text)
    text = _LINK.sub(r"\1", text)
    return re.sub(r"``([^`]+)``", r"`\1`", text)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def plain_text(source: str) -> str:
    """The text of a reStructuredText document, titles underlined, code as it stands."""
    out: list[str] = []
    skip_deeper_than = -1  # inside a silent directive: its indentation
    after_directive = False
    for line in source.expandtabs().splitlines():
        line = line.rstrip()
        if skip_deeper_than >= 0:
            if not line or _indent(line) > skip_deeper_than:
                continue
            skip_deeper_than = -1
        directive = _DIRECTIVE.match(line)
        if directive:
            indent, name, rest = directive[1], directive[2], directive[3].strip()
            name = name.removeprefix("c:").removeprefix("py:") if name else name
            if name is None or name in _SILENT:  # a comment or a label, or nothing to print
                skip_deeper_than = len(indent)
                continue
            line = indent + _LEADS.get(name, "{}").format(rest)
            line, after_directive = line.rstrip(), True
            if not line:
                continue
        elif after_directive and _FIELD.match(line):  # an option of the directive
            continue
        else:
            after_directive = after_directive and bool(line) and _indent(line) > 0
        if _UNDERLINE.match(line) and (not out or not out[-1]):
            continue  # an overline, or a transition
        out.append(line)
    text = inline("\n".join(out))
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"::$", ":", text, flags=re.MULTILINE)).strip() + "\n"
