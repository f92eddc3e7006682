"""The language of episode filters: comparisons of columns, joined by ``and``, ``or`` and ``not``.

    return > 100 and end == terminated
    10 <= length < 500 and not (task contains "pick" or seed in (3, 7))
    score is null or `my column` != 'a b'

Text is parsed to a tree of the classes below, and nothing else happens with it: no name is looked up, and nothing
is executed. A word that is not a keyword is a column or text, depending on the columns of the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trajstore.errors import DataError

COMPARISONS = ("==", "!=", "<=", ">=", "<", ">")
MAX_LENGTH = 10_000  # characters of a filter
MAX_DEPTH = 64  # brackets and negations inside each other
MAX_DIGITS = 300  # of a number; more do not fit in a float
_KEYWORDS = frozenset({"and", "or", "not", "in", "is", "null", "contains", "true", "false"})
_TOKEN = re.compile(
    r"""\s*(?:
        (?P<number>[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?(?![\w.:-]))
      | (?P<text>"[^"]*"|'[^']*')
      | `(?P<column>[^`]+)`
      | (?P<symbol>==|!=|<=|>=|=|<|>|\(|\)|,)
      | (?P<word>[-+]?[A-Za-z0-9_][\w.:+-]*)
    )""",
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class Number:
    """A number, such as ``3`` or ``-1e-3``."""

    value: int | float


@dataclass(frozen=True, slots=True)
class Text:
    """Text in quotes."""

    value: str


@dataclass(frozen=True, slots=True)
class Truth:
    """``true`` or ``false``."""

    value: bool


@dataclass(frozen=True, slots=True)
class Word:
    """A word without quotes: a column if the table has one of this name, else text."""

    name: str
    is_column: bool = False  # it stood in backticks


Operand = Number | Text | Truth | Word


@dataclass(frozen=True, slots=True)
class Comparison:
    """``left operator right``."""

    operator: str  # one of COMPARISONS
    left: Operand
    right: Operand


@dataclass(frozen=True, slots=True)
class Contains:
    """``column contains text``, ignoring case."""

    column: Operand
    text: Operand


@dataclass(frozen=True, slots=True)
class IsIn:
    """``column in (value, value)``."""

    column: Operand
    values: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class IsNull:
    """``column is null``: the episode has no value."""

    column: Operand


@dataclass(frozen=True, slots=True)
class IsTrue:
    """A column of truth values on its own."""

    column: Operand


@dataclass(frozen=True, slots=True)
class Not:
    """The opposite of a condition."""

    inner: Condition


@dataclass(frozen=True, slots=True)
class All:
    """All of some conditions."""

    parts: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class Any:
    """At least one of some conditions."""

    parts: tuple[Condition, ...]


Condition = Comparison | Contains | IsIn | IsNull | IsTrue | Not | All | Any


def parse(text: str) -> Condition:
    """Parse a filter.

    Raises:
        DataError: It is not one; the message says where it went wrong.
    """
    if len(text) > MAX_LENGTH:
        raise DataError(f"filter of {len(text):,} characters; at most {MAX_LENGTH:,}")
    parser = _Parser(text, list(_tokens(text)))
    condition = parser.disjunction()
    parser.expect_end()
    return condition


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str  # number, text, column, symbol, keyword, word or end
    value: str
    position: int


def _tokens(text: str) -> Iterator[_Token]:
    position = 0
    while text[position:].strip():
        match = _TOKEN.match(text, position)
        if match is None:
            rest = text[position:].lstrip()
            raise DataError(f"filter {text!r:.200}: can't read {rest[:20]!r}; quote text with \" or '")
        kind = str(match.lastgroup)
        value, start = match[kind], match.start(kind)
        if kind == "word" and value.lower() in _KEYWORDS:
            kind, value = "keyword", value.lower()
        yield _Token(kind, value[1:-1] if kind == "text" else value, start)
        position = match.end()
    yield _Token("end", "", len(text))


class _Parser:
    """A recursive descent over the tokens of a filter; a method for each rule of the grammar."""

    def __init__(self, text: str, tokens: Sequence[_Token]) -> None:
        self._text = text
        self._tokens = tokens
        self._next = 0
        self._depth = 0

    def disjunction(self) -> Condition:
        parts = [self._conjunction()]
        while self._accept("or"):
            parts.append(self._conjunction())
        return parts[0] if len(parts) == 1 else Any(tuple(parts))

    def expect_end(self) -> None:
        if self._tokens[self._next].kind != "end":
            raise self._error("'and', 'or' or the end")

    def _conjunction(self) -> Condition:
        parts = [self._negation()]
        while self._accept("and"):
            parts.append(self._negation())
        return parts[0] if len(parts) == 1 else All(tuple(parts))

    def _negation(self) -> Condition:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise DataError(f"filter {self._text!r:.200}: nested deeper than {MAX_DEPTH} levels")
        try:
            if self._accept("not"):
                return Not(self._negation())
            if self._accept("("):
                inner = self.disjunction()
                self._expect(")")
                return inner
            return self._predicate()
        finally:
            self._depth -= 1

    def _predicate(self) -> Condition:
        left = self._operand()
        if self._accept("is"):
            is_negated = self._accept("not")
            self._expect("null")
            return Not(IsNull(left)) if is_negated else IsNull(left)
        if self._accept("contains"):
            return Contains(left, self._operand())
        if self._accept("not"):
            self._expect("in")
            return Not(self._membership(left))
        if self._accept("in"):
            return self._membership(left)
        return self._comparisons(left)

    def _comparisons(self, left: Operand) -> Condition:
        """``a < b``, or a chain such as ``1 < a <= 2``."""
        parts: list[Condition] = []
        while (operator := self._accept_comparison()) is not None:
            right = self._operand()
            parts.append(Comparison(operator, left, right))
            left = right
        if not parts:
            if not isinstance(left, Word):
                raise self._error("a comparison")
            return IsTrue(left)
        return parts[0] if len(parts) == 1 else All(tuple(parts))

    def _membership(self, column: Operand) -> IsIn:
        self._expect("(")
        values = [self._operand()]
        while self._accept(","):
            values.append(self._operand())
        self._expect(")")
        return IsIn(column, tuple(values))

    def _operand(self) -> Operand:
        token = self._tokens[self._next]
        found = _as_operand(token)
        if found is None:
            raise self._error("a column or a value")
        self._next += 1
        return found

    def _accept_comparison(self) -> str | None:
        token = self._tokens[self._next]
        operator = "==" if token.value == "=" else token.value
        if token.kind != "symbol" or operator not in COMPARISONS:
            return None
        self._next += 1
        return operator

    def _accept(self, value: str) -> bool:
        token = self._tokens[self._next]
        is_found = token.kind in ("symbol", "keyword") and token.value == value
        self._next += is_found
        return is_found

    def _expect(self, value: str) -> None:
        if not self._accept(value):
            raise self._error(repr(value))

    def _error(self, expected: str) -> DataError:
        token = self._tokens[self._next]
        got = "the end" if token.kind == "end" else repr(token.value[:40])
        at = f" at character {token.position + 1}" if token.kind != "end" else ""
        return DataError(f"filter {self._text!r:.200}: expected {expected}, got {got}{at}")


def _as_operand(token: _Token) -> Operand | None:
    match token.kind:
        case "number":
            if len(token.value) > MAX_DIGITS:
                raise DataError(f"a number of {len(token.value):,} digits; at most {MAX_DIGITS:,}")
            return Number(float(token.value) if re.search(r"[.eE]", token.value) else int(token.value))
        case "text":
            return Text(token.value)
        case "column":
            return Word(token.value, is_column=True)
        case "word":
            return Word(token.value)
        case "keyword" if token.value in ("true", "false"):
            return Truth(token.value == "true")
    return None
