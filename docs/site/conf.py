"""Sphinx's settings for the pages of docs/. docs/site/build.py calls it with a copy of them.

Nothing is loaded from other hosts: Furo has its own fonts, icons and search.
"""

from typing import Any

from pygments.lexers.special import TextLexer

project = "blackforge"
copyright = "the blackforge developers"
extensions = ["myst_parser"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = "blackforge"
html_show_sourcelink = False
html_copy_source = False
exclude_patterns: list[str] = []


def setup(app: Any) -> None:
    """Show a diagram's source as text: drawing it would need a script of another host."""
    app.add_lexer("mermaid", TextLexer)
    app.add_lexer("nginx", TextLexer)
