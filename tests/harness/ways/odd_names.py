"""Makes files whose names are markup, options, quotes or no text."""

for name in (b"a\nb", b"\xff\xfe", b"-rf", b"a'b\"c", b" ", b"x" * 255, b"\x1b[31m"):
    open(name, "w").close()
