"""``python -m deepmemory.lab`` is ``dmu``."""

import os
import signal
import sys
from types import FrameType
from typing import NoReturn


def main() -> None:
    """Run the command, or say how to install the lab's packages: the library comes without them."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it is ignored after & in a script
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
    """Exit after Ctrl-C."""
    print("\nstopped", file=sys.stderr)
    sys.exit(130)


interruptions = 0


def interrupt(_signal: int, _frame: FrameType | None) -> None:
    """The first Ctrl-C stops the command in an orderly way, the second prints a message, the third exits at once."""
    global interruptions
    interruptions += 1
    if interruptions == 1:
        raise KeyboardInterrupt
    if interruptions > 2:
        os._exit(130)
    os.write(2, b"\nstopping; press Ctrl-C again to exit at once (everything recorded is safe)\n")


if __name__ == "__main__":
    main()
