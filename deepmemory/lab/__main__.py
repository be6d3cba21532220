"""``python -m deepmemory.lab`` is ``dmu``."""

import sys


def main() -> None:
    """The command, or one line on what to install for it: the library comes without the lab's packages."""
    try:
        from deepmemory.lab import cli
    except ModuleNotFoundError as error:
        print(f"error: dmu needs {error.name}; install the lab with: pip install 'deepmemory[lab]'", file=sys.stderr)
        sys.exit(2)
    cli.main()


if __name__ == "__main__":
    main()
