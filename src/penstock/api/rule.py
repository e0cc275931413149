"""One cross-field rule, stated once: in Python for `penstock validate`, in CEL for the API server, as text for both.

Each model has its rows, ``rules``; `penstock.api.crd` emits them,
`penstock.api.manifests.reference` lists them, and a test evaluates the same manifests by a row's Python and by its CEL. Pure.

CEL is that of Kubernetes 1.29: ``[x].map(v, …)[0]`` binds a name, since that version has no ``cel.bind``. A null or
absent key makes ``has()`` false. A row reads a key as if its default were stored, and `penstock.api.crd.schema`
emits it for objects that hold only what was written. The API server takes the text of a number for
boundlessly long, so a message is one ``format`` with nothing appended; and its cost grows with the services' bound,
25, for each loop in a loop.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar, get_args

from pydantic import BaseModel
from pydantic.alias_generators import to_snake

ModelT = TypeVar("ModelT", bound=BaseModel)

KeyPath = tuple[str | int, ...]

_KEYS_READ = re.compile(r"\bself((?:\.[A-Za-z]\w*)+)(\()?")
"""Paths below ``self`` in CEL; with a bracket the last word is a function's name."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken cross-field rule.

    Attributes:
        path: Keys (as in the manifest) from the checked model to the value to blame.
        message: Value, bound and remedy.
        related: Further paths that the rule read; if one of them is invalid itself, the rule is moot.
    """

    path: KeyPath
    message: str
    related: tuple[KeyPath, ...] = ()


@dataclass(frozen=True, slots=True)
class Breach:
    """One place at which a model breaks a rule; None takes the rule's value.

    Attributes:
        values: For the verbs of the rule's text.
        path: Keys from the model to the value to blame.
        related: Further paths that the rule read there.
        remedy: A better one, such as the name that was probably meant.
    """

    values: tuple[object, ...] | None = None
    path: KeyPath | None = None
    related: tuple[KeyPath, ...] | None = None
    remedy: str | None = None


@dataclass(frozen=True, slots=True)
class Rule(Generic[ModelT]):
    """One row of the API's rules; it belongs to the model that holds all that it reads.

    Attributes:
        must: What must hold, as the reference says it and the API server where it cannot compute the message.
        text: What is wrong, with ``%d`` or ``%s`` for each of `values`.
        remedy: What to do, said after the text.
        cel: True for a valid object, ``self`` being the model or the value at `key`; None: CEL cannot express it.
        holds: Whether a model obeys it; with neither this nor `find` the field's own type refuses, or two versions are compared.
        find: Yields a model's breaches, where there may be several or other places to blame.
        values: CEL of the values that the text names; plain key paths are read from the model too.
        path: Key to blame, dotted, below the model; empty: the model itself.
        key: The one key that the rule checks, where the rule belongs to that key and not to its model.
        at: The full path of a key to blame that a schema cannot name, ``%s`` for the map's key ``k``.
        first: CEL of a list; `values` may call its first item ``k``.
        message: CEL of the message where no text with verbs can give it.
    """

    must: str
    text: str
    remedy: str
    cel: str | None
    holds: Callable[[ModelT], bool] | None = None
    find: Callable[[ModelT], Iterable[Breach]] | None = None
    values: tuple[str, ...] = ()
    path: str = ""
    key: str = ""
    at: str = ""
    first: str = ""
    message: str = ""

    def violations(self, model: ModelT) -> Iterator[Violation]:
        """Yield what is wrong with a model, each with a path relative to it."""
        breaches = self.find(model) if self.find else ()
        for breach in breaches if self.holds is None or self.holds(model) else (Breach(),):
            values = breach.values
            if values is None:
                values = tuple(_read(model, self.key or each.removeprefix("self.")) for each in self.values)
            what = self.text % tuple(_shown(each) for each in values)
            path = _keys(self.key or self.path) if breach.path is None else breach.path
            related = self._related(path) if breach.related is None else breach.related
            yield Violation(path, f"{what}; {breach.remedy or self.remedy}", related)

    def _related(self, blamed: KeyPath) -> tuple[KeyPath, ...]:
        """Every key that the CEL reads but the one to blame and the sections around others."""
        if self.key:
            return ()
        read = {
            _keys(path)[: -1 if call else None]
            for path, call in _KEYS_READ.findall(" ".join((self.cel or "", *self.values)))
        }
        return tuple(
            sorted(
                each
                for each in read - {blamed}
                if not any(each == other[: len(each)] for other in read - {each})
            )
        )

    def to_schema(self) -> dict[str, Any]:
        """Return the row as an entry of ``x-kubernetes-validations``."""
        entry = {
            "rule": self.cel,
            "message": f"must hold: {self.must}; {self.remedy}",
            "messageExpression": self.message_cel(),
        }
        return {**entry, "fieldPath": f".{self.path}"} if self.path else entry

    def message_cel(self) -> str:
        """Return the CEL that gives the message, identical to that of `violations`."""
        if self.message:
            return self.message
        said = quoted(f"{self.at}: {self.text}; {self.remedy}" if self.at else f"{self.text}; {self.remedy}")
        values = ("k", *self.values) if "%s" in self.at else self.values
        made = f"{said}.format([{', '.join(values)}])" if values else said
        return f"[{self.first}[0]].map(k, {made})[0]" if self.first else made


def immutable(key: str, what: str, *, kind: str = "graph") -> Rule[Any]:
    """Return the rule that a key of a kind keeps its value; only an API server sees both versions."""
    return Rule(
        key=key,
        must=f"the {what} is immutable",
        cel="self == oldSelf",
        text="%s was %s and is immutable",
        values=("self", "oldSelf"),
        remedy=f"keep it, or make a new {kind}",
    )


def dotted(path: KeyPath) -> str:
    """Return ``spec.env[0].name`` for ``("spec", "env", 0, "name")``."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).lstrip(".")


def quoted(text: str) -> str:
    """Return text as a CEL string."""
    return "'" + text.replace("'", "\\'") + "'"


def literal(value: object, annotation: Any) -> str:
    """Return a scalar as CEL; its field's type tells whether a whole number is CEL's int or double."""
    if isinstance(value, Enum):
        return quoted(str(value.value))
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return quoted(value)
    return repr(float(str(value))) if _holds_float(annotation) else str(value)


def _holds_float(annotation: Any) -> bool:
    return annotation is float or any(map(_holds_float, get_args(annotation)))


def _keys(path: str) -> tuple[str, ...]:
    return tuple(key for key in path.split(".") if key)


def _read(model: BaseModel, path: str) -> object:
    value: Any = model
    for key in _keys(path):
        value = getattr(value, _attribute(value, key))
    return value


def _attribute(model: BaseModel, key: str) -> str:
    """Return the attribute that a manifest's key fills; ``itl_seconds`` for ``itl``."""
    fields = getattr(type(model), "model_fields", {})
    return next((name for name, info in fields.items() if info.alias == key), to_snake(key))


def _shown(value: object) -> object:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return json.dumps(value)
    return value
