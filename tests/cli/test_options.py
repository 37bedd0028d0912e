"""Every option of every command: places are absolute, numbers have bounds, and no new option is left out of either."""

from __future__ import annotations

import functools
import inspect
import math
import typing
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from prism_fast.cli.app import app
from prism_fast.cli.campaign_command import _passed_on
from prism_fast.cli.options import BOUNDS, PLACES, Commands, bounds_of, place, settled, whole_numbers, within
from prism_fast.protocol.errors import UsageError

# Parameters of text that name no place. A new one goes here or into PLACES.
WORDS = {
    "access", "address", "bucket", "clock", "cost", "device", "dtype", "example", "fingerprint", "format", "id_key",
    "licence", "modes", "name", "only_seeds", "over", "pin", "revision", "seeds", "split", "subset", "text_key",
    "tokenizer", "widths", "worlds",
}  # fmt: skip


def commands(group: typer.Typer = app, above: tuple[str, ...] = ()) -> Iterator[tuple[str, Callable[..., Any]]]:
    for command in group.registered_commands:
        yield " ".join((*above, command.name or "")), command.callback
    for inner in group.registered_groups:
        name = inner.name if isinstance(inner.name, str) else inner.typer_instance.info.name
        yield from commands(inner.typer_instance, (*above, str(name)))


COMMANDS = dict(commands())


def kinds(function: Callable[..., Any]) -> dict[str, type]:
    """Each parameter's type, without None, list and Annotated."""
    found = {}
    for name, hint in typing.get_type_hints(inspect.unwrap(function)).items():
        options = [o for o in (typing.get_args(hint) or (hint,)) if o is not type(None)]
        if name != "return" and isinstance(options[0], type) and options[0] is not typer.Context:
            found[name] = options[0]
    return found


PARAMETERS = [(command, name, kind) for command, f in COMMANDS.items() for name, kind in kinds(f).items()]
NUMBERS = [(command, name, kind) for command, name, kind in PARAMETERS if kind in (int, float)]
PATHS = [(command, name) for command, name, kind in PARAMETERS if issubclass(kind, Path)]


def test_there_is_something_to_look_at():
    assert len(COMMANDS) > 20 and len(NUMBERS) > 30 and len(PATHS) > 40
    assert {"score", "profile mask", "shards convert", "corpus build", "program"} <= set(COMMANDS)


def test_every_command_s_values_are_settled():
    for command, function in COMMANDS.items():
        assert inspect.unwrap(function) is not function, f"{command}: register it on a Commands, not on a Typer"


def test_every_option_of_text_is_a_place_or_is_none():
    for command, name, kind in PARAMETERS:
        if kind is str:
            assert name in WORDS | PLACES.keys(), f"{command} --{name}: put it into options.PLACES, or into WORDS here"
        elif not issubclass(kind, Path | bool | int | float | Enum):
            pytest.fail(f"{command} {name}: {kind}")


def received(command: str, arguments: list[str]) -> dict[str, Any]:
    """What a command's function is called with: the command line, in front of a function that only looks."""
    seen: dict[str, Any] = {}
    original = inspect.unwrap(COMMANDS[command])

    @functools.wraps(original)
    def look(**values: Any) -> None:
        seen.update(values)

    watched = Commands()
    watched.command(command.split(" ")[-1])(look)
    result = CliRunner().invoke(watched, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return seen


def arguments_for(command: str, name: str, value: str) -> list[str]:
    """A command line in which `name` has `value`, and what else must be given something harmless."""
    given: list[str] = []
    for parameter in inspect.signature(inspect.unwrap(COMMANDS[command])).parameters.values():
        metadata = typing.get_type_hints(inspect.unwrap(COMMANDS[command]), include_extras=True).get(parameter.name)
        is_argument = any(isinstance(m, typer.models.ArgumentInfo) for m in typing.get_args(metadata))
        if parameter.name != name and parameter.default is not inspect.Parameter.empty:
            continue
        if typing.get_args(metadata) == () and parameter.name != name:
            continue  # the context
        text = value if parameter.name == name else "other"
        given += [text] if is_argument else [f"--{parameter.name.replace('_', '-')}={text}"]
    return given


@pytest.mark.parametrize(("command", "name"), PATHS)
def test_a_path_given_relative_is_absolute_in_the_command(command, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    value = received(command, arguments_for(command, name, "some/where"))[name]
    for path in value if isinstance(value, list) else [value]:
        assert path == tmp_path / "some/where"


@pytest.mark.parametrize(
    ("command", "name"), [(command, name) for command, name, kind in PARAMETERS if kind is str and name in PLACES]
)
def test_a_place_given_relative_is_absolute_in_the_command(command, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words, endings = PLACES[name]
    ending = endings[0] if endings else ""
    assert (
        received(command, arguments_for(command, name, f"some/where{ending}"))[name] == f"{tmp_path}/some/where{ending}"
    )
    for word in (*words, *(["gpt2"] if endings else [])):
        assert received(command, arguments_for(command, name, word))[name] == word


@pytest.mark.parametrize(("command", "name", "kind"), NUMBERS)
def test_a_number_out_of_its_bounds_is_one_sentence(command, name, kind):
    low, high = bounds_of(command, name)
    assert low <= high and math.isfinite(low) and math.isfinite(high)
    option = f"--{name.replace('_', '-')}"
    wrong = [str(kind(high) * 2), str(10**40)] + ([str(kind(low) - 1)] if low > -(2**62) else [])
    wrong += ["nan", "inf", "-inf"] if kind is float else []
    for value in wrong:
        try:
            received(command, arguments_for(command, name, value))
        except UsageError as error:
            assert str(error).startswith(f"{option} ") and "expected" in str(error) and error.exit_code == 2
        except AssertionError as error:  # typer's own bound, at which it exits with 2
            assert "Invalid value" in str(error) and option in str(error)
        else:
            pytest.fail(f"{command} {option}={value} was taken")
    for value in (kind(low), kind(high)):
        if command not in ("check",) or name != "steps":
            assert received(command, arguments_for(command, name, str(value)))[name] == value


def test_no_bound_is_kept_for_an_option_that_is_gone():
    named = {name for _, name, _ in NUMBERS}
    assert {entry.split(" ")[-1] for entry in BOUNDS} <= named


@pytest.mark.parametrize("text", ["", "1,", "a", "1.5", "18446744073709551616", "9223372036854775808", "-1", "1;2"])
def test_a_list_of_numbers_is_bounded_like_a_number(text):
    from prism_fast.cli.score_command import _seeds

    with pytest.raises(UsageError, match=r"^--seeds .*expected"):
        _seeds(text)
    assert whole_numbers("--x", "1,2", 0, 5, "1") == (1, 2)


def test_a_value_that_is_taken_is_taken_as_it_is():
    assert within("--x", 3, 1, 5) == 3
    assert place("") == "" and place("sample") == "sample"
    looked = settled(lambda context, flag, nothing: (context, flag, nothing), "none")
    assert looked(context="c", flag=True, nothing=None) == ("c", True, None)


def test_what_a_campaign_passes_on_is_absolute_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    passed = _passed_on(["--phase2", "more", "--seq-len", "64", "--phase2=more", "--seal=open"])
    assert passed == ["--phase2", f"{tmp_path}/more", "--seq-len", "64", f"--phase2={tmp_path}/more", "--seal=open"]


def test_places_of_the_environment_are_absolute_too(tmp_path, monkeypatch):
    from prism_fast.cli.options import placed

    monkeypatch.chdir(tmp_path)
    assert placed("data", "text") == f"{tmp_path}/text" and placed("val", None) is None
