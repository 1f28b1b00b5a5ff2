"""Chat templates: messages to text, and messages to token ids that no message can forge.

**Rendering** runs the model's Jinja template in a sandbox with bounds on time, on the length of
every string and on the length of the result.

**Safe encoding.** The plain way, to render and then tokenise the text with control tokens switched
on, lets a message that contains ``<|im_end|>`` end its own turn. The usual repairs mark the
*messages*: they wrap or escape what users wrote and look for the marks afterwards, and have been
broken by text that imitates a mark and by templates that trim, slice or search what was escaped.
Here the *template* is marked instead, which its author wrote and nobody else can reach:

1. The template is parsed. In its string constants and literal text each control token is replaced
   by a *mark*: one private-use character that stands for that token. Values such as ``bos_token``
   are replaced likewise. Messages are passed in as they are, so ``in``, ``startswith``, ``split``,
   ``trim`` and slices work on what the user wrote.
2. Marks are drawn at random from 131,068 characters, and none of them may occur in the messages,
   tools or variables of the request; if one does, new marks are drawn. (Filters that could turn
   other text into such a character, as ``striptags`` does by decoding entities, are not offered.)
3. The template is run. In its result a mark is that control token and **everything else is plain
   text**, encoded with control tokens switched off. Text next to text is encoded as one piece, so
   merges across the border between template and message come out as they do for the whole string.

So control tokens come from places where the template spells them, and from nowhere else: a failure
to recognise one costs fidelity, never safety. A control token pieced together from user text, or
from user text and template text (``<|im_`` and ``end|>``), stays text. One that a template builds
around the *role* (``'<|' + message.role + '|>'``) is recognised if the role is one of `ROLES`. A
template that builds control tokens in some other way is refused by `ChatTemplate.encode`, which
first renders a harmless conversation and looks for control tokens that carry no mark.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2 import nodes
from jinja2.environment import Template
from jinja2.optimizer import optimize
from jinja2.visitor import NodeTransformer

from atlas import template_sandbox
from atlas.errors import ChatTemplateError
from atlas.template_sandbox import BOUNDED_BINOPS, FOLDED_BINOPS, Sandbox, template_errors

if TYPE_CHECKING:
    from atlas.tokenizer import Tokenizer

ROLES = (
    *("system", "user", "assistant", "tool", "developer", "function", "model", "ipython"),
    *("environment", "observation", "context"),
)
MAX_TEMPLATE_CHARS = 1 << 20
_MAX_DEPTH = 64

# Planes 15 and 16, without their two noncharacters each.
_MARKS = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
_PROBE_ROLES = (("system", "user", "assistant", "user"), ("user", "assistant", "user"), ("user",))


class ChatTemplate:
    """A model's chat template.

    Parameters
    ----------
    source : str
        Jinja source, at most 2**20 characters.
    bos_token, eos_token : str or None
        Values of the variables of these names.
    **special_tokens : str or None
        Further named tokens, such as ``pad_token``.

    Raises
    ------
    ChatTemplateError
        If the source does not compile.

    Notes
    -----
    Offered to templates, as transformers does: loop controls, ``{% generation %}``, ``tojson``
    without HTML escapes, ``raise_exception`` and ``strftime_now``. Rendering takes at most
    `MAX_RENDER_S` and `MAX_RENDERED_CHARS`. An instance may be used from several threads; they take
    turns.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        **special_tokens: str | None,
    ) -> None:
        if not isinstance(source, str) or len(source) > MAX_TEMPLATE_CHARS:
            given = f"{len(source)} characters" if isinstance(source, str) else repr(source)[:80]
            raise ChatTemplateError(
                f"chat template: {given}; allowed: a string of at most {MAX_TEMPLATE_CHARS}"
            )
        tokens = {"bos_token": bos_token, "eos_token": eos_token, **special_tokens}
        self.source = source
        self.special_tokens = {name: text for name, text in tokens.items() if text is not None}
        self._lock = threading.RLock()
        self._sandbox = Sandbox()
        tree = self._parse()
        self._takes_parts = _iterates_over_content(tree)
        self._plain = self._compile(tree, _Rewriter())
        self._marked: tuple[Tokenizer, _MarkedTemplate] | None = None

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer, name: str = "default") -> ChatTemplate:
        """Return one of the templates that came with a tokenizer.

        Raises
        ------
        ChatTemplateError
            If it has none of that name, or if the template does not compile.
        """
        source = tokenizer.chat_templates.get(name)
        if source is None:
            known = ", ".join(sorted(tokenizer.chat_templates)) or "none"
            raise ChatTemplateError(f"the model has no chat template {name!r}; it has: {known}")
        return cls(source, **tokenizer.special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        **variables: object,
    ) -> str:
        """Return the conversation as text. To feed a model, use `encode`.

        Parameters
        ----------
        messages : sequence of mappings
            Each with ``role`` (a string) and ``content``: a string or a list of
            ``{"type": "text", "text": …}``, which are joined by newlines unless the template
            iterates over them itself. A message with ``tool_calls`` may have no content. Other keys
            are passed on.
        add_generation_prompt : bool
            End with the header of the assistant's turn.
        tools : sequence of mappings or None
            JSON schemas.
        **variables
            Passed on to the template; JSON-like values only.

        Raises
        ------
        ChatTemplateError
            If the messages are not as above, if the template refuses them or fails, or if a bound
            of time or size is exceeded.
        """
        inputs, _ = self._inputs(messages, add_generation_prompt, tools, variables)
        return self._run(self._plain, {**self.special_tokens, **inputs})

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        **variables: object,
    ) -> list[int]:
        """Return the conversation as token ids, with control tokens from the template only.

        No BOS or EOS is added to what the template itself writes. For arguments and errors see
        `render`; how it is made safe is told at the top of this module.
        """
        inputs, texts = self._inputs(messages, add_generation_prompt, tools, variables)
        marked = self._marked_for(tokenizer, texts)
        text = self._run(marked.template, {**marked.variables, **inputs})
        return tokenizer.encode_pieces(marked.marks.split(text))

    def _inputs(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, object]] | None,
        variables: Mapping[str, object],
    ) -> tuple[dict[str, Any], list[str]]:
        """Return the template's variables as plain copies, and every string among them."""
        reserved = {"messages", "tools", *self.special_tokens, *self._sandbox.globals}
        for name in variables:
            if name in reserved or name.startswith("_"):
                raise ChatTemplateError(f"template variable {name!r} is reserved")
        texts: list[str] = []
        inputs = {name: _plain_copy(value, name, texts) for name, value in variables.items()}
        inputs["messages"] = _checked_messages(messages, texts, takes_parts=self._takes_parts)
        inputs["add_generation_prompt"] = bool(add_generation_prompt)
        if tools is not None:
            inputs["tools"] = _plain_copy(tools, "tools", texts)
        return inputs, texts

    def _parse(self) -> nodes.Template:
        # Constants are joined first, so that a control token in two parts is seen as one.
        with template_errors("the chat template does not compile"):
            self._sandbox.intercepted_binops = FOLDED_BINOPS
            tree = optimize(self._sandbox.parse(self.source), self._sandbox)
        assert isinstance(tree, nodes.Template)
        return tree

    def _compile(self, tree: nodes.Template, rewriter: NodeTransformer) -> Template:
        with self._lock, template_errors("the chat template does not compile"):
            rewriter.visit(tree)
            tree.set_environment(self._sandbox)
            self._sandbox.intercepted_binops = BOUNDED_BINOPS
            code = self._sandbox.compile(tree, filename="<chat template>")
            return Template.from_code(self._sandbox, code, dict(self._sandbox.globals))

    def _run(self, template: Template, variables: dict[str, Any]) -> str:
        with self._lock, template_errors("the chat template failed"):
            self._sandbox.deadline = time.monotonic() + template_sandbox.MAX_RENDER_S
            parts, num_chars = [], 0
            for part in template.generate(variables):
                num_chars += len(part)
                self._sandbox.check_size(num_chars)
                parts.append(part)
            return "".join(parts)

    def _marked_for(self, tokenizer: Tokenizer, texts: Sequence[str]) -> _MarkedTemplate:
        """Return the template with marks that do not occur in the texts."""
        with self._lock:
            if self._marked is None or self._marked[0] is not tokenizer:
                marked = self._mark(tokenizer, ())
                self._refuse_unmarked(tokenizer, marked)
                self._marked = tokenizer, marked
            marked = self._marked[1]
        if any(marked.marks.occur_in(text) for text in texts):
            return self._mark(tokenizer, texts)
        return marked

    def _mark(self, tokenizer: Tokenizer, texts: Sequence[str]) -> _MarkedTemplate:
        marks = _Marks(tokenizer, [self.source, *self.special_tokens.values(), *texts])
        template = self._compile(self._parse(), _Marker(marks))
        variables: dict[str, Any] = {
            name: marks.mark(text) for name, text in self.special_tokens.items()
        }
        return _MarkedTemplate(template, {**variables, "_mark_role": marks.mark_role}, marks)

    def _refuse_unmarked(self, tokenizer: Tokenizer, marked: _MarkedTemplate) -> None:
        """Raise if the template makes control tokens of parts that carry no mark."""
        for roles in _PROBE_ROLES:
            messages = [{"role": role, "content": "x"} for role in roles]
            variables = {**marked.variables, "messages": messages, "add_generation_prompt": True}
            try:
                text = self._run(marked.template, variables)
            except ChatTemplateError:
                continue  # it wants other roles or more variables than the probe has
            for piece in marked.marks.split(text):
                unmarked = tokenizer.split_control(piece) if isinstance(piece, str) else []
                for token_id in unmarked:
                    if isinstance(token_id, int):
                        raise ChatTemplateError(
                            f"the chat template puts {tokenizer.id_to_token(token_id)!r} together "
                            "from parts, which cannot be told from a user's text; spell it out"
                        )

    def __repr__(self) -> str:
        return f"ChatTemplate({len(self.source)} characters, special_tokens={self.special_tokens})"


class _Marks:
    """One private-use character for each control token, and for the parts around a role.

    Parameters
    ----------
    tokenizer : Tokenizer
    texts : sequence of str
        Texts in which no mark may occur.
    """

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
        self._split_control = tokenizer.split_control
        self._text_of: dict[str, str] = {}
        self._id_of: dict[str, int] = {}
        self._mark_of: dict[int, str] = {}
        self._heads: dict[str, str] = {}
        self._tails: dict[str, str] = {}
        self._roles: dict[str, str] = {}
        free = _free_marks(texts)
        for text, token in tokenizer.control_tokens.items():
            mark = self._mark_of[token.token_id] = self._new(free, text)
            self._id_of[mark] = token.token_id
            for role in ROLES:
                head, _, tail = text.partition(role)
                if head and tail:
                    parts = ((self._heads, head), (self._roles, role), (self._tails, tail))
                    for marks, part in parts:
                        if part not in marks:
                            marks[part] = self._new(free, part)
                    self._id_of["".join(marks[part] for marks, part in parts)] = token.token_id
        longest_first = sorted(self._id_of, key=len, reverse=True)
        singles = "".join(self._text_of)
        self._any = re.compile(f"[{singles}]") if singles else None
        self._token = re.compile("|".join(longest_first)) if longest_first else None

    def _new(self, free: Iterator[str], text: str) -> str:
        mark = next(free, None)
        if mark is None:
            raise ChatTemplateError(
                "the messages leave no private-use character to mark tokens with"
            )
        self._text_of[mark] = text
        return mark

    def occur_in(self, text: str) -> bool:
        return self._any is not None and not text.isascii() and self._any.search(text) is not None

    def mark(self, text: str) -> str:
        """Replace the control tokens that a text of the template's author spells out."""
        pieces = self._split_control(text)
        return "".join(self._mark_of[p] if isinstance(p, int) else p for p in pieces)

    def mark_edges(self, text: str) -> str:
        """Replace a part of a control token that may stand next to a role."""
        for head in sorted(self._heads, key=len, reverse=True):
            if text.endswith(head):
                text = text[: -len(head)] + self._heads[head]
                break
        for tail in sorted(self._tails, key=len, reverse=True):
            if text.startswith(tail):
                return self._tails[tail] + text[len(tail) :]
        return text

    def mark_role(self, role: object) -> object:
        """Replace one of `ROLES`; anything else stays as it is."""
        return self._roles.get(role, role) if isinstance(role, str) else role

    def split(self, text: str) -> list[str | int]:
        """Split rendered text into plain text and the ids of control tokens."""
        pieces: list[str | int] = []
        end = 0
        for match in self._token.finditer(text) if self._token else ():
            pieces += [self._unmark(text[end : match.start()]), self._id_of[match[0]]]
            end = match.end()
        pieces.append(self._unmark(text[end:]))
        return [piece for piece in pieces if piece != ""]

    def _unmark(self, text: str) -> str:
        if self._any is None:
            return text
        return self._any.sub(lambda match: self._text_of[match[0]], text)


def _free_marks(texts: Sequence[str]) -> Iterator[str]:
    """Yield, in random order, the private-use characters that do not occur in the texts."""
    used = {character for text in texts if not text.isascii() for character in text}
    free = [mark for plane in _MARKS for mark in map(chr, plane) if mark not in used]
    source = random.SystemRandom()
    while free:
        index = source.randrange(len(free))
        free[index], free[-1] = free[-1], free[index]
        yield free.pop()


@dataclass(frozen=True, slots=True)
class _MarkedTemplate:
    """A template compiled with marks, and the variables that go with them."""

    template: Template
    variables: dict[str, Any]
    marks: _Marks


class _Rewriter(NodeTransformer):
    """Replace ``a ~ b``, which the sandbox cannot bound, by a call that it can."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        joined = nodes.Name("_concat", "load")
        return nodes.Call(joined, node.nodes, [], None, None).set_lineno(node.lineno)


class _Marker(_Rewriter):
    """Put marks into the text of a template."""

    def __init__(self, marks: _Marks) -> None:
        self._marks = marks

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        node.data = self._marks.mark(node.data)
        return node

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        if isinstance(node.value, str):
            node.value = self._marks.mark(node.value)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        node.nodes = [self._operand(child) for child in node.nodes]
        return super().visit_Concat(node)

    def visit_Add(self, node: nodes.Add) -> nodes.Node:
        node.left, node.right = self._operand(node.left), self._operand(node.right)
        return self.generic_visit(node)

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        node.nodes = [self._operand(child) for child in node.nodes]
        return self.generic_visit(node)

    def _operand(self, node: nodes.Expr) -> nodes.Expr:
        """Mark what stands next to other text: parts of control tokens, and roles."""
        if isinstance(node, nodes.TemplateData):
            node.data = self._marks.mark_edges(self._marks.mark(node.data))
        elif isinstance(node, nodes.Const) and isinstance(node.value, str):
            node.value = self._marks.mark_edges(self._marks.mark(node.value))
        elif _refers_to(node, "role"):
            marker = nodes.Name("_mark_role", "load")
            marked = nodes.Call(marker, [node], [], None, None)
            marked.set_lineno(node.lineno)
            return marked
        return node


def _refers_to(node: nodes.Node | None, name: str) -> bool:
    """Tell whether an expression is ``name``, ``x.name`` or ``x['name']``."""
    match node:
        case nodes.Name(name=found) | nodes.Getattr(attr=found):
            return bool(found == name)
        case nodes.Getitem(arg=nodes.Const(value=found)):
            return bool(found == name)
    return False


def _iterates_over_content(tree: nodes.Template) -> bool:
    for loop in tree.find_all(nodes.For):
        iterated: nodes.Node | None = loop.iter
        while isinstance(iterated, nodes.Filter):
            iterated = iterated.node
        if _refers_to(iterated, "content"):
            return True
    return False


def _checked_messages(
    messages: Sequence[Mapping[str, object]], texts: list[str], *, takes_parts: bool
) -> list[dict[str, Any]]:
    copied = _plain_copy(messages, "messages", texts)
    if not isinstance(copied, list) or not copied:
        raise ChatTemplateError("messages must be a list of at least one message")
    for index, message in enumerate(copied):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise ChatTemplateError(f"{where} is {message!r:.80}; expected a dict")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise ChatTemplateError(f"{where} has role {role!r:.80}; expected a string")
        if isinstance(content, list):
            parts = [_part_text(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
            if not takes_parts:
                message["content"] = "\n".join(parts)
        elif not isinstance(content, str) and (
            content is not None or not message.get("tool_calls")
        ):
            raise ChatTemplateError(
                f"{where} has content {content!r:.80}; expected a string or a list of text parts"
            )
    return copied


def _part_text(part: object, where: str) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
    raise ChatTemplateError(f'{where} is {part!r:.80}; supported: {{"type": "text", "text": …}}')


def _plain_copy(value: object, where: str, texts: list[str], depth: int = 0) -> Any:
    """Copy JSON-like data into plain types, noting every string."""
    if depth > _MAX_DEPTH:
        raise ChatTemplateError(f"{where} is nested deeper than {_MAX_DEPTH}")
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        text = str.__str__(value)  # of a subclass, its characters
        texts.append(text)
        return text
    if isinstance(value, Mapping):
        copied = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise ChatTemplateError(f"{where} has the key {key!r:.80}; expected a string")
            copied[_plain_copy(key, where, texts)] = _plain_copy(item, where, texts, depth + 1)
        return copied
    if isinstance(value, list | tuple):
        return [_plain_copy(item, where, texts, depth + 1) for item in value]
    raise ChatTemplateError(
        f"{where} holds a {type(value).__name__}; allowed: str, numbers, bool, None, list, dict"
    )
