"""``python -m deepmemory.lab`` is ``dmu``."""

import os
import signal
import sys
from types import FrameType


def main() -> None:
    """The command, or one line on what to install for it: the library comes without the lab's packages."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # and nobody wants it to be ignored
        signal.signal(signal.SIGINT, interrupt)
    try:
        from deepmemory.lab import cli
    except ModuleNotFoundError as error:
        print(f"error: dmu needs {error.name}; install the lab with: pip install 'deepmemory[lab]'", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        sys.exit(130)
    cli.main()


interruptions = 0


def interrupt(_signal: int, _frame: FrameType | None) -> None:
    """The first Ctrl-C ends the command in good order, the second asks for patience, the third ends it at once."""
    global interruptions
    interruptions += 1
    if interruptions == 1:
        raise KeyboardInterrupt
    if interruptions > 2:
        os._exit(130)
    os.write(2, b"\nstopping already; Ctrl-C once more ends the command at once, and what is recorded is safe\n")


if __name__ == "__main__":
    main()
