"""Units of systemd, read as systemd reads them."""

import re
import shlex
from dataclasses import dataclass


@dataclass(frozen=True)
class Unit:
    """Its settings, section by section; one that stands there twice has both values."""

    sections: dict[str, dict[str, list[str]]]

    def all(self, section, name):
        return self.sections.get(section, {}).get(name, [])

    def one(self, section, name):
        (value,) = self.all(section, name)
        return value

    @property
    def command(self):
        """What it starts, as words: specifiers and doubled dollars resolved."""
        words = shlex.split(self.one("Service", "ExecStart"))
        return [word.replace("%%", "%").replace("$$", "$") for word in words]


def parsed(text):
    """A unit's text as its settings; anything else than comments, sections and settings is refused."""
    sections, current = {}, None
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        if not line.strip() or line.startswith(("#", ";")):
            continue
        if section := re.fullmatch(r"\[([A-Za-z]+)\]", line):
            current = sections.setdefault(section[1], {})
        elif (setting := re.fullmatch(r"([A-Z]\w*)=(.*)", line)) and current is not None:
            current.setdefault(setting[1], []).append(setting[2].strip())
        else:
            raise ValueError(f"Expected a section or a setting, got {line!r}.")
    return Unit(sections)
