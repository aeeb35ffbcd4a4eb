"""Runs a turn through the parser, for the tests of its formats."""

from proxy.parsing.turn_parser import Piece, Reasoning, Text, TurnParser


def pieces_of(parser: TurnParser, chunks: list[str]) -> list[Piece]:
    """Parse a turn that arrives in these chunks, and join neighbouring pieces of one kind."""
    joined: list[Piece] = []
    for piece in [p for chunk in chunks for p in parser.feed(chunk)] + parser.finish():
        if joined and isinstance(piece, Text) and isinstance(joined[-1], Text):
            joined[-1] = Text(joined[-1].text + piece.text)
        elif joined and isinstance(piece, Reasoning) and isinstance(joined[-1], Reasoning):
            joined[-1] = Reasoning(joined[-1].text + piece.text)
        else:
            joined.append(piece)
    return joined
