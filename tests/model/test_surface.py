"""The twelve protocols against the interface table, in both directions."""

from __future__ import annotations

import ast
import csv
import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path

import pytest

import atlas.model
from atlas.errors import CapabilityError
from atlas.model import GROUPS, Model, Unavailable, require, unavailable

with Path(__file__).with_name("interface.csv").open(encoding="utf-8", newline="") as file:
    ROWS = list(csv.DictReader(file))

REQUIRED = ("forward", "logits", "lifecycle", "streams", "verify")
PRESENCE = "(model.ssm is not None)"

FindClasses = Callable[[str], list[type]]


def table_methods(group: str, first_issue: str | None = None) -> set[str]:
    return {
        row["method"]
        for row in ROWS
        if row["group"] == group
        and row["method"] != PRESENCE
        and first_issue in (None, row["first_issue"])
    }


def members(protocol: type) -> dict[str, object]:
    return {
        name: value
        for name, value in vars(protocol).items()
        if not name.startswith("_") and (callable(value) or isinstance(value, property))
    }


def function_of(member: object) -> Callable[..., object]:
    target = member.fget if isinstance(member, property) else member
    assert inspect.isfunction(target)
    return target


def parameters(member: object) -> list[inspect.Parameter]:
    return list(inspect.signature(function_of(member)).parameters.values())[1:]


def test_table_names_each_seed_method_once() -> None:
    seeds = [row["seed_method"] for row in ROWS if row["seed_method"] != "(ours)"]
    assert len(seeds) == len(set(seeds)) > 100
    assert {row["group"] for row in ROWS} == set(GROUPS)


@pytest.mark.parametrize("group", GROUPS)
def test_protocol_has_exactly_the_methods_of_the_table(group: str) -> None:
    assert set(members(GROUPS[group])) == table_methods(group)


@pytest.mark.parametrize("group", GROUPS)
def test_members_document_themselves(group: str) -> None:
    protocol = GROUPS[group]
    group_doc = inspect.getdoc(protocol) or ""
    assert len(group_doc.split()) >= 6
    for name, member in members(protocol).items():
        doc = inspect.getdoc(function_of(member)) or ""
        assert len(doc.split()) >= 7, f"{group}.{name} says too little"
        known = f"{doc}\n{group_doc}"
        for parameter in parameters(member):
            assert parameter.name in known, f"{group}.{name} does not explain {parameter.name}"


@pytest.mark.parametrize("group", GROUPS)
def test_members_are_typed(group: str) -> None:
    for name, member in members(GROUPS[group]).items():
        assert (
            inspect.signature(function_of(member)).return_annotation is not inspect.Signature.empty
        )
        for parameter in parameters(member):
            assert parameter.annotation is not parameter.empty, f"{group}.{name}({parameter.name})"


@pytest.mark.parametrize("group", GROUPS)
def test_groups_do_not_import_each_other(group: str) -> None:
    source = Path(atlas.model.__file__).with_name(f"{group}.py").read_text(encoding="utf-8")
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            imported.add(node.module)
            imported.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
    others = {f"atlas.model.{other}" for other in GROUPS if other != group}
    assert not imported & others
    assert GROUPS[group].__module__ == f"atlas.model.{group}"


def test_model_has_the_twelve_groups_and_its_configuration() -> None:
    fields = {field.name: field for field in dataclasses.fields(Model)}
    assert set(fields) == {*GROUPS, "config"}
    assert len(GROUPS) == 12
    for group in GROUPS:
        expected = dataclasses.MISSING if group in REQUIRED else None
        assert fields[group].default is expected, group


def test_presence_of_recurrent_state_is_the_group_itself() -> None:
    assert [row["group"] for row in ROWS if row["method"].startswith("(")] == ["ssm"]
    assert {field.name: field.default for field in dataclasses.fields(Model)}["ssm"] is None


@pytest.mark.parametrize("group", REQUIRED)
def test_required_groups_are_implemented(group: str, implementing_classes: FindClasses) -> None:
    assert implementing_classes(group), f"no class inherits {GROUPS[group].__name__}"


@pytest.mark.parametrize("group", GROUPS)
def test_implementations_define_every_member(group: str, implementing_classes: FindClasses) -> None:
    protocol = GROUPS[group]
    for cls in implementing_classes(group):
        ours = [base for base in cls.__mro__ if base not in protocol.__mro__]
        for name, member in members(protocol).items():
            found = next((vars(base)[name] for base in ours if name in vars(base)), None)
            where = f"{cls.__name__}.{name}"
            assert any(name in vars(base) for base in ours), f"{where} is the protocol's empty body"
            if isinstance(member, property):
                assert not callable(found), f"{where} is a fact: False, 0 or None, never an error"
            elif isinstance(found, Unavailable):
                assert name not in table_methods(group, "foundation"), where
                assert (found.group, found.method) == (group, name)
            else:
                theirs = [(p.name, p.kind, p.default) for p in parameters(member)]
                assert [(p.name, p.kind, p.default) for p in parameters(found)] == theirs, where


def test_unavailable_member_refuses_by_name() -> None:
    class Partial:
        prefill_twophase = Unavailable("forward")

    with pytest.raises(CapabilityError, match=r"model\.forward\.prefill_twophase"):
        Partial().prefill_twophase([1], object(), chunk_size=4)
    assert "draft.propose" in str(unavailable("draft", "propose"))


def test_require_returns_the_group_or_names_it() -> None:
    group = object()
    assert require(group, "ssm") is group
    with pytest.raises(CapabilityError, match="'ssm'"):
        require(None, "ssm")
