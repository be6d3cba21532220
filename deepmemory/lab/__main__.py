"""``python -m deepmemory.lab`` is ``dmu``."""

import os
import signal
import sys
from types import FrameType
from typing import NoReturn


def main() -> None:
    """Run the command, or say what to install for it: the library comes without the lab's packages."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where a script's & ignores it
        signal.signal(signal.SIGINT, interrupt)
    try:
        from deepmemory.lab import cli

        cli.main()
    except ImportError as error:
        if not interruptions and isinstance(error, ModuleNotFoundError):
            install = "install the lab with: pip install 'deepmemory[lab]'"
            print(f"error: dmu needs {error.name}; {install}", file=sys.stderr)
            sys.exit(2)
        if not interruptions:
            raise
        stop()  # packages that catch every exception while they are imported turn Ctrl-C into this
    except KeyboardInterrupt:
        stop()


def stop() -> NoReturn:
    """End after Ctrl-C."""
    print("\nstopped", file=sys.stderr)
    sys.exit(130)


interruptions = 0


def interrupt(_signal: int, _frame: FrameType | None) -> None:
    """The first Ctrl-C stops the command in an orderly way, the second asks for patience, the third kills it."""
    global interruptions
    interruptions += 1
    if interruptions == 1:
        raise KeyboardInterrupt
    if interruptions > 2:
        os._exit(130)
    os.write(2, b"\nstopping; press Ctrl-C once more to end at once (what is recorded is safe)\n")


if __name__ == "__main__":
    main()
