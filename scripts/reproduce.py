"""See ``python scripts/reproduce.py --help``."""

from workbench.reproduce import main

if __name__ == "__main__":
    main()
