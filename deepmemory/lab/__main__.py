"""``python -m deepmemory.lab`` is ``dmu``."""

from deepmemory.lab.cli import main

if __name__ == "__main__":
    main()
