"""A directory of notes over HTTP: `service.py CONFIG`. The configuration is checked before anything is served."""

import http.server
import json
import logging
import sys
from pathlib import Path


class Notes(http.server.BaseHTTPRequestHandler):
    """GET /health, /notes and /notes/NAME."""

    directory: Path
    suffix: str

    def do_GET(self):
        """Answer from what lies in the directory now."""
        names = sorted(path.stem for path in self.directory.glob(f"*{self.suffix}"))
        name = self.path.removeprefix("/notes/")
        if self.path == "/health":
            self.reply(200, "ok")
        elif self.path == "/notes":
            self.reply(200, "\n".join(names))
        elif name in names:
            self.reply(200, (self.directory / f"{name}{self.suffix}").read_text())
        else:
            self.reply(404, "no such note")

    def reply(self, status, text):
        """A plain text."""
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, text, *values):
        """To the log file."""
        logging.info(text, *values)


def main():
    """Read the configuration, check it, serve."""
    with open(sys.argv[1]) as file:
        config = json.load(file)
    host, _, port = config["listen"].partition(":")
    Notes.directory, Notes.suffix = Path(config["notes"]), config["suffix"]
    if not Notes.directory.is_dir():
        sys.exit(f"notes: {Notes.directory} is no directory")
    logging.basicConfig(filename=config["log"], level=logging.INFO)
    http.server.ThreadingHTTPServer((host, int(port)), Notes).serve_forever()


main()
