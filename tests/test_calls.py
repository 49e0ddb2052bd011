"""Compare the names, arguments and defaults of public calls in Python, as magics and as commands."""

from __future__ import annotations

from call_table import (
    NO_COMMAND,
    ONLY_PYTHON,
    OTHER_ARGUMENTS,
    PAGE,
    REQUIRED,
    calls,
    forms_of,
    in_python,
    lines,
    table,
)


def test_the_page_of_calls_is_up_to_date() -> None:
    assert PAGE.read_text() == table(), "run python tests/doubles/call_table.py"


def test_every_function_is_a_magic_and_a_command_unless_a_reason_is_listed() -> None:
    functions = {name for name in calls() if "." not in name}
    without_magic = {name for name in functions if f"%{name}" not in forms_of(name)}
    without_command = {name for name in functions if f"colabkit {name}" not in forms_of(name)}
    assert without_magic == ONLY_PYTHON.keys()
    assert without_command == ONLY_PYTHON.keys() | NO_COMMAND.keys()
    assert {form.split()[-1].lstrip("%") for form in lines()} <= functions


def test_all_forms_of_a_call_have_the_same_arguments_and_defaults_unless_a_reason_is_listed() -> None:
    functions, different = calls(), set()
    for form, arguments in lines().items():
        python = in_python(functions[form.split()[-1].lstrip("%")])
        different |= {(form, name) for name in python.keys() ^ arguments.keys()}
        for name in python.keys() & arguments.keys():
            words, default = arguments[name]
            assert default == python[name], f"{form}: {name}"
            if words.startswith("--"):
                assert words == f"--{name.replace('_', '-')}", form
                assert default is not REQUIRED, form
            else:
                assert words == name.upper(), form
        if not form.startswith("%%"):
            common = [name for name in arguments if name in python]
            assert common == [name for name in python if (form, name) not in OTHER_ARGUMENTS], (
                f"{form} lists the arguments in another order"
            )
    assert different == OTHER_ARGUMENTS.keys()


def test_the_training_cell_has_the_defaults_of_the_loader_unless_a_reason_is_listed() -> None:
    loader, cell = in_python(calls()["Loader"]), lines()["%%train"]
    common = {name for name in cell.keys() & loader.keys() if ("%%train", name) in OTHER_ARGUMENTS}
    different = {name for name in common if cell[name][1] != loader[name]}
    assert common == {"batch_size", "shuffle", "seed", "device", "transform"}
    assert {name for name in common if OTHER_ARGUMENTS["%%train", name] != "For the Loader."} == different
