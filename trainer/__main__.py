"""The console script `trainer`, and `python -m trainer`. A wheel may be installed without what the trainer needs."""

import sys

OURS = ("proxy", "trainer")


def main() -> int:
    try:
        from trainer.commands.main import main as command
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in OURS:
            raise
        needs = f"trainer needs the package {error.name}, which is not installed; install blackforge[trainer]"
        print(f"error: {needs}", file=sys.stderr)
        return 2
    return command()


if __name__ == "__main__":
    sys.exit(main())
