"""Completion scripts of the command for bash, zsh and fish, generated from the table of verbs."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator

from colabkit.notebook.verb_types import Option, Verb

COMPLETION = Verb(
    "completion",
    "print a script that completes this command in a shell",
    (Option("shell", "shell of the script", words=("bash", "zsh", "fish"), is_closed=True),),
    is_magic=False,
    more='Load it in the configuration of the shell, for example add eval "$(colabkit completion bash)" to ~/.bashrc, '
    'eval "$(colabkit completion zsh)" below compinit in ~/.zshrc, or colabkit completion fish | source to '
    "~/.config/fish/config.fish.",
)
"""The command that prints a completion script; it calls no public function."""

_JSON = Option("json", "print the report, or the error, as JSON", False, "switch")
_FILES = ("path", "folder", "object", "objects", "subject")


def completion_script(shell: str, verbs: Iterable[Verb]) -> str:
    """Return the completion script for `"bash"`, `"zsh"` or `"fish"`."""
    return "\n".join({"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](list(verbs)))


def _options(verb: Verb) -> Iterator[tuple[str, Option]]:
    for option in verb.options if verb is COMPLETION else (*verb.options, _JSON):
        if option.flag:
            yield option.flag, option
        if option.kind == "flag":
            yield option.flag.replace("--", "--no-", 1), option


def _takes_value(option: Option) -> bool:
    return option.kind not in ("flag", "switch")


def _bash(verbs: list[Verb]) -> Iterator[str]:
    yield "_colabkit() {"
    yield "    local word=${COMP_WORDS[COMP_CWORD]} last=${COMP_WORDS[COMP_CWORD-1]} words="
    # For bash, the = of --encoding=raw is a separate word.
    yield "    [[ $last == = ]] && last=${COMP_WORDS[COMP_CWORD-2]}"
    yield "    [[ $word == = ]] && word="
    yield "    case $COMP_CWORD:${COMP_WORDS[1]}:$last in"
    yield f"        1:*) words={shlex.quote(' '.join(['--help', '--version', *(verb.name for verb in verbs)]))} ;;"
    for verb in verbs:
        for flag, option in _options(verb):
            if _takes_value(option):
                yield f"        *:{verb.name}:{flag}) words={shlex.quote(' '.join(option.words))} ;;"
        flags = " ".join(["--help", *(flag for flag, _ in _options(verb))])
        closed = " ".join(word for one in verb.options if one.is_closed and not one.flag for word in one.words)
        other = f"; [[ $word == -* ]] || words={shlex.quote(closed)}"
        yield f"        *:{verb.name}:*) words={shlex.quote(flags)}{other} ;;"
    yield "    esac"
    yield '    COMPREPLY=($(compgen -W "$words" -- "$word"))'
    yield "}"
    # Without a match, bash completes file names.
    yield "complete -o default -F _colabkit colabkit"


def _zsh(verbs: list[Verb]) -> Iterator[str]:
    yield "#compdef colabkit"
    yield "_colabkit() {"
    yield "    local -a verbs=("
    yield from (f"        {shlex.quote(f'{verb.name}:{verb.help}')}" for verb in verbs)
    yield "    )"
    yield "    ((CURRENT == 2)) && { _describe verb verbs; return }"
    yield "    shift words; ((CURRENT--))"
    yield "    case $words[1] in"
    for verb in verbs:
        specs = [
            f"{flag}{'=' * _takes_value(option)}[{_plain(option.help)}]{_zsh_value(option)}"
            for flag, option in _options(verb)
        ]
        places = [option for option in verb.options if not option.flag]
        specs += [f"{number}{_zsh_value(option)}" for number, option in enumerate(places, 1)]
        quoted = " ".join(map(shlex.quote, ["--help[show the options]", *specs]))
        yield f"        {verb.name}) _arguments {quoted} ;;"
    yield "    esac"
    yield "}"
    # The script is loaded by `eval`, or found in $fpath and called as a function.
    yield 'if [[ ${funcstack[1]} == _colabkit ]]; then _colabkit "$@"; else compdef _colabkit colabkit; fi'


def _zsh_value(option: Option) -> str:
    if option.flag and not _takes_value(option):
        return ""
    words = f"({' '.join(option.words)})"
    return f":{option.name}:{words if option.words and option.kind not in _FILES else '_files'}"


def _fish(verbs: list[Verb]) -> Iterator[str]:
    yield "complete -c colabkit -e"
    yield "complete -c colabkit -n __fish_use_subcommand -f -l help -d 'show the verbs'"
    yield "complete -c colabkit -n __fish_use_subcommand -f -l version -d 'print the version'"
    for verb in verbs:
        yield f"complete -c colabkit -n __fish_use_subcommand -f -a {verb.name} -d {_fish_word(verb.help)}"
    for verb in verbs:
        head = f"complete -c colabkit -n 'contains -- {verb.name} (commandline -opc)[2]'"
        for flag, option in _options(verb):
            value = (" -r" if option.kind in _FILES else " -x") if _takes_value(option) else ""
            value += f" -a {_fish_word(' '.join(option.words))}" if option.words else ""
            yield f"{head} -l {flag[2:]}{value} -d {_fish_word(option.help)}"
        for option in verb.options:
            if option.is_closed and not option.flag:
                yield f"{head} -f -a {_fish_word(' '.join(option.words))}"


def _fish_word(text: str) -> str:
    return "'{}'".format(text.replace("\\", "\\\\").replace("'", "\\'"))


def _plain(text: str) -> str:
    return text.replace("[", "(").replace("]", ")").replace(":", " ")
