"""What the site makes from the code itself: commands, the fields of every file, allowed operators, measured tables.

A page holds a marker on a line of its own: `<!-- commands -->`, `<!-- schemas -->`, `<!-- operators -->`, or
`<!-- measured FILE column:format ... -->`, whose table has the rows of benchmarks/results/FILE.json that have every
column. A marker that finds nothing is a warning, which ends a strict build; a benchmark that is there and has not been
run yet says so on the page.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
MARKER = re.compile(r"^<!-- (commands|schemas|operators|measured)(?: (.*?))? -->$", re.MULTILINE)
log = logging.getLogger("mkdocs.hooks.prism_fast")


def on_page_markdown(markdown: str, **_: Any) -> str:
    return MARKER.sub(lambda match: MAKERS[match[1]](match[2] or ""), markdown)


# ------------------------------------------------------------------------------------------------------------ commands


def commands(_: str) -> str:
    from typer.main import get_command

    from prism_fast.cli.app import app

    return "\n\n".join(_command(name, command) for name, command in _leaves(get_command(app)))


def _leaves(group: Any, prefix: str = "") -> list[tuple[str, Any]]:
    found = []
    for name, command in group.commands.items():
        whole = f"{prefix}{name}"
        found += _leaves(command, f"{whole} ") if hasattr(command, "commands") else [(whole, command)]
    return found


def _command(name: str, command: Any) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    usage = " ".join([f"prism-fast {name}", *(p.name.upper() for p in arguments), *["[OPTIONS]"] * bool(options)])
    text = [f"## {name}", "", "```text", usage, "```", "", re.sub(r"\s*\n[ \t]*", "\n", command.help or "").strip(), ""]
    rows = [(f"`{p.name.upper()}`", "", p.help) for p in arguments]
    rows += [(", ".join(f"`{o}`" for o in [*p.opts, *p.secondary_opts]), _default(p), p.help) for p in options]
    text += ["| | default | |", "| --- | --- | --- |"]
    text += [f"| {names} | {default} | {_cell(said)} |" for names, default, said in rows]
    return "\n".join(text)


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    value = parameter.default
    if value is None or value is False or callable(value):
        return ""
    return f"`{getattr(value, 'value', value)}`"


def _cell(text: object) -> str:
    return str("" if text is None else text).replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


# ------------------------------------------------------------------------------------------------------------- schemas


def schemas(_: str) -> str:
    parts = []
    for path in sorted((ROOT / "docs" / "schemas").glob("*.schema.json")):
        schema = json.loads(path.read_text())
        name = path.name.removesuffix(".schema.json")
        parts.append(f"## {name}\n\n{_cell(schema.get('description'))}\n\n" + _fields(schema))
        for title, block in schema.get("$defs", {}).items():
            parts.append(
                f"### {title} ({name}) {{ #{name}-{title} }}\n\n{_cell(block.get('description'))}\n\n" + _fields(block)
            )
    return "\n\n".join(parts)


def _fields(block: dict[str, Any]) -> str:
    rows = ["| field | type | |", "| --- | --- | --- |"]
    for name, field in block.get("properties", {}).items():
        rows.append(f"| `{name}` | {_cell(_type(field))} | {_cell(field.get('description'))} |")
    return "\n".join(rows)


def _type(field: dict[str, Any]) -> str:
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "const" in field:
        return f"`{json.dumps(field['const'])}`"
    if "enum" in field:
        return " or ".join(f"`{json.dumps(value)}`" for value in field["enum"])
    if "anyOf" in field:
        return " or ".join(_type(each) for each in field["anyOf"])
    if field.get("type") == "array":
        return f"array of {_type(field.get('items', {}))}"
    return str(field.get("type", "any"))


# ----------------------------------------------------------------------------------------------------------- operators


def operators(_: str) -> str:
    from prism_fast.program.operators import OPERATORS

    classes: dict[str, list[str]] = {}
    reasons: dict[str, str] = {}
    for name, operator in OPERATORS.items():
        classes.setdefault(operator.kind, []).append(name.removeprefix("aten.").removesuffix(".default"))
        reasons.setdefault(operator.kind, operator.reason)
    table = [f"{len(OPERATORS)} operators in {len(classes)} classes:", "", "| class | how many | let in because |"]
    table += ["| --- | --- | --- |"]
    table += [f"| {kind} | {len(names)} | {_cell(reasons[kind])} |" for kind, names in classes.items()]
    lists = [f"**{kind}**: " + ", ".join(f"`{name}`" for name in sorted(names)) for kind, names in classes.items()]
    return "\n\n".join(["\n".join(table), *lists])


# ------------------------------------------------------------------------------------------------------------ measured


def measured(arguments: str) -> str:
    name, *columns = arguments.split()
    file = ROOT / "benchmarks" / "results" / f"{name}.json"
    if not file.is_file():
        if not (ROOT / "benchmarks" / f"{name}.py").is_file():
            log.warning("there is neither benchmarks/results/%s.json nor benchmarks/%s.py to make it", name, name)
        return f"*Not measured yet: `python -m benchmarks {name}`.*"
    document = json.loads(file.read_text())
    wanted = [column.partition(":") for column in columns]
    rows = [row for row in document["rows"] if all(row.get(key) is not None for key, _, _ in wanted)]
    if not rows:
        log.warning("benchmarks/results/%s.json has no row with %s", name, ", ".join(key for key, _, _ in wanted))
    machine = ", ".join(f"{key} {value}" for key, value in document["machine"].items())
    versions = ", ".join(f"{key} {value}" for key, value in document["versions"].items())
    table = ["| " + " | ".join(key.replace("_", " ") for key, _, _ in wanted) + " |", "|" + " --- |" * len(wanted)]
    table += ["| " + " | ".join(_cell(format(row[key], form)) for key, _, form in wanted) + " |" for row in rows]
    return "\n".join([*table, "", f"*`benchmarks/results/{name}.json`: {machine}; {versions}.*"])


MAKERS = {"commands": commands, "schemas": schemas, "operators": operators, "measured": measured}
