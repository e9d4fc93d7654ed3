"""How shells complete the command lines of both programs: bash, zsh and fish.

click asks a command what could come next, and has a script for each shell that tells it to the
shell. The scripts here do the same for names that may hold anything: keys have spaces, commas and
colons, at which click's own scripts would cut them.

What is completed is looked up on disk, within a fraction of a second, and without torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import TypeAlias

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ZshComplete,
    add_completion_class,
    split_arg_string,
)

from tierstore.engine.directories import chosen_directory
from tierstore.system.objects import MARKER

Items: TypeAlias = "list[CompletionItem[str]]"

DIRECTORY = "dir"
"""The type of an item that more follows: no space after it."""
STORE = "store"
"""The type of a directory that is a store's."""
FILE = "file"
"""The type of the item that stands for all files: the shell lists them itself."""

_SPECIAL = re.compile(r"[^\w@%+:=,./-]")
_BASH = r"""%(complete_func)s() {
    local line
    COMPREPLY=()
    while IFS= read -r line; do
        case $line in
            file,*) compopt -o default ;;
            dir,*) compopt -o nospace; COMPREPLY+=("${line#*,}") ;;
            *,*) COMPREPLY+=("${line#*,}") ;;
        esac
    done < <(env COMP_WORDS="${COMP_LINE:0:COMP_POINT}" COMP_BREAKS="$COMP_WORDBREAKS" \
%(complete_var)s=bash_complete "$1")
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""
_ZSH = r"""#compdef %(prog_name)s

%(complete_func)s() {
    local -a plain described directories response
    local type key descr
    (( ! $+commands[%(prog_name)s] )) && return 1
    response=("${(@f)$(env COMP_WORDS="${words[*]}" COMP_CWORD=$((CURRENT-1)) \
%(complete_var)s=zsh_complete %(prog_name)s)}")
    for type key descr in ${response}; do
        case $type in
            file) _path_files -f ;;
            dir) directories+=("$key") ;;
            *) if [[ $descr == _ ]]; then plain+=("$key"); else described+=("$key:$descr"); fi ;;
        esac
    done
    (( $#described )) && _describe -V unsorted described -U
    (( $#plain )) && compadd -U -V unsorted -a plain
    (( $#directories )) && compadd -U -Q -S '' -V directories -a directories
    return 0
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    %(complete_func)s "$@"
else
    compdef %(complete_func)s %(prog_name)s
fi
"""
_FISH = r"""function %(complete_func)s
    for item in (env %(complete_var)s=fish_complete COMP_WORDS=(commandline -cp) \
COMP_CWORD=(commandline -t) %(prog_name)s)
        set -l parts (string split -m 1 "," -- $item)
        if test "$parts[1]" = file
            __fish_complete_path (commandline -ct)
        else
            echo $parts[2]
        end
    end
end
complete --no-files --keep-order --command %(prog_name)s --arguments "(%(complete_func)s)"
"""


def enable_completion() -> None:
    """Have click use the scripts of this module, in this process: for a program's own start."""
    for kind in (Bash, Zsh, Fish):
        add_completion_class(kind)


# Shells -------------------------------------------------------------------------------------------


class Bash(BashComplete):
    """bash, told by its whole line: the words that it splits at colons cannot be put together."""

    source_template = _BASH

    def get_completion_args(self) -> tuple[list[str], str]:
        """The words before the one that is typed, and that one."""
        line = os.environ["COMP_WORDS"]
        words = split_arg_string(f"{line}x")  # it shows whether a new word begins at the end
        names = (i for i, word in enumerate(words) if os.path.basename(word) == self.prog_name)
        begin = next(names, 0) + 1
        return words[begin:-1], words[-1][:-1]

    def format_completion(self, item: CompletionItem[str]) -> str:
        """What bash puts in place of what it takes for the word: what follows the last break."""
        value = item.value
        quote = _open_quote(os.environ["COMP_WORDS"])
        if not quote:
            _, typed = self.get_completion_args()
            breaks = [c for c in ":=" if c in os.environ.get("COMP_BREAKS", "")]
            begin = max((typed.rfind(c) + 1 for c in breaks), default=0)
            value = _quoted(value[begin:], tilde=item.type in (DIRECTORY, STORE))
        elif quote == '"':
            value = re.sub(r'([$`"\\])', r"\\\1", value)
        return f"{item.type},{value}"


class Zsh(ZshComplete):
    """zsh, which quotes by itself, but for directories: a `~` is none any more if it is quoted."""

    source_template = _ZSH

    def format_completion(self, item: CompletionItem[str]) -> str:
        """Three lines: type, value, help."""
        if item.type == DIRECTORY:
            return f"{item.type}\n{_quoted(item.value, tilde=True)}\n_"
        if item.type == STORE:
            item = CompletionItem(os.path.expanduser(item.value), STORE, item.help)
        return super().format_completion(item)


class Fish(FishComplete):
    """fish, which quotes by itself."""

    source_template = _FISH


def _open_quote(line: str) -> str:
    """The quotation mark that is open at the end of a line; an empty text if none is."""
    quote, escaped = "", False
    for character in line:
        if escaped:
            escaped = False
        elif character == "\\" and quote != "'":
            escaped = True
        elif quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
    return quote


def _quoted(text: str, *, tilde: bool) -> str:
    """The text as a shell reads it back. `tilde`: one at the beginning is the user's directory."""
    begin = 1 if tilde and text.startswith("~") else 0
    return text[:begin] + _SPECIAL.sub(r"\\\g<0>", text[begin:])


# What directories there are -----------------------------------------------------------------------


def typed_path(text: str) -> str:
    """The path that somebody means who has typed this: no shell has looked at it yet."""
    return os.path.expandvars(os.path.expanduser(text))


def is_store(directory: str) -> bool:
    """Whether a directory looks like a store's."""
    return os.path.isfile(os.path.join(directory, MARKER))


def directories(_: click.Context, __: click.Parameter | None, incomplete: str) -> Items:
    """Directories: those of stores first, and of these the one for who names none."""
    parent, begin = os.path.split(incomplete)
    stores: list[str] = []
    others: list[str] = []
    for name in _directories_in(typed_path(parent) or ".", begin):
        path = os.path.join(parent, name)
        (stores if is_store(typed_path(path)) else others).append(path)
    default = chosen_directory(None)
    if default.startswith(typed_path(incomplete)) and is_store(default):
        stores = [default, *(path for path in stores if not _is_same(path, default))]
    return [
        *(CompletionItem(path, STORE, "a store") for path in stores),
        *(CompletionItem(f"{path}/", type=DIRECTORY) for path in others),
    ]


def _is_same(path: str, other: str) -> bool:
    with suppress(OSError):
        return os.path.samefile(typed_path(path), other)
    return False


def _directories_in(parent: str, begin: str) -> Iterator[str]:
    """Names of directories that begin so; hidden ones if that much is said."""
    with suppress(OSError), os.scandir(parent) as entries:
        names = [entry.name for entry in entries if entry.name.startswith(begin) and _is_dir(entry)]
        yield from sorted(n for n in names if n.isprintable() and (begin or not n.startswith(".")))


def _is_dir(entry: os.DirEntry[str]) -> bool:
    with suppress(OSError):
        return entry.is_dir()
    return False


def files(_: click.Context, __: click.Parameter | None, incomplete: str) -> Items:
    """Files, as the shell lists them."""
    return [CompletionItem(incomplete, type=FILE)]
