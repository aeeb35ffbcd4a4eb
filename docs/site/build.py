"""Builds docs/ as a site: `python -m docs.site.build OUTPUT`. Every warning is an error; a link to nowhere is one.

It works on a copy, to which it adds the pages of the reference, written from the code. Left out: publishing it.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from docs.site.reference import pages

DOCS = Path(__file__).parents[1]
SITE = DOCS / "site"
ABOUT = {"CONTRIBUTING.md": "contributing.md", "SECURITY.md": "reporting.md", "CHANGELOG.md": "changelog.md"}
"""Pages of the root that belong to the site, and their names there: docs/security.md is another page."""


def main(arguments: list[str]) -> int:
    """Build the site in the directory that the command line names and return Sphinx's exit status."""
    if len(arguments) != 1:
        print("usage: python -m docs.site.build OUTPUT", file=sys.stderr)
        return 2
    from sphinx.cmd.build import build_main  # of the extra `docs`

    with tempfile.TemporaryDirectory(prefix="site-") as directory:
        source = Path(directory)
        gather(source)
        return build_main(
            ["-W", "--keep-going", "-q", "-c", str(SITE), "-d", f"{source}/.tree", str(source), *arguments]
        )


def gather(source: Path) -> None:
    """Copy what the site shows, and write what comes from the code."""
    shutil.copytree(DOCS, source, dirs_exist_ok=True, ignore=shutil.ignore_patterns("site", "__pycache__"))
    shutil.copy(SITE / "index.md", source / "index.md")
    for name, shown in ABOUT.items():
        text = (DOCS.parent / name).read_text().replace("](docs/", "](")
        (source / shown).write_text(text)
    (source / "reference").mkdir()
    for name, text in pages().items():
        (source / "reference" / f"{name}.md").write_text(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
