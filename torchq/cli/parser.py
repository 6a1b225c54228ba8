"""A parser that suggests what was meant, and scripts that complete what is typed."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Mapping
from typing import NoReturn

__all__ = ["SHELLS", "Parser", "completion_script"]

SHELLS = ("bash", "zsh", "fish")
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` whose errors suggest close names.

    Attributes:
        children: the parsers of its commands.
    """

    children: Mapping[str, argparse.ArgumentParser] = {}

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and what may be meant, and exit with code 2."""
        known = set(_OPTION.findall(self.format_help())) | set(self.children)
        for child in self.children.values():
            known |= set(_OPTION.findall(child.format_help()))
        wrong = re.findall(r"invalid choice: '([^']+)'", message)
        wrong += re.findall(r"unrecognized arguments: (\S+)", message)
        choices = re.findall(r"choose from (.*)\)", message)
        named = {name.strip(" '") for text in choices for name in text.split(",")}
        close = [c for w in wrong for c in difflib.get_close_matches(w, sorted(known | named), n=2)]
        suggestion = f". Did you mean {' or '.join(close)}?" if close else ""
        self.exit(2, f"{self.prog}: error: {message}{suggestion}\nSee {self.prog} --help\n")


def completion_script(shell: str, commands: Mapping[str, argparse.ArgumentParser]) -> str:
    """Return a script that completes commands and options.

    Args:
        shell: one of :data:`SHELLS`.
        commands: name -> parser.
    """
    options = {n: sorted(set(_OPTION.findall(p.format_help()))) for n, p in commands.items()}
    if shell == "fish":
        lines = ["complete -c torchq -f"]
        for name, found in options.items():
            lines.append(f"complete -c torchq -n __fish_use_subcommand -a {name}")
            lines += [
                f"complete -c torchq -n '__fish_seen_subcommand_from {name}' -l {option[2:]} -r -F"
                for option in found
            ]
        return "\n".join(lines)
    cases = "\n".join(
        f'    {name}) words="{" ".join(found)}" ;;' for name, found in options.items()
    )
    head = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    return f"""{head}_torchq() {{
  local words="{" ".join(options)}" current="${{COMP_WORDS[COMP_CWORD]}}"
  [ "$COMP_CWORD" -gt 1 ] && case "${{COMP_WORDS[1]}}" in
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _torchq torchq"""
